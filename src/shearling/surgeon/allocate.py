"""Stage 3 of `surgeon`: how many units each sublayer keeps.

Minimises the sum of the sublayers' errors under a budget, for any cost table: dynamic programming over a grid of
costs, rounded up so that the budget always holds, then a greedy fill-in of what rounding left over. If all costs are
integers and the budget fits the grid, the answer is exact.

Several budgets are combined by weights: the weighted sum of costs / budget may not exceed 1. A choice that meets all
budgets meets this one too, so its optimum is a lower bound of the error, and it is the answer if it meets them all.
Multiplicative updates move the weights towards the violated budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shearling.costs import Limit, asked
from shearling.errors import ConstraintError
from shearling.models.sublayer import Sublayer

GRID = 4096
ROUNDS = 24  # weight updates, with several budgets
LEAST = 0.01  # smallest share of the budgets to search with, before falling back to the cheapest options
SLACK = 1e-9  # relative; budgets and costs are floats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Curve:
    """One sublayer's options: keeping `counts[i]` units has error `errors[i]` and costs `costs[c, i]` of budget c."""

    counts: Ints  # [m], ascending
    errors: Floats  # [m]
    costs: Floats  # [budgets, m]


def allocate(
    sublayers: Sequence[Sublayer], errors: Sequence[ArrayLike], limits: Sequence[Limit], multiple_of: int = 1
) -> list[int]:
    """Returns the number of units every sublayer keeps, within every budget; raises if that is impossible.

    errors       per sublayer, [units + 1], by units kept
    multiple_of  filter counts are multiples of this, or all filters
    """
    curves = []
    for number, (sublayer, error) in enumerate(zip(sublayers, errors, strict=True)):
        counts = np.arange(min(sublayer.floor, sublayer.units), sublayer.units + 1)
        if sublayer.kind == "filters" and multiple_of > 1:
            counts = counts[(counts % multiple_of == 0) | (counts == sublayer.units)]
        costs = np.stack([limit.tables[number][counts] for limit in limits])
        curves.append(Curve(counts, np.asarray(error)[counts], costs))
    budgets = np.array([limit.budget for limit in limits], dtype=np.float64)
    try:
        return best_counts(curves, budgets)
    except ConstraintError as error:
        raise ConstraintError(f"{asked(limits)} cannot be met. {error}") from None


def best_counts(curves: Sequence[Curve], budgets: Floats) -> list[int]:
    """One count per curve that minimises the summed error within every budget."""
    curves = _affordable(curves, budgets)
    if len(budgets) == 1:
        picks = _knapsack([c.errors for c in curves], [c.costs[0] for c in curves], float(budgets[0]))
    else:
        picks = _solve_many(curves, budgets)
    picks = _fill_in(curves, picks, budgets)
    return [int(curve.counts[i]) for curve, i in zip(curves, picks, strict=True)]


def _affordable(curves: Sequence[Curve], budgets: Floats) -> list[Curve]:
    """Drop options that exceed a budget even if all other sublayers take their cheapest."""
    least = sum((curve.costs.min(axis=1) for curve in curves), np.zeros(len(budgets)))
    if (least > budgets * (1 + SLACK)).any():
        worst = int(np.argmax(least - budgets))
        words = f"The budget is {budgets[worst]:.4g}, but the smallest possible model costs {least[worst]:.4g}"
        more = f"; ask for {least[worst] / budgets[worst]:.3g} times as much." if budgets[worst] > 0 else "."
        raise ConstraintError(words + more)
    left = []
    for curve in curves:
        others = least - curve.costs.min(axis=1)
        fits = (others[:, None] + curve.costs <= budgets[:, None] * (1 + SLACK)).all(0)
        if not fits.any():
            raise ConstraintError(_APART)
        left.append(Curve(curve.counts[fits], curve.errors[fits], curve.costs[:, fits]))
    return left


_APART = "Each budget can be met alone, but no choice was found that meets all of them; ask for more."


def _solve_many(curves: Sequence[Curve], budgets: Floats) -> list[int]:
    room = np.where(budgets > 0, budgets, 1.0)  # with a budget of zero only free options are left
    shares = [curve.costs / room[:, None] for curve in curves]  # cost / budget
    errors = [curve.errors for curve in curves]
    weights = np.full(len(budgets), 1 / len(budgets))
    best: tuple[float, list[int]] | None = None
    tightness = 1.0
    for _ in range(ROUNDS):
        picks = _knapsack(errors, [weights @ share for share in shares], tightness)
        spent = _total(shares, picks)
        if (spent <= 1 + SLACK).all():
            error = sum(float(e[i]) for e, i in zip(errors, picks, strict=True))
            if best is None or error < best[0]:
                best = error, picks
        weights = weights * np.exp(4 * (spent - 1))  # towards the violated budgets
        weights /= weights.sum()
    while best is None and tightness > LEAST:  # no weights met all budgets: tighten them until some do
        tightness *= 0.97
        picks = _knapsack(errors, [weights @ share for share in shares], tightness)
        if (_total(shares, picks) <= 1 + SLACK).all():
            best = 0.0, picks
    if best is not None:
        return best[1]
    cheapest = [int(share.max(axis=0).argmin()) for share in shares]
    if (_total(shares, cheapest) > 1 + SLACK).any():
        raise ConstraintError(_APART)
    return cheapest


def _total(shares: Sequence[Floats], picks: Sequence[int]) -> Floats:
    """[budgets]: share of each budget that the picks use."""
    total: Floats = np.sum([share[:, i] for share, i in zip(shares, picks, strict=True)], axis=0)
    return total


def _knapsack(errors: Sequence[Floats], costs: Sequence[Floats], budget: float) -> list[int]:
    """One option per sublayer with the least total error, by dynamic programming over a grid of costs."""
    cells, per_cell = _grid(costs, budget)
    best = np.zeros(cells + 1)  # least error with at most c cells
    chosen = np.zeros((len(costs), cells + 1), dtype=np.int32)
    for row, (error, cost) in enumerate(zip(errors, costs, strict=True)):
        steps = np.ceil(cost / per_cell * (1 - SLACK)).clip(max=cells + 1).astype(np.int64)
        new = np.full(cells + 1, np.inf)
        for option in _worthwhile(steps, error, cells):
            step = steps[option]
            candidate = best[: cells + 1 - step] + error[option]
            better = candidate < new[step:]
            new[step:][better] = candidate[better]
            chosen[row, step:][better] = option
        best = new
    if not np.isfinite(best[cells]):  # infeasible only because of rounding: take the cheapest options
        return [int(np.lexsort((error, cost))[0]) for error, cost in zip(errors, costs, strict=True)]
    picks = []
    at = cells
    for row in reversed(range(len(costs))):
        option = int(chosen[row, at])
        picks.append(option)
        at -= int(np.ceil(costs[row][option] / per_cell * (1 - SLACK)))
    return picks[::-1]


def _grid(costs: Sequence[Floats], budget: float) -> tuple[int, float]:
    """(cells, cost per cell): the common divisor of integer costs if it is not too fine."""
    if budget < np.finfo(np.float64).tiny * GRID:  # only free options
        return 0, 1.0
    whole = all((cost == np.round(cost)).all() and (cost < 2**53).all() for cost in costs)
    if whole:
        unit = int(np.gcd.reduce(np.concatenate([cost.astype(np.int64) for cost in costs])))
        if unit and budget / unit <= 4 * GRID:
            return int(budget * (1 + SLACK) // unit), float(unit)
    return GRID, budget / GRID


def _worthwhile(steps: Ints, errors: Floats, cells: int) -> list[int]:
    """The Pareto-optimal options."""
    useful: list[int] = []
    lowest = np.inf
    for option in np.lexsort((errors, steps)):
        if steps[option] <= cells and errors[option] < lowest:
            useful.append(int(option))
            lowest = errors[option]
    return useful


def _fill_in(curves: Sequence[Curve], picks: list[int], budgets: Floats) -> list[int]:
    """Spend the rest greedily on the step with the best error reduction per share of the budgets."""
    picks = list(picks)
    spent = sum((curve.costs[:, i] for curve, i in zip(curves, picks, strict=True)), np.zeros(len(budgets)))
    room = budgets * (1 + SLACK)
    while True:
        best: tuple[float, int, int] | None = None
        for row, curve in enumerate(curves):
            extra = curve.costs - curve.costs[:, picks[row], None]  # [budgets, m]
            gain = curve.errors[picks[row]] - curve.errors
            fits = (spent[:, None] + extra <= room[:, None]).all(0) & (gain > 0)
            if fits.any():
                share = np.maximum((extra / np.maximum(budgets, 1e-300)[:, None]).max(0), 1e-12)
                rate = np.where(fits, gain / share, -np.inf)
                option = int(np.argmax(rate))
                if best is None or rate[option] > best[0]:
                    best = float(rate[option]), row, option
        if best is None:
            return picks
        _, row, option = best
        spent = spent + curves[row].costs[:, option] - curves[row].costs[:, picks[row]]
        picks[row] = option
