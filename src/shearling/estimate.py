"""Estimate the memory of a run from shapes, and its time from one timed pass and the speed of matrix products.

The counts follow the stages of `surgeon`: measure (forward, backward, Gram matrices), order (float64), refit (both
models layer by layer, Gram matrices, a solve in float64), polish. Other methods need less of both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shearling.costs import count_macs, weight_bytes
from shearling.engine.gram import Gram
from shearling.engine.head import predicts_next_token
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.losses import CHUNK
from shearling.engine.memory import cut_batches, logits_per_token, tokens_at_once
from shearling.engine.polish import OVERHEAD, Polish, planned_passes, seconds_of
from shearling.engine.precision import DTYPES, Precision, kernels, used_precision
from shearling.engine.recompute import MOST, is_too_much, kept_bytes
from shearling.engine.targets import HOST_BYTES, KEPT
from shearling.models.structure import Structure
from shearling.sample.sample import Sample

LIBRARIES = 9 * 10**8  # bytes of Python, torch, transformers, and of buffers that oneDNN keeps
BACKWARD = 2.3  # duration of forward and backward without weight gradients, in forward passes
TEACHER, STUDENT = 1.2, 2.0  # passes through the layers of each model in the refit
TRAINING = 5.0  # a dense pass of training with its optimiser, in which polish counts, in forward passes
CHECKS = 2  # additional batches for checks and agreement
TRIALS = 3
RANGE = 1.25  # the estimate has two ends if they differ by more than this factor
TRAINED = 6  # polish: gradients, averages and states of the weights it trains, in their sizes


@dataclass(frozen=True)
class Estimate:
    """Seconds (None on a GPU), and bytes: the peak, and its parts for weights and statistics.

    seconds  if the examples measured first are enough, and nothing is polished
    most_seconds  with all examples, and polish if the method may polish
    """

    seconds: float | None
    most_seconds: float | None
    memory: int
    weights: int
    statistics: int

    def __str__(self) -> str:
        return (
            f"estimate: {self._took()}{_gigabytes(self.memory)} of memory at most "
            f"(weights {_gigabytes(self.weights)}, statistics {_gigabytes(self.statistics)})"
        )

    def _took(self) -> str:
        if self.seconds is None or self.most_seconds is None:
            return ""
        if self.most_seconds < RANGE * self.seconds:
            return f"about {_duration(self.most_seconds)} and "
        return f"{_duration(self.seconds)} to {_duration(self.most_seconds)} and "


def estimate(
    structure: Structure,
    sample: Sample,
    lengths: Sequence[float],
    ratio: float = 1.0,
    precision: Precision = "float32",
    *,
    first: int | None = None,
    polish: Polish = "off",
) -> Estimate:
    """Estimate pruning to a ratio of the layers' costs; `lengths` are the tokens per example in each sublayer.

    first   examples that may turn out to be enough; default: all of the sample
    polish  the method's setting
    """
    weights = weight_bytes(structure.model)
    device = device_of(structure.model)
    statistics = 4 * sum(Gram.entries(side, device) for s in structure.sublayers for side in s.weight.shape)
    least = most = None
    if device.type == "cpu":
        share = 1.0 if first is None else first / sample.examples
        least, most = _seconds(structure, sample, lengths, ratio, precision, share, polish)
    looks = 1 if first is None or first >= sample.examples else 2  # the first one's sums are merged with the second's
    memory = _memory(structure, sample, ratio, weights, looks * statistics, precision, polish)
    return Estimate(least, most, memory, weights, statistics)


def _memory(
    structure: Structure,
    sample: Sample,
    ratio: float,
    weights: int,
    statistics: int,
    precision: Precision,
    polish: Polish,
) -> int:
    """The maximum over the stages measure, order, refit, polish and check."""
    longest = max(int(group.tokens.max()) for group in sample.groups)
    width = logits_per_token(structure.model)
    device, every = device_of(structure.model), sample.examples * longest
    tokens = min(max(longest, tokens_at_once(device, backward=True, precision=precision, logits=width)), every)
    kept = kept_bytes(structure, tokens)
    deepest = max(sum(1 for _ in stack.layers) for stack in structure.stacks)
    again = device.type == "cpu" and kept > MOST
    inside = kept if not again else kept // deepest + 4 * tokens * deepest * structure.sublayers[0].weight.shape[0]
    half = used_precision(structure.model, precision) == "bfloat16"
    head = 2 * width * int(structure.sublayers[-1].weight.shape[0]) if half else 0  # a bfloat16 copy of its weights
    part = min(tokens * width, CHUNK.get(device.type, CHUNK["cpu"]))
    logits = 2 * (2 if half else 4) * tokens * width + 2 * 8 * part  # and their gradient; a distribution in float64
    measuring = statistics + inside + logits + head
    widest = max(s.units * s.width for s in structure.sublayers)
    ordering = statistics + 3 * 8 * widest**2  # B, C, and a factor or a copy, in float64
    hidden = max(s.weight.shape[0] for s in structure.sublayers)
    states = 4 * 4 * round(sample.examples * (sample.mean_length or longest)) * hidden
    inner = 4 * 3 * min(tokens_at_once(device, backward=False, precision=precision), every) * widest  # in one layer
    left = int(ratio * widest)
    refitting = int(ratio * weights) + states + inner + (2 * 4 + 3 * 8) * left**2  # sums; a system and its factor
    checking = int(ratio * weights) + 16 * tokens * width  # the logits of both models, and their difference
    polishing = 0
    if seconds_of(polish) is not None or planned_passes(polish, ratio, structure.model):
        layers = sum(len(stack.layers) for stack in structure.stacks)
        seen = KEPT.itemsize * round(sample.examples * (sample.mean_length or longest)) * hidden * layers
        polishing = (1 + TRAINED) * int(ratio * weights) + min(HOST_BYTES, _copies(structure) * seen) + inside
    return LIBRARIES + weights + max(measuring, ordering, refitting, polishing, checking)


def _seconds(
    structure: Structure,
    sample: Sample,
    lengths: Sequence[float],
    ratio: float,
    precision: Precision,
    first: float,
    polish: Polish,
) -> tuple[float, float]:
    """With the share `first` of the examples and no polish, and with all of them and polish.

    Passes over the sample from a timed one; sums and solves from their operations and the measured speed.
    """
    batches = cut_batches(sample, device_of(structure.model), backward=True, logits=logits_per_token(structure.model))
    with frozen(structure.model), torch.no_grad(), kernels(structure.model, precision):
        began = time.perf_counter()
        run(structure.model, batches[len(batches) // 2], precision)
        forward = (time.perf_counter() - began) * (len(batches) + CHECKS)
    layers = count_macs(structure, lengths)
    head = logits_per_token(structure.model) * int(structure.sublayers[-1].weight.shape[0]) * lengths[-1]
    passes = BACKWARD + is_too_much(structure, batches) + layers / (layers + head) * (TEACHER + STUDENT * ratio)
    sums = solves = 0.0
    for s, length in zip(structure.sublayers, lengths, strict=True):
        rows, n, D = sample.examples * length * s.repeats, s.units * s.width, int(s.weight.shape[0])
        left = ratio * n
        sums += rows * (0.6 * n**2 + D**2 + 0.6 * left**2 + left * D + 2 * D**2)
        solves += 2.2 * n**3 + n**2 * D + left**3 / 3 + 6 * left**2 * D + 6 * D**3
    threads = torch.get_num_threads()
    summed = DTYPES.get(used_precision(structure.model, precision), torch.float32)
    each, once = forward * passes + sums / _speed(summed, threads), solves / _speed(torch.float64, threads)
    polishing = seconds_of(polish)
    if polishing is None and (planned := planned_passes(polish, ratio, structure.model)):
        # The student's passes, forward and backward, and the teacher's over the sample and over new noise.
        polishing = _copies(structure) * forward * (TRAINING * planned * (ratio + OVERHEAD) + 1 + planned / 4)
    certain = 0.0 if polish == "auto" else polishing or 0.0
    return first * each + once + certain, each + once + (polishing or 0.0)


def _copies(structure: Structure) -> int:
    """The tokens that polish sees, in samples: a language model writes as many again."""
    return 1 + predicts_next_token(structure.model)


@cache
def _speed(dtype: torch.dtype, threads: int) -> float:
    """Multiply-accumulates per second of a^T a on this CPU, timed once per process and thread count."""
    a = torch.ones(2048, 512, dtype=dtype)
    total = Gram.zeros(512, a.new_zeros((), dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    best = float("inf")
    for _ in range(TRIALS + 1):  # the first starts the threads
        began = time.perf_counter()
        total.add_(a)
        best = min(best, time.perf_counter() - began)
    return a.numel() * len(total) / best


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
