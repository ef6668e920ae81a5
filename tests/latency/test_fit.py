"""The fit against an exhaustive search with an independent least-squares solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from shearling.latency.fit import fit, values


def exhaustive(curve: np.ndarray) -> float:
    """The least mean squared error over all thresholds, each solved by non-negative least squares."""
    y = curve[1:]
    k = np.arange(1, len(curve))
    best = np.inf
    for threshold in range(len(y)):
        design = np.stack([np.ones(len(y)), np.maximum(0, k - threshold)], axis=1)
        solution, _ = nnls(design, y)
        best = min(best, float(np.mean((design @ solution - y) ** 2)))
    return best


def error(curve: np.ndarray) -> float:
    found = fit(curve)
    return float(np.mean((values(found, len(curve) - 1)[1:] - curve[1:]) ** 2))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=25))
@settings(max_examples=150, deadline=None)
def test_no_threshold_does_better(times: list[float]) -> None:
    curve = np.array([0.0, *times])
    assert error(curve) <= exhaustive(curve) + 1e-8 * (1 + max(times) ** 2)


@given(st.integers(1, 60), st.floats(0.1, 5), st.floats(0.01, 2), st.data())
@settings(max_examples=100, deadline=None)
def test_finds_what_made_the_points(units: int, overhead: float, slope: float, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(0, units - 1))
    k = np.arange(units + 1)
    curve = np.where(k == 0, 0, overhead + slope * np.maximum(0, k - threshold))
    found = fit(curve)
    assert np.allclose(values(found, units)[1:], curve[1:], atol=1e-6)
    if units - threshold >= 2 and threshold >= 2:  # a threshold of 1 is a straight line, too
        assert found.threshold == threshold
        assert found.slope == pytest.approx(slope, rel=1e-5)
        assert found.overhead == pytest.approx(overhead, rel=1e-5)


def test_never_negative() -> None:
    falling = fit(np.array([0, 5.0, 4, 3, 2, 1]))
    assert falling.slope == 0
    assert falling.overhead == pytest.approx(3)
    below = fit(np.array([0, 0.0, 0.0, 1.0, 2.0, 3.0]))
    assert below.overhead >= 0
    assert below.threshold == 2


def test_costs_nothing_at_zero_whatever_the_table_says() -> None:
    assert values(fit(np.array([7.0, 8, 9, 10])), 3)[0] == 0


def test_no_units() -> None:
    assert fit(np.array([0.0]))(0) == 0


@pytest.mark.parametrize("units", [12, 100, 3072])
@pytest.mark.parametrize("level", [0.0, 1e-5, 7.3e-5, 0.1, 1 / 3])
def test_a_flat_curve_has_no_threshold(units: int, level: float) -> None:
    """All thresholds fit it equally well but for rounding; a high one would keep units that nothing asks for."""
    found = fit(np.array([0.0] + [level] * units))
    assert found.threshold == 0
    assert found(units) == pytest.approx(level)
