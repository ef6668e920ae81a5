"""Denoise times by count, and fit the function of Alg. 2 to them.

That function is a constant overhead c up to a threshold T, then rises with slope a per unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shearling.costs import Piecewise

TIE = 1e-12  # of the sum of squares; smaller differences are rounding
NOISE = 2.0  # spreads; a deeper dip is real hardware behaviour and is kept

Floats = NDArray[np.float64]


def fit(curve: Floats) -> Piecewise:
    """The least-squares piecewise-linear function over all counts from 1 on, by exact search over thresholds.

    curve   [units + 1], seconds by count

    For a given threshold this is a linear regression on x = max(0, k - T), whose sums come from cumulative sums, so
    all thresholds are evaluated in one pass. Overhead and slope are constrained to be non-negative, as the search
    needs. The cost at 0 is 0 in the paper's function, whatever the table has.
    """
    y = np.asarray(curve[1:], dtype=np.float64)
    if not len(y):
        return Piecewise(0.0)
    k = np.arange(1, len(y) + 1, dtype=np.float64)
    T = np.arange(len(y), dtype=np.float64)  # thresholds; the last count is always on the slope
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
    negative = overhead < 0  # refit with zero overhead
    slope = np.where(negative, np.divide(sxy, sxx, out=np.zeros_like(sx), where=sxx > 0), slope)
    overhead = np.where(negative, 0.0, overhead)

    error = syy + slope**2 * sxx + n * overhead**2 + 2 * slope * overhead * sx - 2 * slope * sxy - 2 * overhead * sy
    best = int(np.flatnonzero(error <= error.min() + TIE * syy)[0])  # lowest threshold among ties
    return Piecewise(float(slope[best]), float(overhead[best]), int(T[best]))


def values(piecewise: Piecewise, units: int) -> Floats:
    """[units + 1]: the fit at every count."""
    return np.array([piecewise(count) for count in range(units + 1)])


def cleaned(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats | None) -> Floats:
    """The times with measurement noise removed."""
    noise = np.zeros(len(units)) if spread is None else np.asarray(spread)
    return without_noise(steadied(units, values, noise), noise)


def steadied(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Shrink each time towards the piecewise-linear fit according to its spread.

    The allocation looks for cheap counts, so on a busy machine it would prefer those timed in a quiet moment. The
    variance of the residuals minus that of the noise estimates the hardware's true deviation from the fit; on a quiet
    machine plateaus and steps are kept.
    """
    times, noise = np.asarray(values, dtype=np.float64), np.asarray(spread, dtype=np.float64) ** 2
    if len(times) < 3:
        return times
    smooth = fit(np.interp(np.arange(units[-1] + 1), units, times))
    line = np.array([smooth(count) for count in units])
    real = max(float(np.mean((times - line)[1:] ** 2 - noise[1:])), 0.0)
    trust = np.divide(real, real + noise, out=np.ones_like(noise), where=noise > 0)
    trust[0] = 1.0  # zero units take zero time
    steady: Floats = trust * times + (1 - trust) * line
    return steady


def without_noise(values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Pool adjacent values that decrease by no more than the noise, as in isotonic regression.

    Plateaus and steps are kept exactly, and so are dips that noise cannot explain (hardware does run some sizes faster
    than smaller ones).
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
