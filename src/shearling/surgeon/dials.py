"""One size for all layers: the best setting of a few dials under the budgets, exactly.

A dial is a curve of errors and costs, summed over the sublayers that share its count. There are few of them, so all
settings but those of the longest dial are tried; the longest takes the largest count that the budgets leave room for,
because errors fall with every unit kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shearling.surgeon.allocate import SLACK, Curve, Floats


def turn(curves: Sequence[Curve], budgets: Sequence[float]) -> tuple[list[int], float] | None:
    """(counts, error) with the least summed error within every budget; None where not even the least fits."""
    limits = np.asarray(budgets, dtype=np.float64)
    longest = max(range(len(curves)), key=lambda i: len(curves[i].counts))
    others = [curve for i, curve in enumerate(curves) if i != longest]
    last = curves[longest]
    shape = tuple(len(curve.counts) for curve in others)
    errors = _sums([curve.errors for curve in others], shape)  # [settings]
    places = np.full(errors.shape, len(last.counts) - 1)
    for number, limit in enumerate(limits):
        room = limit + SLACK * abs(limit) - _sums([curve.costs[number] for curve in others], shape)
        rising = np.maximum.accumulate(last.costs[number])  # a measured time may dip; count it as its predecessors
        places = np.minimum(places, np.searchsorted(rising, room, side="right") - 1)
    if (places < 0).all():
        return None
    totals = np.where(places >= 0, errors + last.errors[places], np.inf)
    best = int(totals.argmin())
    picks = list(np.unravel_index(best, shape)) if shape else []
    picks.insert(longest, places[best])
    return [int(curve.counts[i]) for curve, i in zip(curves, picks, strict=True)], float(totals[best])


def _sums(values: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """The sum over the dials at every setting of them, in a row."""
    total = np.zeros(shape)
    for axis, value in enumerate(values):
        total = total + value.reshape(-1, *[1] * (len(shape) - axis - 1))
    return total.reshape(-1)
