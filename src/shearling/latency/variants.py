"""The models to time: the user's own, with k units in the sublayers of one shape and none in the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from shearling.latency.table import ShapeKey, shapes_in
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import find

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_HEADS = 64
MOST_STEPS = 48  # multiples of 64
STEP = 64  # a tile of most matrix products
FINE = 8  # vector units and tensor cores work in multiples of this


@dataclass(frozen=True)
class TimedShape:
    """A shape of sublayer, and the counts to time."""

    key: ShapeKey
    counts: list[int]


def shapes_of(structure: Structure) -> list[TimedShape]:
    """Every distinct shape; the counts include the size of each of its sublayers."""
    sizes: dict[ShapeKey, set[int]] = {}
    for sublayer, key in zip(structure.sublayers, shapes_in(structure), strict=True):
        if sublayer.units:
            sizes.setdefault(key, set()).update((sublayer.units, sublayer.floor))
    return [TimedShape(key, counts_to_time(key[1], max(found), found)) for key, found in sizes.items()]


def counts_to_time(kind: str, units: int, also: Iterable[int] = ()) -> list[int]:
    """All numbers of heads; for filters 0, 1, all, multiples of 64 and some of 8. Always includes `also`."""
    found = {0, 1, units, *also}
    if kind == "heads":
        step = -(-units // MOST_HEADS) if units else 1
        found |= set(range(0, units + 1, step))
    else:
        tiles = -(-units // STEP)
        found |= set(range(0, units + 1, STEP * max(1, -(-tiles // MOST_STEPS))))
        found |= set(range(0, STEP, FINE))
        for part in (0.25, 0.5, 0.75):  # between two tiles, to see steps
            tile = int(part * units) // STEP * STEP
            found |= {tile + FINE, tile + STEP // 2}
    return sorted(count for count in found if 0 <= count <= units)


def members(structure: Structure, shape: TimedShape) -> list[int]:
    """Indices of the sublayers of a shape."""
    pairs = zip(structure.sublayers, shapes_in(structure), strict=True)
    return [n for n, (sublayer, key) in enumerate(pairs) if sublayer.units and key == shape.key]


def with_units(structure: Structure, shape: TimedShape | None, count: int) -> PreTrainedModel:
    """The model with at most `count` units in one shape's sublayers, and only the required units elsewhere.

    Uncut parameters share memory with the model.
    """
    inside = set(members(structure, shape)) if shape is not None else set()
    kept = []
    for number, sublayer in enumerate(structure.sublayers):
        wanted = count if number in inside else 0
        kept.append(torch.arange(min(max(wanted, sublayer.floor), sublayer.units)))
    return shrink(structure.model, kept, shared=True)


def same_in_every_layer(structure: Structure) -> bool:
    """Whether all layers of each stack have the same size."""
    return all(len({tuple(s.units for s in layer) for layer in stack.sublayers}) == 1 for stack in structure.stacks)


def shortened(structure: Structure, depth: int) -> Structure:
    """The model with only the first `depth` layers of each stack; shares memory with the model."""
    model = copy.deepcopy(structure.model, {id(p): p for p in structure.model.parameters()})
    for stack in structure.stacks:
        owner, _, name = stack.row.layers.rpartition(".")
        layers = cast(nn.ModuleList, find(model.base_model, stack.row.layers))
        setattr(model.base_model.get_submodule(owner), name, layers[:depth])
    return structure_of(model)


def sublayers_between(structure: Structure, shape: TimedShape, low: int, high: int) -> int:
    """Number of sublayers of the shape that grow from count `low` to `high`."""
    chosen = [structure.sublayers[n] for n in members(structure, shape)]
    return sum(sublayer.floor <= low and sublayer.units >= high for sublayer in chosen)
