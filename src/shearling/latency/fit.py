"""Clean the times by count of noise, and fit Alg. 2's function to them.

That function is a constant overhead c up to a threshold T, then a slope a for each unit more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shearling.costs import Piecewise

TIE = 1e-12  # of the sum of squares; closer errors differ by rounding only
NOISE = 2.0  # spreads; a deeper dip is how the hardware behaves, and stays

Floats = NDArray[np.float64]


def fit(curve: Floats) -> Piecewise:
    """The piecewise-linear function with the least mean squared error over every count from 1 on, by exact search.

    curve   [units + 1], seconds by count

    For a given threshold this is a straight line in x = max(0, k - T), so its sums over all counts come from running
    totals, and all thresholds together cost no more than one pass. Neither overhead nor slope may be negative: the
    search spends a budget on them. The cost at 0 is 0 in the paper's function, whatever the table says.
    """
    y = np.asarray(curve[1:], dtype=np.float64)
    if not len(y):
        return Piecewise(0.0)
    k = np.arange(1, len(y) + 1, dtype=np.float64)
    T = np.arange(len(y), dtype=np.float64)  # thresholds; the last count always lies on the slope
    n = float(len(y))
    terms = (np.ones_like(k), k, k * k, y, k * y)
    counts, ks, kks, ys, kys = (np.cumsum(term[::-1])[::-1] for term in terms)  # entry T: the sum over k > T
    sx = ks - T * counts
    sxx = kks - 2 * T * ks + T * T * counts
    sxy = kys - T * ys
    sy, syy = y.sum(), float(y @ y)

    determinant = n * sxx - sx * sx
    slope = np.divide(n * sxy - sx * sy, determinant, out=np.zeros_like(sx), where=determinant > 0)
    slope = np.maximum(slope, 0.0)
    overhead = (sy - slope * sx) / n
    negative = overhead < 0  # then the best line starts at 0
    slope = np.where(negative, np.divide(sxy, sxx, out=np.zeros_like(sx), where=sxx > 0), slope)
    overhead = np.where(negative, 0.0, overhead)

    error = syy + slope**2 * sxx + n * overhead**2 + 2 * slope * overhead * sx - 2 * slope * sxy - 2 * overhead * sy
    best = int(np.flatnonzero(error <= error.min() + TIE * syy)[0])  # of equals, the lowest threshold
    return Piecewise(float(slope[best]), float(overhead[best]), int(T[best]))


def values(piecewise: Piecewise, units: int) -> Floats:
    """[units + 1]: the fit at every count."""
    return np.array([piecewise(count) for count in range(units + 1)])


def cleaned(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats | None) -> Floats:
    """The times without what the spread says is noise."""
    noise = np.zeros(len(units)) if spread is None else np.asarray(spread)
    return without_noise(steadied(units, values, noise), noise)


def steadied(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Move each time towards the piecewise-linear fit, as far as its spread says that it cannot be trusted.

    An allocation looks for cheap counts, so on a busy machine it would find those that were timed in a quiet moment.
    How far the hardware itself departs from the fit is what is left of the residuals once the noise is taken off; on
    a quiet machine that is all of them, and plateaus and steps stay where they are.
    """
    times, noise = np.asarray(values, dtype=np.float64), np.asarray(spread, dtype=np.float64) ** 2
    if len(times) < 3:
        return times
    smooth = fit(np.interp(np.arange(units[-1] + 1), units, times))
    line = np.array([smooth(count) for count in units])
    real = max(float(np.mean((times - line)[1:] ** 2 - noise[1:])), 0.0)
    trust = np.divide(real, real + noise, out=np.ones_like(noise), where=noise > 0)
    trust[0] = 1.0  # zero units take no time
    steady: Floats = trust * times + (1 - trust) * line
    return steady


def without_noise(values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Pool neighbours that go down no further than the noise: more units do not take less time.

    Plateaus and steps are left exactly as they were measured, and so is a dip that noise cannot explain (hardware
    does run some sizes faster than smaller ones).
    """
    blocks: list[tuple[float, float, int]] = []  # mean, spread, points
    for value, noise in zip(values, spread, strict=True):
        block = (float(value), float(noise), 1)
        while blocks and 0 < blocks[-1][0] - block[0] <= NOISE * (blocks[-1][1] + block[1]):
            before = blocks.pop()
            points = before[2] + block[2]
            mean = (before[0] * before[2] + block[0] * block[2]) / points
            block = (mean, max(before[1], block[1]), points)
        blocks.append(block)
    return np.concatenate([np.full(points, mean) for mean, _, points in blocks])
