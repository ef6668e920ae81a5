"""Alg. 2's picture of a latency table: a constant overhead c up to a threshold T, then a slope a for each unit more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shearling.costs import Piecewise

TIE = 1e-12  # of the sum of squares; closer errors differ by rounding only


def fit(curve: NDArray[np.float64]) -> Piecewise:
    """The piecewise-linear function with the least mean squared error over every count from 1 on, by exact search.

    curve   [units + 1], seconds by count

    For a given threshold this is a straight line in x = max(0, k - T), so its sums over all counts come from running
    totals, and all thresholds together cost no more than one pass. Neither overhead nor slope may be negative: the
    search spends a budget on them. The cost at 0 is 0 in the paper's picture, whatever the table says.
    """
    y = np.asarray(curve[1:], dtype=np.float64)
    if not len(y):
        return Piecewise(0.0)
    k = np.arange(1, len(y) + 1, dtype=np.float64)
    T = np.arange(len(y), dtype=np.float64)  # thresholds; the last count always lies on the slope
    n = float(len(y))
    counts, ks, kks, ys, kys = (_from_each(v) for v in (np.ones_like(k), k, k * k, y, k * y))  # sums over k > T
    sx = ks - T * counts
    sxx = kks - 2 * T * ks + T * T * counts
    sxy = kys - T * ys
    sy, syy = y.sum(), float(y @ y)

    determinant = n * sxx - sx * sx
    slope = np.divide(n * sxy - sx * sy, determinant, out=np.zeros_like(sx), where=determinant > 0)
    slope = np.maximum(slope, 0.0)
    overhead = (sy - slope * sx) / n
    below = overhead < 0  # then the best line starts at 0
    slope = np.where(below, np.divide(sxy, sxx, out=np.zeros_like(sx), where=sxx > 0), slope)
    overhead = np.where(below, 0.0, overhead)

    error = syy + slope**2 * sxx + n * overhead**2 + 2 * slope * overhead * sx - 2 * slope * sxy - 2 * overhead * sy
    best = int(np.flatnonzero(error <= error.min() + TIE * syy)[0])  # of equals, the lowest threshold
    return Piecewise(float(slope[best]), float(overhead[best]), int(T[best]))


def values(piecewise: Piecewise, units: int) -> NDArray[np.float64]:
    """[units + 1]: the fit at every count."""
    return np.array([piecewise(count) for count in range(units + 1)])


def _from_each(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entry T: the sum over the counts beyond T."""
    return np.cumsum(terms[::-1])[::-1]
