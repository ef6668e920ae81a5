"""Stage 1 of `surgeon`: one forward and one backward over the sample.

Per sublayer, A = mean h h^T over real tokens and G = mean g g^T, where g is the gradient of the loss at the output of
the output projection. Their Kronecker product approximates the Fisher information of that projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.distributed import add_up
from shearling.engine.hooks import by_example, device_of, differentiable, flat, frozen, run, watched
from shearling.engine.losses import example_losses
from shearling.engine.precision import Precision, add_product_, fast_matmul
from shearling.engine.progress import Progress, silent
from shearling.models.structure import Structure
from shearling.sample.sample import Sample


@dataclass
class Curvature:
    """The two factors for one sublayer, and the projection they belong to."""

    A: Tensor  # [n, n]
    G: Tensor  # [D, D]
    W: Tensor  # [D, n]
    width: int  # columns per unit


def measure(
    structure: Structure,
    sample: Sample,
    *,
    seed: int = 0,
    labels: bool = False,
    precision: Precision = "float32",
    progress: Progress = silent,
) -> list[Curvature]:
    """A and G of every sublayer. The loss is sampled from the model itself unless `labels` are to be used."""
    model, sublayers = structure.model, structure.sublayers
    stacks = [stack for stack in structure.stacks for layer in stack.sublayers for _ in layer]
    host = not _room(structure)
    found = [_empty(s.weight.detach(), s.width, host) for s in sublayers]
    counts = [torch.zeros((), dtype=torch.float64, device=c.A.device) for c in found]
    batch = sample.batches[0]

    def on_input(number: int, h: Tensor) -> None:
        h = by_example(h, len(batch))
        rows = flat(h, stacks[number].rows(batch, h.shape[:2]))[:, : found[number].A.shape[0]]
        add_product_(found[number].A, rows, rows)
        counts[number].add_(len(rows))

    def on_output(number: int, output: Tensor) -> None:
        def on_gradient(gradient: Tensor) -> None:
            gradient = by_example(gradient, len(batch))
            rows = flat(gradient, stacks[number].rows(batch, gradient.shape[:2]))
            add_product_(found[number].G, rows, rows)

        if output.requires_grad:  # a sublayer with no unit left gives a constant
            output.register_hook(on_gradient)

    with (
        frozen(model),
        fast_matmul(precision),
        watched(sublayers, on_input, on_output),
        differentiable(structure) as leaves,
    ):
        for done, host_batch in enumerate(sample):
            batch = host_batch.to(device_of(model))
            outputs = run(model, batch, precision)
            example_losses(model, outputs, batch, seed=seed, labels=labels).sum().backward(inputs=leaves)
            leaves.clear()
            progress(done + 1, len(sample))

    add_up([t for c, n in zip(found, counts, strict=True) for t in (c.A, c.G, n)])
    for curvature, count in zip(found, counts, strict=True):
        curvature.A /= count
        curvature.G /= count
    return found


def _room(structure: Structure) -> bool:
    """Whether A and G of all sublayers take less than half of what a GPU has free; else they are summed on the host."""
    wanted: dict[torch.device, int] = {}
    for sublayer in structure.sublayers:
        weight = sublayer.weight
        wanted[weight.device] = wanted.get(weight.device, 0) + 4 * sum(side**2 for side in weight.shape)
    gpus = {device: size for device, size in wanted.items() if device.type == "cuda"}
    return all(2 * size < torch.cuda.mem_get_info(device)[0] for device, size in gpus.items())


def _empty(weight: Tensor, width: int, host: bool) -> Curvature:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    device = "cpu" if host else weight.device
    A, G = (torch.zeros(side, side, dtype=dtype, device=device) for side in reversed(weight.shape))
    return Curvature(A, G, weight, width)
