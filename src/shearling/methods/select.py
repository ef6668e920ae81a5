"""Method `paper`: choose the units to keep within the limits of a run, by the search or a uniform ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shearling.costs import Limit, Piecewise, asked
from shearling.errors import ConstraintError
from shearling.models.sublayer import Sublayer
from shearling.paper.drop import sublayers_to_drop
from shearling.paper.search import Prices, search


def prices(sublayers: Sequence[Sublayer], limits: Sequence[Limit]) -> list[Prices]:
    """The limits as input of Alg. 1 and 2; empty where units of a kind differ in cost, or some must stay."""
    if any(s.floor for s in sublayers):
        return []
    prices = []
    for limit in limits:
        found: dict[str, set[Piecewise]] = {"heads": set(), "filters": set()}
        for sublayer, piece in zip(sublayers, _pieces(sublayers, limit), strict=True):
            if sublayer.units:
                found[sublayer.kind].add(piece)
        if any(len(values) > 1 for values in found.values()):
            return []
        head, filter_ = (next(iter(found[kind]), Piecewise(0.0)) for kind in ("heads", "filters"))
        prices.append(Prices(head, filter_, limit.budget))
    return prices


def _pieces(sublayers: Sequence[Sublayer], limit: Limit) -> Sequence[Piecewise]:
    """The cost of each sublayer: the limit's own fit, or its linear table."""
    if limit.pieces:
        return limit.pieces
    pairs = zip(sublayers, limit.tables, strict=True)
    return [Piecewise(round(float(table[-1]) / max(s.units, 1), 6)) for s, table in pairs]


def searched(
    sublayers: Sequence[Sublayer], worth: Sequence[Tensor], limits: Sequence[Limit], *, drop: bool
) -> list[Tensor]:
    """Alg. 1 or 2, with a reduced budget where the fit to a latency table underestimates the table itself."""
    allowed = list(limits)
    while True:
        kept = _search_once(sublayers, worth, allowed, drop=drop)
        counts = [len(units) for units in kept]
        if all(limit.holds(counts) for limit in limits):
            return kept
        for number, limit in enumerate(limits):
            if not limit.holds(counts):
                excess = max(limit.spent(counts) - limit.budget, 1e-3 * limit.budget)
                less = allowed[number]
                allowed[number] = replace(less, fixed=less.fixed + excess, whole=limit.dense)


def _search_once(
    sublayers: Sequence[Sublayer], worth: Sequence[Tensor], limits: Sequence[Limit], *, drop: bool
) -> list[Tensor]:
    if drop and any(limit.pieces for limit in limits):
        pieces = [_pieces(sublayers, limit) for limit in limits]
        gone = sublayers_to_drop(worth, pieces, [limit.budget for limit in limits])
        worth = [w[:0] if i in gone else w for i, w in enumerate(worth)]
    rows = {kind: [i for i, s in enumerate(sublayers) if s.kind == kind] for kind in ("heads", "filters")}
    try:
        heads, filters = ([worth[i] for i in rows[kind]] for kind in ("heads", "filters"))
        found = search(heads, filters, prices(sublayers, limits))
    except ConstraintError as error:
        raise ConstraintError(f"{asked(limits)} cannot be met. {error}") from None
    kept = dict(zip(rows["heads"] + rows["filters"], found[0] + found[1], strict=True))
    return [kept[i] for i in range(len(sublayers))]


def uniform_counts(sublayers: Sequence[Sublayer], limits: Sequence[Limit], multiple_of: int) -> list[int]:
    """Counts for the largest ratio, the same in every layer, within every budget; filters in whole multiples."""

    def count(sublayer: Sublayer, ratio: float) -> int:
        units = int(ratio * sublayer.units + 1e-9)
        if sublayer.kind == "filters" and units < sublayer.units:
            units -= units % multiple_of
        return max(min(sublayer.floor, sublayer.units), units)

    def counts(ratio: float) -> list[int]:
        return [count(s, ratio) for s in sublayers]

    def hold(ratio: float) -> bool:
        return all(limit.holds(counts(ratio)) for limit in limits)

    low, high = 0.0, 1.0
    if hold(high):
        return counts(high)
    if not hold(low):
        raise ConstraintError(f"{asked(limits)} cannot be met. {_least(limits, counts(low))}")
    for _ in range(40):
        middle = (low + high) / 2
        if hold(middle):
            low = middle
        else:
            high = middle
    return counts(low)


def _least(limits: Sequence[Limit], counts: Sequence[int]) -> str:
    """Message with the cost of the units that must stay, for the limits it exceeds."""
    over = (limit for limit in limits if not limit.holds(counts))
    words = ", ".join(f"{limit.name}={(limit.fixed + limit.spent(counts)) / limit.dense:.3g}" for limit in over)
    return f"The units that must stay take {words} of the dense model; ask for more."


def best(worth: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The most important `count` units of every sublayer."""
    ranked = (torch.sort(w, descending=True, stable=True).indices for w in worth)
    return [r[:count].sort().values for r, count in zip(ranked, counts, strict=True)]
