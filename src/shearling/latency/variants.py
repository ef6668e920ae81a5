"""The models that are timed: the user's own, with k units in the sublayers of one shape and none in the others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from shearling.latency.grid import counts_to_time
from shearling.latency.table import shape_of
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import find

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """Sublayers that are alike but for their number of units, and the counts to time."""

    key: tuple[int, str, int, int, int]
    counts: list[int]


def shapes_of(structure: Structure) -> list[Shape]:
    """Every distinct shape; the size of each sublayer is among the counts, for layers may differ."""
    sizes: dict[tuple[int, str, int, int, int], set[int]] = {}
    for number, sublayer in enumerate(structure.sublayers):
        if sublayer.units:
            sizes.setdefault(shape_of(structure, number), set()).update((sublayer.units, sublayer.floor))
    return [Shape(key, counts_to_time(key[1], max(found), found)) for key, found in sizes.items()]


def members(structure: Structure, shape: Shape) -> list[int]:
    """The numbers of the sublayers of a shape."""
    return [n for n, s in enumerate(structure.sublayers) if s.units and shape_of(structure, n) == shape.key]


def with_units(structure: Structure, shape: Shape | None, count: int) -> PreTrainedModel:
    """The model with `count` units (or as many as there are) in one shape's sublayers, elsewhere those that must stay.

    It shares all memory with the model that it can.
    """
    inside = set(members(structure, shape)) if shape is not None else set()
    kept = []
    for number, sublayer in enumerate(structure.sublayers):
        wanted = count if number in inside else 0
        kept.append(torch.arange(min(max(wanted, sublayer.floor), sublayer.units)))
    return shrink(structure.model, kept, shared=True)


def same_in_every_layer(structure: Structure) -> bool:
    """Whether the first layers of each stack can stand for all of them."""
    return all(len({tuple(s.units for s in layer) for layer in stack.sublayers}) == 1 for stack in structure.stacks)


def shortened(structure: Structure, depth: int) -> Structure:
    """The model with only the first `depth` layers of each stack; it shares all memory with the model."""
    model = copy.deepcopy(structure.model, {id(p): p for p in structure.model.parameters()})
    for stack in structure.stacks:
        owner, _, name = stack.row.layers.rpartition(".")
        pile = cast(nn.ModuleList, find(model.base_model, stack.row.layers))
        setattr(model.base_model.get_submodule(owner), name, pile[:depth])
    return structure_of(model)


def sublayers_between(structure: Structure, shape: Shape, low: int, high: int) -> int:
    """How many sublayers of the shape get larger when the count goes from `low` to `high`."""
    chosen: Sequence[int] = members(structure, shape)
    return sum(structure.sublayers[n].floor <= low and structure.sublayers[n].units >= high for n in chosen)
