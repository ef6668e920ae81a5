"""The importance of units: the paper's Fisher diagonal, and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from shearling.models.sublayer import Sublayer, is_transposed
from shearling.paper.fisher import diagonal

Importance = Literal["fisher", "magnitude", "gradient", "random"]


def importances(
    kind: Importance, sublayers: Sequence[Sublayer], gradients: Sequence[Tensor], seed: int
) -> list[Tensor]:
    """[units] per sublayer, on the host, in float64."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for sublayer, gradient in zip(sublayers, gradients, strict=True):
        if kind == "fisher":
            value = diagonal(gradient)
        elif kind == "gradient":  # |m dL/dm| at m = 1, as in DynaBERT
            value = diagonal(gradient.abs().sqrt())
        elif kind == "magnitude":
            value = _magnitude(sublayer)
        else:
            value = torch.rand(sublayer.units, generator=generator)
        found.append(value.double().cpu())
    return found


def _magnitude(sublayer: Sublayer) -> Tensor:
    """The norm of all weights of a unit."""
    units = sublayer.units
    total = sublayer.weight.detach().double().square().sum(0).view(units, -1).sum(1)
    for projection in sublayer.inputs:
        weight = cast(Tensor, projection.module.weight).detach().double()
        weight = weight.T if is_transposed(projection.module) else weight
        for block in weight.square().sum(1).split([units * rows for rows in projection.rows]):
            total = total + block.view(units, -1).sum(1)
    return total.sqrt()
