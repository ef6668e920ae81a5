"""Estimate the loss of removing layers by replacing each with a linear map of the residual stream.

The layer after a gap reads the residual stream through one projection and adds to it through another. A repair folds
the least-squares map from the stream before the gap to the stream after it into both. Running the model with that map
in place of the removed layers estimates the loss without repairing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.engine.distance import divergences
from shearling.engine.hooks import device_of, flat, frozen, run, split_call
from shearling.engine.layerwise import replaced, returning, run_layer, start_run
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision, kernels
from shearling.models.stock import Layers
from shearling.models.structure import Share, Structure
from shearling.sample.batch import Batch

Map = tuple[Tensor, Tensor | None]  # [D, D] and [D]: stream -> weight stream + bias
Solve = Callable[[Moments, Moments], Map]  # (fit, held out)


def layer_maps(structure: Structure, batches: Sequence[Batch], solve: Solve, precision: Precision) -> list[list[Map]]:
    """Per stack and layer, the linear map from the layer's input to its output, over real tokens."""
    found: list[list[Map]] = []
    with frozen(structure.model), torch.no_grad(), kernels(structure.model, precision):
        here = [batch.held_out_last().to(device_of(structure.model)) for batch in batches]
        for stack in structure.stacks:
            run = start_run(structure.model, stack, here, precision)
            found.append([])
            for depth, sublayers in enumerate(stack.sublayers):
                size = run.hidden[0].shape[-1]
                fit, held_out = (Moments.zeros(size, size, sublayers[-1].weight) for _ in range(2))
                shares: tuple[tuple[Moments, Share], ...] = ((fit, "fit"), (held_out, "held out"))
                for number, batch in enumerate(here):
                    before = run.hidden[number].to(fit.cross.device)  # a layer's input may come from another GPU
                    after = run_layer(stack, depth, len(sublayers) - 1, run, number, "end").hidden
                    for moments, share in shares:
                        rows = stack.rows(batch, before.shape[:2], share)
                        moments.add(flat(before, rows), flat(after, rows))  # type: ignore[arg-type]
                    run.hidden[number] = after  # type: ignore[assignment]
                run.finished.clear()
                found[-1].append(solve(fit, held_out))
    return found


def divergences_without(
    structure: Structure,
    options: Sequence[Layers],
    maps: Sequence[Sequence[Map]],
    batches: Sequence[Batch],
    precision: Precision,
) -> list[float]:
    """For each choice of kept layers, the mean divergence of the outputs from the dense model's.

    Runs the dense model with layers replaced; the outputs of layers before the first gap are reused.
    """
    model = structure.model
    totals = [0.0] * len(options)
    with frozen(model), torch.no_grad(), kernels(model, precision):
        for batch in batches:
            here = batch.to(device_of(model))
            outputs, wanted = _recorded(structure, here, precision)
            for number, layers in enumerate(options):
                with _without(structure, layers, maps, outputs):
                    found = run(model, here, precision)
                totals[number] += float(divergences(model, wanted, found, here).sum())
    return [total / sum(map(len, batches)) for total in totals]


def _recorded(structure: Structure, batch: Batch, precision: Precision) -> tuple[dict[nn.Module, Any], Any]:
    """The output of every layer, and of the model."""
    outputs: dict[nn.Module, Any] = {}
    with ExitStack() as hooks:
        for stack in structure.stacks:
            for layer in stack.layers:
                hooks.callback(layer.register_forward_hook(lambda m, _, out: outputs.update({m: out})).remove)
        return outputs, run(structure.model, batch, precision)


@contextmanager
def _without(
    structure: Structure, layers: Layers, maps: Sequence[Sequence[Map]], outputs: dict[nn.Module, Any]
) -> Iterator[None]:
    """Replace removed layers by their maps; those after the last kept layer are skipped."""
    same = True  # no layer removed so far
    with ExitStack() as places:
        for stack, stay, mapped in zip(structure.stacks, layers, maps, strict=True):
            for depth, layer in enumerate(stack.layers):
                if depth not in stay:
                    same = False
                    linear = mapped[depth] if depth < max(stay) else None
                    places.enter_context(replaced(layer, _mapping(linear, outputs[layer])))
                elif same:
                    places.enter_context(returning(layer, outputs[layer]))
        yield


def _mapping(linear: Map | None, output: Any) -> Callable[..., Any]:
    """The forward that replaces a layer: maps its input, and returns the same structure as the layer did."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden, _, _ = split_call(args, kwargs)
        if linear is not None:
            weight, bias = linear
            hidden = F.linear(hidden, weight.to(hidden), None if bias is None else bias.to(hidden))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    return forward
