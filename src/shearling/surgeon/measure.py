"""Stage 1 of `surgeon`: one forward and one backward pass over the sample.

Per sublayer, A = mean h h^T over real tokens and G = mean g g^T, where g is the gradient of the loss at the output of
the output projection. Their Kronecker product approximates the Fisher information of that projection.

A norm between that output o and the residual makes the size of o meaningless. There h / rms(o) and g * rms(o) take the
places of h and g: what one token contributes to h g^T stays, but tokens with large outputs no longer rule A.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shearling.engine.distributed import add_up
from shearling.engine.gram import Gram
from shearling.engine.hooks import by_example, device_of, differentiable, flat, frozen, run, watched
from shearling.engine.losses import check_finite, example_losses
from shearling.engine.memory import free_bytes
from shearling.engine.moments import scaled, sizes_of
from shearling.engine.precision import Precision, kernels
from shearling.engine.progress import Progress, silent
from shearling.engine.recompute import is_too_much, recomputed
from shearling.models.structure import Structure
from shearling.sample.batch import Batch


@dataclass
class Curvature:
    """The two factors of one sublayer, and its output projection."""

    A: Gram  # [n, n]
    G: Gram  # [D, D]
    W: Tensor  # [D, n]
    width: int  # columns per unit
    tokens: float = 0.0  # in the mean G
    weight: float = 0.0  # of these tokens in the mean A; their number unless `measure` has a power


def measure(
    structure: Structure,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    labels: bool = False,
    power: float = 0.0,
    precision: Precision = "float32",
    progress: Progress = silent,
) -> list[Curvature]:
    """Compute A and G of every sublayer. Labels are sampled from the model unless `labels` is set.

    power  in A, tokens of an example of n tokens are weighted by n ** -power
    """
    model, sublayers = structure.model, structure.sublayers
    stacks = [stack for stack in structure.stacks for layer in stack.sublayers for _ in layer]
    host = not _room(structure)
    found = [_empty(s.weight.detach(), s.width, host) for s in sublayers]
    counts = [torch.zeros((), dtype=torch.float64, device=c.A.device) for c in found]
    totals = [torch.zeros_like(count) for count in counts] if power else counts  # sums of the weights in A
    batch = batches[0]
    losses: list[Tensor] = []
    waiting: dict[int, Tensor] = {}  # rows of h whose output is not known yet
    backwards = False  # recomputed layers call the hooks again in the backward pass, which must not be counted

    def on_input(number: int, h: Tensor) -> None:
        if backwards:
            return
        h = by_example(h, len(batch))
        stack, shape = stacks[number], h.shape[:2]
        rows = flat(h, stack.rows(batch, shape))[:, : len(found[number].A)]
        counts[number].add_(len(rows))
        if power:
            weights = stack.weights(batch, shape, power)
            totals[number].add_(weights.sum().to(totals[number]))  # statistics may be on the host
            rows = scaled(rows, weights.sqrt())
        if sublayers[number].normed:
            waiting[number] = rows
        else:
            found[number].A.add_(rows)

    def on_output(number: int, output: Tensor) -> None:
        sizes = None
        if number in waiting:
            o = by_example(output, len(batch))
            sizes = sizes_of(flat(o, stacks[number].rows(batch, o.shape[:2])))
            found[number].A.add_(scaled(waiting.pop(number), 1 / sizes))

        def on_gradient(gradient: Tensor) -> None:
            gradient = by_example(gradient, len(batch))
            rows = flat(gradient, stacks[number].rows(batch, gradient.shape[:2]))
            found[number].G.add_(rows if sizes is None else scaled(rows, sizes))

        if output.requires_grad and not backwards:  # a sublayer without units returns a constant
            output.register_hook(on_gradient)

    with (
        frozen(model),
        kernels(model, precision),
        watched(sublayers, on_input, on_output),
        differentiable(structure) as leaves,
        _within_memory(structure, batches),
    ):
        for done, given in enumerate(batches):
            batch = given.to(device_of(model))
            outputs = run(model, batch, precision)
            losses.append(example_losses(model, outputs, batch, seed=seed, labels=labels))
            backwards = True
            losses[-1].sum().backward(inputs=leaves)
            backwards = False
            losses[-1] = losses[-1].detach()
            del outputs  # free a language model's logits before the next batch
            leaves.clear()
            progress(done + 1, len(batches))

    check_finite(losses, batches)
    add_up([t for c in found for t in (*c.A.columns, *c.G.columns)] + counts + (totals if power else []))
    for curvature, count, total in zip(found, counts, totals, strict=True):
        curvature.A.divide_(total)
        curvature.G.divide_(count)
        curvature.tokens, curvature.weight = float(count), float(total)
    return found


def _within_memory(structure: Structure, batches: Sequence[Batch]) -> AbstractContextManager[None]:
    """Recompute activations in the backward pass if they would take too much of a CPU's memory."""
    again = device_of(structure.model).type == "cpu" and is_too_much(structure, batches)
    return recomputed(structure) if again else nullcontext()


def merged(first: Curvature, second: Curvature) -> Curvature:
    """The curvature over the tokens of both samples, in the memory of the second."""
    tokens, weight = first.tokens + second.tokens, first.weight + second.weight
    second.A.mix_(first.A, first.weight / weight)
    second.G.mix_(first.G, first.tokens / tokens)
    return replace(second, tokens=tokens, weight=weight)


def _room(structure: Structure) -> bool:
    """Whether A and G of all sublayers fit into half of the free GPU memory; else they are accumulated on the host."""
    wanted: dict[torch.device, int] = {}
    for sublayer in structure.sublayers:
        weight = sublayer.weight
        wanted[weight.device] = wanted.get(weight.device, 0) + 4 * sum(side**2 for side in weight.shape)
    gpus = {device: size for device, size in wanted.items() if device.type == "cuda"}
    return all(2 * size < free_bytes(device) for device, size in gpus.items())


def _empty(weight: Tensor, width: int, host: bool) -> Curvature:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    device = "cpu" if host else weight.device
    A, G = (Gram.zeros(side, torch.empty((), dtype=dtype, device=device)) for side in reversed(weight.shape))
    return Curvature(A, G, weight, width)
