"""Allocation against every combination of counts."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.costs import Limit
from shearling.errors import ConstraintError
from shearling.surgeon import allocate as module
from shearling.surgeon.allocate import GRID, Curve


def curve_of(errors: list[float], costs: list[list[float]], counts: list[int] | None = None) -> Curve:
    at = np.arange(len(errors)) if counts is None else np.array(counts)
    return Curve(at, np.array(errors, dtype=float), np.array(costs, dtype=float))


def allocate(curves: list[Curve], budgets: list[float], multiple_of: int = 1) -> list[int]:
    """The counts for sublayers that have these curves, at every count between the first and the last."""
    sublayers: list[Any] = [SimpleNamespace(kind="filters", units=int(c.counts[-1]), floor=0) for c in curves]
    at_all = [np.full((len(budgets) + 1, s.units + 1), np.nan) for s in sublayers]  # errors, then costs
    for curve, values in zip(curves, at_all, strict=True):
        values[:, curve.counts] = [curve.errors, *curve.costs]
    limits = [
        Limit("flops", 1.0, tuple(values[number] for values in at_all), whole=budget)
        for number, budget in enumerate(budgets, start=1)
    ]
    return module.allocate(sublayers, [values[0] for values in at_all], limits, multiple_of)


def picked(curves: list[Curve], counts: list[int]) -> list[int]:
    return [int(np.flatnonzero(c.counts == k)[0]) for c, k in zip(curves, counts, strict=True)]


def total_error(curves: list[Curve], counts: list[int]) -> float:
    return float(sum(c.errors[i] for c, i in zip(curves, picked(curves, counts), strict=True)))


def spent(curves: list[Curve], counts: list[int]) -> np.ndarray:
    return np.sum([c.costs[:, i] for c, i in zip(curves, picked(curves, counts), strict=True)], axis=0)


def best_by_brute_force(curves: list[Curve], budgets: list[float]) -> float:
    best = np.inf
    for picks in product(*(range(len(c.counts)) for c in curves)):
        cost = np.sum([c.costs[:, i] for c, i in zip(curves, picks, strict=True)], axis=0)
        if (cost <= np.array(budgets) * (1 + 1e-9)).all():
            best = min(best, float(sum(c.errors[i] for c, i in zip(curves, picks, strict=True))))
    return best


def falling(values: list[float]) -> list[float]:
    """Errors that never rise with the units kept, plateaus included, zero at the end."""
    return [*sorted(values, reverse=True), 0.0]


errors_of = st.lists(st.floats(0, 10), min_size=1, max_size=4).map(falling)


@st.composite
def whole_problems(draw: st.DrawFn) -> tuple[list[Curve], float]:
    """Integer costs of any shape: linear, steps, plateaus."""
    curves = []
    for _ in range(draw(st.integers(1, 4))):
        errors = draw(errors_of)
        steps = draw(st.lists(st.integers(0, 9), min_size=len(errors) - 1, max_size=len(errors) - 1))
        curves.append(curve_of(errors, [[0, *np.cumsum(steps).tolist()]]))
    dense = sum(c.costs[0, -1] for c in curves)
    return curves, float(draw(st.integers(0, int(dense))))


@settings(deadline=None, max_examples=150)
@given(whole_problems())
def test_exact_for_whole_costs(problem: tuple[list[Curve], float]) -> None:
    curves, budget = problem
    counts = allocate(curves, [budget])
    assert spent(curves, counts)[0] <= budget * (1 + 1e-9)
    assert total_error(curves, counts) == pytest.approx(best_by_brute_force(curves, [budget]), abs=1e-9)


@st.composite
def float_problems(draw: st.DrawFn, budgets: int) -> tuple[list[Curve], list[float]]:
    """Real-valued cost tables, measured ones included: not monotone, with jumps and flat parts."""
    curves = []
    for _ in range(draw(st.integers(1, 4))):
        errors = draw(errors_of)
        table = st.lists(st.floats(0, 5), min_size=len(errors) - 1, max_size=len(errors) - 1)
        rows = [[0.0, *draw(table)] if draw(st.booleans()) else [0.0, *np.cumsum(draw(table)).tolist()]] * budgets
        if budgets > 1:
            rows = [[0.0, *np.cumsum(draw(table)).tolist()] for _ in range(budgets)]
        curves.append(curve_of(errors, rows))
    dense = np.sum([c.costs[:, -1] for c in curves], axis=0)
    ratios = draw(st.lists(st.floats(0.0, 1.0), min_size=budgets, max_size=budgets))
    return curves, [float(r * d) for r, d in zip(ratios, dense, strict=True)]


@settings(deadline=None, max_examples=150)
@given(float_problems(1))
def test_never_over_budget_and_near_the_optimum(problem: tuple[list[Curve], list[float]]) -> None:
    curves, budgets = problem
    counts = allocate(curves, budgets)
    assert spent(curves, counts)[0] <= budgets[0] * (1 + 2e-9)
    # Rounding up to the grid costs at most a cell a sublayer: no worse than the optimum of a budget that much smaller.
    smaller = budgets[0] * (1 - len(curves) / GRID)
    assert total_error(curves, counts) <= best_by_brute_force(curves, [smaller]) + 1e-9


@settings(deadline=None, max_examples=100)
@given(float_problems(2))
def test_never_over_any_of_several_budgets(problem: tuple[list[Curve], list[float]]) -> None:
    curves, budgets = problem
    counts = allocate(curves, budgets)
    assert (spent(curves, counts) <= np.array(budgets) * (1 + 2e-9)).all()


@settings(deadline=None, max_examples=50)
@given(float_problems(2))
def test_a_budget_that_does_not_bind_changes_nothing(problem: tuple[list[Curve], list[float]]) -> None:
    curves, budgets = problem
    dense = float(sum(c.costs[1, -1] for c in curves))
    alone = [Curve(c.counts, c.errors, c.costs[:1]) for c in curves]
    counts = allocate(curves, [budgets[0], 2 * dense + 1])
    smaller = budgets[0] * (1 - 2 * len(curves) / GRID)
    assert total_error(curves, counts) <= best_by_brute_force(alone, [smaller]) + 1e-9


def test_several_budgets_come_close_to_brute_force() -> None:
    """Convex curves, as sublayers have them: the weights find a solution within a few percent of the best."""
    generator = np.random.default_rng(0)
    worse = []
    for _ in range(20):
        curves = []
        for _ in range(3):
            errors = np.concatenate([np.cumsum(np.sort(generator.random(7)))[::-1], [0.0]])
            price = generator.random(2) + 0.2
            curves.append(Curve(np.arange(8), errors, np.arange(8) * price[:, None]))
        dense = np.sum([c.costs[:, -1] for c in curves], axis=0)
        budgets = (dense * generator.uniform(0.3, 0.8, 2)).tolist()
        best = best_by_brute_force(curves, budgets)
        worse.append(total_error(curves, allocate(curves, budgets)) / best)
    assert max(worse) < 1.25
    assert np.mean(worse) < 1.03


def test_a_whole_sublayer_goes_when_that_is_cheapest() -> None:
    useless = curve_of([0.01, 0.009, 0.0], [[0, 10, 20]])
    precious = curve_of([9.0, 5.0, 0.0], [[0, 10, 20]])
    assert allocate([useless, precious], [20]) == [0, 2]


def test_only_the_counts_on_offer_are_chosen() -> None:
    precious = curve_of([9.0, 5.0, 0.0], [[0.0, 8.0, 16.0]], counts=[0, 8, 16])
    other = curve_of([5.0, 1.0, 0.0], [[0.0, 8.0, 16.0]], counts=[0, 8, 16])
    assert allocate([other, precious], [24.5], multiple_of=8) == [8, 16]


@pytest.mark.parametrize("costs", [[4, 5, 6], [4.5, 5.5, 6.5]], ids=["whole", "real"])
def test_what_cannot_be_met_is_said(costs: list[float]) -> None:
    curve = curve_of([5.0, 1.0, 0.0], [costs])
    with pytest.raises(ConstraintError, match=r"flops=1 cannot be met.*smallest possible model"):
        allocate([curve, curve], [costs[0] * 2 - 0.5])
    assert allocate([curve, curve], [costs[0] * 2]) == [0, 0]


@pytest.mark.parametrize("ratio", [1e-320, 1e-300, 1e-30, 1e-12, 0.0])
@pytest.mark.parametrize("budgets", [1, 2])
def test_hardly_any_budget_keeps_nothing(ratio: float, budgets: int) -> None:
    curve = curve_of([5.0, 1.0, 0.0], [[0.0, 1e9 + 0.25, 2e9 + 0.5]] * budgets)
    assert allocate([curve, curve], [ratio * 4e9] * budgets) == [0, 0]


@pytest.mark.parametrize("budgets", [[2.0, 2.0], [1.0, 5.0]])
def test_several_budgets_that_only_fit_apart_are_refused(budgets: list[float]) -> None:
    """Each budget can be met alone, but by different options: an error, not an endless search."""
    curve = curve_of([5.0, 1.0], [[1.0, 9.0], [9.0, 1.0]])
    with pytest.raises(ConstraintError):
        allocate([curve], budgets)


def test_nothing_affordable_is_left_out() -> None:
    curves = [curve_of(falling(list(range(1, 9))), [(np.arange(9) * 1.37).tolist()]) for _ in range(3)]
    counts = allocate(curves, [17.0])
    assert 17.0 - spent(curves, counts)[0] < 1.37
