"""Distillation of a student from a teacher: steps, validation, and the best state so far.

    loss = distance of the outputs + weight * mean over layers of || s - t ||^2 / || t - mean t ||^2

over the real tokens of each layer's hidden states s and t.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.engine.cuda_graph import Replays
from shearling.engine.distance import output_distance, output_scale
from shearling.engine.distributed import add_up, rank_and_world
from shearling.engine.hooks import device_of
from shearling.engine.memory import LOGITS, out_of_memory
from shearling.engine.precision import HalfWeights, Precision, has_bfloat16
from shearling.engine.progress import Progress
from shearling.engine.targets import Bucket, Observed, States, buckets_of
from shearling.sample.sample import Sample

logger = logging.getLogger("shearling")

MOST_TOKENS = {"cpu": 8192, "cuda": 32768}  # per batch
HALF = (torch.float16, torch.bfloat16)
JUDGED = 4  # validation batches are this much larger, since they need no gradients
REFRESH = {"cpu": 4, "cuda": 2}  # passes with the same noise, about
HIDDEN = {"embedding": 1.0, "others": 10.0}  # weights of the hidden states, by head
BETAS = (0.9, 0.98)  # of AdamW: shorter averages for a few hundred steps


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters.

    rate      peak learning rate of AdamW, with a short warm-up and linear decay to zero; see `polish.recipe_for`
    examples  per batch
    tokens    of short examples, a batch has as many more
    hidden    weight of the hidden states against the outputs; None: 10, or 1 for embeddings
    similarities  weight of the similarities within a batch against the distance of embeddings
    warm_up   share of the steps
    noise     share of tokens replaced by those of other examples, redrawn every few passes, with the teacher's outputs
              as targets; covers more of the teacher's function than the sample
    """

    rate: float = 6e-4
    examples: int = 128
    tokens: int = 0
    hidden: float | None = None
    similarities: float = 1.0
    warm_up: float = 0.05
    noise: float = 0.1
    precision: Precision = "bfloat16"  # of the steps, if the hardware has it; validation uses the float32 weights


@contextmanager
def trainable(model: nn.Module) -> Iterator[dict[nn.Parameter, torch.dtype]]:
    """Make everything but embedding tables trainable, and convert half precision to float32; restored afterwards.

    Yields the trainable parameters with their original dtypes.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.dtype for tensor in tensors]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = {p: p.dtype for p in model.parameters() if id(p) not in tables}
    try:
        for tensor in tensors:
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
        for weight in weights:
            weight.requires_grad_()
        yield weights
    finally:
        for tensor, dtype in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(dtype)
        for weight in weights:
            weight.grad = None


class Distiller:
    """Trains a student on its teacher's outputs and hidden states, and keeps the best state by validation."""

    def __init__(
        self,
        teacher: Observed,
        student: Observed,
        sample: Sample,
        weights: dict[nn.Parameter, torch.dtype],
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.student, self.recipe = student, recipe
        self.config = student.structure.model.config
        self.device = device_of(student.structure.model)
        self.weights: list[Tensor] = list(weights)
        self.dtypes = list(weights.values())
        self.generator = torch.Generator().manual_seed(seed)
        self.most_tokens = MOST_TOKENS.get(self.device.type, MOST_TOKENS["cpu"])
        self.buckets = buckets_of(teacher, sample, self.most_tokens)
        judged = any(len(bucket.judging) for bucket in self.buckets)
        self.to_judge = [self._on_device(b.judging if judged else b.fit, self._size(b, JUDGED)) for b in self.buckets]
        self.to_fit = [self._on_device(b.fit, max(1, self.most_tokens // b.tokens)) for b in self.buckets]
        here = all(weight.device == self.device for weight in self.weights)
        self.replays = Replays(self.device, record=here and all(b.resident(self.device) for b in self.buckets))
        self._refresh()
        self.scale, self.variances = self._scales()
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)  # of the validation distance
        self.half = self._half_weights()
        self.rows: dict[int, Tensor] = {}  # fixed buffers from which recorded steps read the examples' indices
        self.start = [w.detach().clone() for w in self.weights]
        self.best_state = [w.clone() for w in self.start]
        self.before = self.best = self.judge()

    def train(self, passes: int, progress: Progress, deadline: float | None = None) -> tuple[int, str]:
        """Train for `passes` passes; returns (passes done, a note if it ended early)."""
        self.changing = [weight.data for weight in self.weights]  # the float32 weights, also while copies replace them
        self.optimiser = self._optimiser()
        draws = max(1, round(passes / REFRESH.get(self.device.type, REFRESH["cpu"])))
        refresh = -(-passes // draws)
        done = 0
        try:
            with self.replays.active():
                for number in range(passes):
                    if number and self.recipe.noise and number % refresh == 0:
                        self._refresh()
                    batches = self._shuffled()
                    for at, (bucket, rows) in enumerate(batches):
                        step = number * len(batches) + at
                        self._set_rate(step / (passes * len(batches)))
                        self.step(bucket, rows)
                        progress(step + 1, passes * len(batches))
                    done = number + 1
                    self._keep_if_better()
                    if deadline is not None and time.perf_counter() > deadline and done < passes:
                        return done, f"out of time after {done} of {passes} passes; the best state so far is kept"
        except KeyboardInterrupt:
            return done, f"interrupted after {done} of {passes} passes; the best state so far is kept"
        return done, ""

    def _optimiser(self) -> torch.optim.Optimizer:
        cuda = self.device.type == "cuda"
        dense = all(weight.is_contiguous() for weight in self.changing)  # the CPU's fused kernel ignores strides
        fused = cuda or (dense and self.device.type == "cpu")
        by_device: dict[torch.device, list[Tensor]] = {}  # the rate of a recorded step lies beside its weights
        for weight in self.changing:
            by_device.setdefault(weight.device, []).append(weight)
        rates = [torch.tensor(self.recipe.rate, device=device) if cuda else self.recipe.rate for device in by_device]
        return torch.optim.AdamW(
            [{"params": weights, "lr": rate} for weights, rate in zip(by_device.values(), rates, strict=True)],
            betas=BETAS, weight_decay=0.0, fused=fused, foreach=not fused, capturable=cuda,
        )  # fmt: skip

    def _refresh(self) -> None:
        """Draw new noise, and compute the teacher's states for it."""
        for number, bucket in enumerate(self.buckets):
            bucket.add_noise(self.recipe.noise, self.generator)
            for part, rows in enumerate(self.to_fit[number]):
                self.replays(("teacher", number, part), partial(bucket.fill, rows))

    def step(self, bucket: int, rows: Tensor) -> None:
        """One step on the examples `rows` of a bucket."""
        here = self.rows.setdefault(bucket, torch.empty_like(rows, device=self.device))
        here.copy_(rows)

        def step() -> None:
            found = zip(self.changing, self.gradients(self.buckets[bucket], here), strict=True)
            given = [(weight, gradient) for weight, gradient in found if gradient is not None]
            gradients = [gradient for _, gradient in given]
            if self.half is not None:
                gradients = [torch.empty_like(weight) for weight, _ in given]
                torch._foreach_copy_(gradients, [gradient for _, gradient in given])
            for (weight, _), gradient in zip(given, gradients, strict=True):
                same = gradient.stride() == weight.stride()
                weight.grad = gradient if same else torch.empty_like(weight).copy_(gradient)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            if self.half is not None:
                self.half.update()

        self.replays(("step", bucket), step)

    def gradients(self, bucket: Bucket, rows: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the loss; None for unused weights."""
        with nullcontext() if self.half is None else self.half.standing_in():
            return torch.autograd.grad(self.loss(bucket, rows), self.weights, allow_unused=True)

    def loss(self, bucket: Bucket, rows: Tensor) -> Tensor:
        """Distance of the outputs plus that of the hidden states, a scalar."""
        batch = bucket.pick(rows)
        wanted = bucket.wanted(rows, batch)
        found = self.student(batch if self.half is None else batch.floats_as(torch.bfloat16))
        distance = output_distance(
            self.config, found.outputs, wanted.outputs, batch, self.scale, similarities=self.recipe.similarities
        )
        weight = self.recipe.hidden
        if weight is None:
            weight = HIDDEN["embedding" if "embedding" in wanted.outputs else "others"]
        return distance if not weight else distance + weight * self.hidden_loss(found, wanted, bucket.real_tokens(rows))

    def hidden_loss(self, found: States, wanted: States, real: Sequence[Tensor | None]) -> Tensor:
        """Mean over layers of squared error / variance of the teacher's hidden states."""
        masks = {id(mask): (mask[:, :, None], mask.sum().clamp_min(1)) for mask in real if mask is not None}
        layers = zip(found.hidden, wanted.hidden, real, strict=True)
        errors = [squared_error(s, t, *masks.get(id(mask), ())).to(self.device) for s, t, mask in layers]
        return (torch.stack(errors) / self.variances).mean()

    @torch.no_grad()
    def judge(self) -> float:
        """Mean distance of the outputs over the held-out examples, or over all if there are none."""
        self.total.zero_()
        count = 0
        for number, bucket in enumerate(self.buckets):
            for part, rows in enumerate(self.to_judge[number]):
                self.replays(("judge", number, part), partial(self._judge, bucket, rows))
                count += len(rows)
        return float(self.total) / count

    def _judge(self, bucket: Bucket, rows: Tensor) -> None:
        batch = bucket.pick(rows)
        found, wanted = self.student(batch).outputs, bucket.wanted(rows, batch).outputs
        self.total += len(rows) * output_distance(self.config, found, wanted, batch, self.scale).double()

    def finish(self) -> bool:
        """Restore the best state, rounded to the student's dtype; returns whether it is better than the start.

        Processes take the same steps but may round differently: all get the weights of rank 0.
        """
        self._write([value.to(dtype) for value, dtype in zip(self.best_state, self.dtypes, strict=True)])
        self.best = self.judge() if self.best < self.before else self.before
        kept = self.best < self.before
        if not kept:
            self._write(self.start)
            self.best = self.before
        rank, world = rank_and_world()
        if world > 1:
            with torch.no_grad():
                for weight in self.weights:
                    weight.mul_(float(rank == 0))
                add_up([weight.data for weight in self.weights])
        return kept

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the student on errors."""
        try:
            yield
        except BaseException:
            self._write(self.start)
            raise

    def _keep_if_better(self) -> None:
        found = self.judge()
        if found < self.best:
            self.best = found
            with torch.no_grad():
                torch._foreach_copy_(self.best_state, self.weights)

    def _write(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for weight, value in zip(self.weights, state, strict=True):
                weight.copy_(value)

    def seconds_of_pass(self) -> float:
        """Estimate from one batch of every bucket; the first one also runs as a warm-up."""
        total = 0.0
        for number, bucket in enumerate([self.buckets[0], *self.buckets]):
            rows = torch.arange(min(len(bucket.batch), self._size(bucket)), device=self.device)
            start = time.perf_counter()
            self.gradients(bucket, rows)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if number:
                judging = len(bucket.judging) / 3  # forward only
                total += (time.perf_counter() - start) * (len(bucket.fit) + judging) / len(rows)
        return total

    def _half_weights(self) -> HalfWeights | None:
        """bfloat16 copies of the weights, if requested and supported by the model's code."""
        suits = self.recipe.precision == "bfloat16" and has_bfloat16(self.device)
        if not suits or any(weight.dtype != torch.float32 for weight in self.weights):
            return None
        self.half = HalfWeights(self.student.structure.model, self.weights)
        try:
            self.gradients(self.buckets[0], torch.zeros(1, dtype=torch.long, device=self.device))
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            logger.info("Polishing without bfloat16: %s", error)
            return None
        return self.half

    def _set_rate(self, share: float) -> None:
        """Linear warm-up, then linear decay to zero."""
        up = self.recipe.warm_up
        factor = min((share + 1e-3) / up, 1.0) if share < up else (1 - share) / (1 - up)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.recipe.rate * factor)
            else:
                group["lr"] = self.recipe.rate * factor

    def _on_device(self, places: Tensor, size: int) -> Sequence[Tensor]:
        """Split indices into batches on the device, at fixed addresses for recorded steps."""
        return places.to(self.device).split(size) if len(places) else ()

    def _size(self, bucket: Bucket, times: int = 1) -> int:
        """Examples per batch, times a factor, limited by tokens and logits."""
        # Twice the logits of other passes: the teacher's and the student's.
        fits = min(
            self.most_tokens // bucket.tokens, LOGITS.get(self.device.type, LOGITS["cpu"]) // (2 * bucket.logits)
        )
        return max(1, min(times * max(self.recipe.examples, self.recipe.tokens // bucket.tokens), fits))

    def _shuffled(self) -> list[tuple[int, Tensor]]:
        """The batches of one pass, with one shape per bucket: equal parts, the last filled up with other examples."""
        batches = []
        for number, bucket in enumerate(self.buckets):
            drawn = bucket.fit[torch.randperm(len(bucket.fit), generator=self.generator)]
            if not len(drawn):
                continue
            count = -(-len(drawn) // self._size(bucket))
            size = -(-len(drawn) // count)
            drawn = torch.cat([drawn, drawn[: count * size - len(drawn)]])
            batches += [(number, rows) for rows in drawn.split(size)]
        order = torch.randperm(len(batches), generator=self.generator).tolist()
        return [batches[i] for i in order]

    @torch.no_grad()
    def _scales(self) -> tuple[Tensor, Tensor]:
        """The scale of the outputs, and [layers] the variances of the hidden states, from the largest bucket."""
        bucket = max(self.buckets, key=lambda bucket: len(bucket.batch))
        rows = torch.arange(min(len(bucket.batch), self._size(bucket, JUDGED)), device=self.device)
        states = bucket.wanted(rows, bucket.pick(rows))
        layers = zip(states.hidden, bucket.real_tokens(rows), strict=True)
        variances = [variance(hidden, real).to(self.device) for hidden, real in layers]
        return output_scale(self.config, states.outputs), torch.stack(variances)


def squared_error(found: Tensor, wanted: Tensor, real: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """Mean over real tokens and dimensions of (s - t)^2, for [B, S, D].

    real, count  mask of real tokens, [B, S, 1], and their number; t is zero at padding
    """
    if real is None or count is None:
        return F.mse_loss(found, wanted.to(found)).float()
    total = F.mse_loss(found * real.to(found), wanted.to(found), reduction="sum").float()
    return total / (count.to(total) * found.shape[-1])


def variance(hidden: Tensor, real: Tensor | None) -> Tensor:
    """Mean over dimensions of the variance over real tokens, with a floor to avoid division by zero."""
    tokens = hidden.float().flatten(0, 1) if real is None else hidden[real.to(hidden.device)].float()  # [tokens, D]
    spread = tokens.var(0, correction=0).mean()
    return spread.clamp_min(torch.finfo(torch.float32).tiny ** 0.5).maximum(1e-6 * tokens.square().mean())
