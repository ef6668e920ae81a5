"""Stock shapes: the optimal setting of a few dials under the budgets.

A dial is a curve of errors and costs, summed over the sublayers that share its count. There are few dials, so all
settings of all but the longest are enumerated; the longest takes the largest count within the budgets, because errors
decrease with the count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shearling.surgeon.allocate import SLACK, Curve, Floats


def turn(curves: Sequence[Curve], budgets: Sequence[float]) -> tuple[list[int], float] | None:
    """(counts, error) with the least summed error within every budget; None if there is none."""
    limits = np.asarray(budgets, dtype=np.float64)
    longest = max(range(len(curves)), key=lambda i: len(curves[i].counts))
    others = [curve for i, curve in enumerate(curves) if i != longest]
    last = curves[longest]
    shape = tuple(len(curve.counts) for curve in others)
    errors = _sums([curve.errors for curve in others], shape)  # [settings]
    places = np.full(errors.shape, len(last.counts) - 1)
    for number, limit in enumerate(limits):
        room = limit + SLACK * abs(limit) - _sums([curve.costs[number] for curve in others], shape)
        rising = np.maximum.accumulate(last.costs[number])  # measured times may not be monotone
        places = np.minimum(places, np.searchsorted(rising, room, side="right") - 1)
    if (places < 0).all():
        return None
    totals = np.where(places >= 0, errors + last.errors[places], np.inf)
    best = int(totals.argmin())
    picks = list(np.unravel_index(best, shape)) if shape else []
    picks.insert(longest, places[best])
    return [int(curve.counts[i]) for curve, i in zip(curves, picks, strict=True)], float(totals[best])


def _sums(values: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """The sum over the dials for every setting, flattened."""
    total = np.zeros(shape)
    for axis, value in enumerate(values):
        total = total + value.reshape(-1, *[1] * (len(shape) - axis - 1))
    return total.reshape(-1)
