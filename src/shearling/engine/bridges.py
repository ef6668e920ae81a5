"""A model without some of its layers, with a linear map in the place of each: what a repair of the rest can make of it.

The layer that follows a gap reads the residual stream through a projection, and adds to it through another. A repair
folds into both the least-squares map from the stream before the gap to the stream behind it. Putting that map into the
gap, and running the model, tells the loss without repairing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shearling.engine.hooks import device_of, flat, frozen, split_call
from shearling.engine.layerwise import run_layer, start_run
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision, kernels
from shearling.models.stock import Layers, without_layers
from shearling.models.structure import Share, Structure
from shearling.sample.batch import Batch

Map = tuple[Tensor, Tensor | None]  # [D, D] and [D]: stream -> weight stream + bias
Solve = Callable[[Moments, Moments], Map]  # (fit, held out)


def layer_maps(structure: Structure, batches: Sequence[Batch], solve: Solve, precision: Precision) -> list[list[Map]]:
    """Per stack and layer, the map from what enters the layer to what leaves it, over real tokens."""
    found: list[list[Map]] = []
    with frozen(structure.model), torch.inference_mode(), kernels(precision):
        here = [batch.held_out_last().to(device_of(structure.model)) for batch in batches]
        for stack in structure.stacks:
            run = start_run(structure.model, stack, here, precision)
            found.append([])
            for depth, sublayers in enumerate(stack.sublayers):
                size = run.hidden[0].shape[-1]
                fit, held_out = (Moments.zeros(size, size, sublayers[-1].weight) for _ in range(2))
                shares: tuple[tuple[Moments, Share], ...] = ((fit, "fit"), (held_out, "held out"))
                for number, batch in enumerate(here):
                    before = run.hidden[number]
                    after = run_layer(stack, depth, len(sublayers) - 1, run, number, "end").hidden
                    for moments, share in shares:
                        rows = stack.rows(batch, before.shape[:2], share)
                        moments.add(flat(before, rows), flat(after, rows))  # type: ignore[arg-type]
                    run.hidden[number] = after  # type: ignore[assignment]
                run.finished.clear()
                found[-1].append(solve(fit, held_out))
    return found


def bridged(structure: Structure, layers: Layers, maps: Sequence[Sequence[Map]]) -> Any:
    """A copy of the model with these layers, and a map in every gap that a layer follows; to run and throw away."""
    student = without_layers(structure, layers, shared=True)
    for stack, mapped in zip(student.stacks, maps, strict=True):
        before = (-1, *stack.dense_numbers)
        for layer, last, now in zip(stack.layers, before, stack.dense_numbers, strict=False):
            if now > last + 1:
                layer.register_forward_pre_hook(_mapping(mapped[last + 1 : now]), with_kwargs=True)
    return student.model


def _mapping(maps: Sequence[Map]) -> Any:
    """A hook that sends the stream through the maps of the layers that are gone, one after the other."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, rest, named = split_call(args, kwargs)
        for weight, bias in maps:
            hidden = torch.nn.functional.linear(hidden, weight.to(hidden), None if bias is None else bias.to(hidden))
        return (hidden, *rest), named

    return hook
