"""Round the projections of all layers by GPTQ, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from shearling.engine.gram import Gram
from shearling.engine.hooks import flat, frozen
from shearling.engine.layerwise import Captured, LayerwiseRun, Point, run_layer, start_run
from shearling.exporters.inputs import Inputs
from shearling.exporters.rounding import Grid, round_columns
from shearling.models.structure import Stack, structure_of
from shearling.models.sublayer import linear_shape
from shearling.sample.batch import Batch
from shearling.sample.read import sample_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 4096  # per batch
Scales = dict[nn.Module, Tensor]


def round_layers(model: PreTrainedModel, calibration: Sequence[Inputs], grid: Grid) -> Scales:
    """Round every projection into and out of units, in place; returns the scales [D, blocks] of each.

    A projection is rounded using its inputs after everything before it has been rounded.
    """
    structure = structure_of(model)
    batches = sample_of(list(calibration)).cut(TOKENS)
    scales: Scales = {}
    with frozen(model), torch.no_grad():
        for stack in structure.stacks:
            run = start_run(model, stack, batches, "float32")
            for depth in range(len(stack.sublayers)):
                _round_layer(stack, depth, run, batches, grid, scales)
    return scales


def _round_layer(
    stack: Stack, depth: int, run: LayerwiseRun, batches: Sequence[Batch], grid: Grid, scales: Scales
) -> None:
    last = len(stack.sublayers[depth]) - 1

    def moments(part: int, columns: int, upto: Point, read: Callable[[Captured], Tensor | None]) -> Tensor:
        """Mean x x^T over the real tokens of all batches."""
        total = Gram.zeros(columns, torch.zeros(()))
        count = 0
        for number, batch in enumerate(batches):
            x = cast(Tensor, read(run_layer(stack, depth, part, run, number, upto)))
            rows = flat(x, stack.rows(batch, x.shape[:2]))[:, :columns]
            total.add_(rows)
            count += len(rows)
        return total.matrix / count

    for part, sublayer in enumerate(stack.sublayers[depth]):
        if sublayer.units:
            modules = [projection.module for projection in sublayer.inputs]
            A = moments(part, linear_shape(modules[0])[1], "in", lambda captured: captured.z)
            for module in modules:
                _round(module, A, grid, scales)
            A = moments(part, sublayer.units * sublayer.width, "h", lambda captured: captured.h)
            _round(sublayer.out, A, grid, scales)
        for number in range(len(batches)):
            captured = run_layer(stack, depth, part, run, number, "end" if part == last else "out")
            if part == last:
                run.hidden[number] = cast(Tensor, captured.hidden)
    run.finished.clear()


def _round(module: nn.Module, A: Tensor, grid: Grid, scales: Scales) -> None:
    weight = cast(Tensor, module.weight)
    rounded, scales[module] = round_columns(weight, A, grid)
    weight.copy_(rounded)
