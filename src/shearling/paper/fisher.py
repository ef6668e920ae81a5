"""The Fisher information of the mask variables (Eq. 5), per example, with one backward per batch.

At masks of one, the derivative with respect to a unit's mask is the sum over tokens and the unit's columns of
h * dL/dh. So no mask variables are needed: hooks on the gradient of `h` give every example's derivative in a single
backward of the summed losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shearling.engine.distributed import add_up
from shearling.engine.hooks import by_example, device_of, differentiable, frozen, run, watched
from shearling.engine.losses import check_finite, example_losses
from shearling.engine.precision import Precision, kernels
from shearling.engine.progress import Progress, silent
from shearling.models.structure import Structure
from shearling.sample.batch import Batch


def mask_gradients(
    structure: Structure,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    labels: bool = True,
    precision: Precision = "float32",
    progress: Progress = silent,
) -> list[Tensor]:
    """Per sublayer [examples, units]: the derivative of each example's loss with respect to each mask variable."""
    model, sublayers = structure.model, structure.sublayers
    rows: list[list[Tensor]] = [[] for _ in sublayers]
    losses: list[Tensor] = []

    def on_input(number: int, h: Tensor) -> None:
        width, wide = sublayers[number].width, _wide(sublayers[number].weight)
        value = h.detach()  # a hook that holds `h` itself would be a reference cycle that keeps the graph alive

        def on_gradient(gradient: Tensor) -> None:
            products = by_example(value * gradient, len(batch)).sum(1, dtype=wide)  # [B, n]
            per_unit = products.unflatten(-1, (-1, width)).sum(-1)  # [B, units]
            pending[number] = pending[number] + per_unit if number in pending else per_unit

        if h.requires_grad and sublayers[number].units:
            h.register_hook(on_gradient)

    with frozen(model), kernels(model, precision), watched(sublayers, on_input), differentiable(structure) as leaves:
        for done, given in enumerate(batches):
            pending: dict[int, Tensor] = {}
            batch = given.to(device_of(model))
            outputs = run(model, batch, precision)
            losses.append(example_losses(model, outputs, batch, seed=seed, labels=labels))
            losses[-1].sum().backward(inputs=leaves)
            losses[-1] = losses[-1].detach()
            leaves.clear()
            for number, sublayer in enumerate(sublayers):
                weight = sublayer.weight
                none = torch.zeros(len(batch), sublayer.units, dtype=_wide(weight), device=weight.device)
                rows[number].append(pending.get(number, none))
            progress(done + 1, len(batches))
    check_finite(losses, batches)
    return [torch.cat(parts) for parts in rows]


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def diagonal(gradients: Tensor) -> Tensor:
    """The diagonal of the Fisher information: the importance of each unit (Eq. 6-7)."""
    return _mean(gradients.square().sum(0), len(gradients))


def block(gradients: Tensor) -> Tensor:
    """The sublayer's block of the Fisher information [units, units] (Eq. 11)."""
    return _mean(gradients.T @ gradients, len(gradients))


def _mean(total: Tensor, count: int) -> Tensor:
    """Mean over the examples of all processes."""
    examples = torch.tensor(float(count), device=total.device)
    add_up([total, examples])
    return total / examples
