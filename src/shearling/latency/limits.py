"""A latency as limits that the methods understand: one for each side of the table."""

from __future__ import annotations

import math

from shearling.costs import Limit, Piecewise
from shearling.errors import ConstraintError
from shearling.latency.fit import fit
from shearling.latency.table import Table, milli, shape_of
from shearling.models.structure import Structure


def latency_limits(structure: Structure, table: Table, ratio: float, *, overhead: float = 0.0) -> list[Limit]:
    """What the units of the model may take together, so that the forward pass takes `ratio` of the dense one.

    overhead  seconds that the table turned out to miss
    """
    sides = [_side(structure, table, ratio, "seconds", table.fixed + overhead)]
    if table.fixed_launch is not None:
        sides.append(_side(structure, table, ratio, "launch", table.fixed_launch + overhead))
    binding = [side for side in sides if side.spent([len(t) - 1 for t in side.tables]) > side.budget]
    return binding or sides[:1]


def _side(structure: Structure, table: Table, ratio: float, side: str, fixed: float) -> Limit:
    curves = tuple(table.curves(structure, side))
    limit = Limit("latency", ratio, curves, fixed, whole=table.dense, pieces=_fits(structure, table, side))
    least = sum(float(curve[s.floor :].min()) for curve, s in zip(curves, structure.sublayers, strict=True))
    if limit.budget < least:
        enough = math.ceil(100 * (fixed + least) / table.dense) / 100
        what = "embeddings, norms, head" if side == "seconds" else "the host's launching of it"
        graphs = ", or measure the model as a CUDA graph (`shearling profile --runtime graphs`)"
        other = graphs if side == "launch" else ""
        raise ConstraintError(
            f"latency={ratio:g} leaves {milli(ratio * table.dense)} of {milli(table.dense)}, but what cannot be pruned "
            f"({what}) takes {milli(fixed + least)}; ask for at least {enough:.2f}{other}."
        )
    return limit


def _fits(structure: Structure, table: Table, side: str) -> tuple[Piecewise, ...]:
    """Alg. 2's picture of each sublayer's curve; one for all sublayers of a shape."""
    known = {entry.shape: fit(entry.curve(side)) for entry in table.sublayers}
    pairs = enumerate(structure.sublayers)
    return tuple(known[shape_of(structure, n)] if s.units else Piecewise(0.0) for n, s in pairs)
