"""`max_drop`: the smallest budget within an allowed loss of the score, by bisection over one measurement."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shearling.costs import KINDS
from shearling.engine.progress import Watcher
from shearling.errors import ConstraintError, InputError
from shearling.evaluation.exam import Evaluation, Exam
from shearling.pipeline import Plan, Pruned
from shearling.report.points import gain
from shearling.target import BY, Target
from shearling.workflows.progress import SCORED, quiet
from shearling.workflows.pruning import with_scores

STEP = 0.01  # resolution of the budgets
HIGHEST = (0.95, 0.99)  # tried if no smaller budget is allowed
TRIES = 7  # approximate number of bisection steps
T = TypeVar("T")


@dataclass(frozen=True)
class Tried:
    """One budget that was tried: the score, its loss against dense, and whether that is allowed."""

    budget: float
    value: float | None
    drop: float | None
    allowed: bool
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """The allowed loss.

    points  of the metric (maximum increase for perplexity)
    by      kind of budget
    """

    points: float
    by: str = BY

    def checked(self, target: Target) -> Target:
        """Returns a validated target with the largest budget to try; raises if `target` has a budget of its own."""
        if not self.points >= 0:
            raise ConstraintError(f"--max-drop {self.points:g} makes no sense; 1.0 allows a loss of one point.")
        if self.by not in KINDS:
            raise InputError(f"--by {self.by} is not known; there are flops, params and latency.")
        given = [name for name in KINDS if getattr(target, name) is not None]
        if given:
            raise ConstraintError(f"--max-drop finds the budget itself; leave out --{given[0]}, or --max-drop.")
        if self.by == "latency" and target.table is None:
            raise ConstraintError(
                "--by latency needs the --table that all budgets are tried against; `shearling profile` makes it."
            )
        return self._aim(target, HIGHEST[0]).checked()

    def meet(self, plan: Plan, target: Target, exam: Exam, watcher: Watcher = quiet) -> Pruned:
        """Returns the smallest model found within the allowed loss; its report lists every budget tried."""
        dense = exam.take(plan.structure.model, progress=partial(watcher, SCORED[0]))
        watcher("max-drop", 0, TRIES)
        tries = itertools.count(1)

        def attempt(budget: float) -> tuple[tuple[Pruned, Evaluation] | None, Tried]:
            try:
                pruned = plan.meet(self._aim(target, budget))
            except ConstraintError as error:  # infeasible
                return None, Tried(budget, None, None, False, str(error))
            score = exam.take(pruned.model, progress=partial(watcher, "evaluate"))
            watcher("max-drop", min(next(tries), TRIES), TRIES)
            lost = gain(dense.metric, score.value, dense.value)
            return (pruned, score), Tried(budget, score.value, lost, lost <= self.points + 1e-9)

        found, tried = smallest(attempt)
        if found is None:
            raise ConstraintError(_nothing(self, dense.metric, dense.value, tried))
        pruned, score = found
        best = min(t.budget for t in tried if t.allowed)
        chosen = next(t for t in tried if t.budget == best)
        facts = {
            "allowed": self.points, "by": self.by, "metric": dense.metric, "dense": dense.value, "value": chosen.value,
            "drop": chosen.drop, "examples": dense.examples, "tried": [asdict(t) for t in tried],
        }  # fmt: skip
        pruned = with_scores(pruned, exam, dense, score)
        return replace(pruned, report=replace(pruned.report, max_drop=facts))

    def _aim(self, target: Target, budget: float) -> Target:
        wanted: dict[str, Any] = {self.by: budget}
        return replace(target, **wanted)


def smallest(attempt: Callable[[float], tuple[T | None, Tried]]) -> tuple[T | None, list[Tried]]:
    """Bisect over the budgets; the result was tried and is allowed.

    If the loss is not monotone, bisection may miss a smaller budget, but never returns one that loses too much.
    """
    best: T | None = None
    tried: list[Tried] = []

    def allowed(budget: float) -> bool:
        nonlocal best
        result, told = attempt(budget)
        tried.append(told)
        if told.allowed:
            best = result
        return told.allowed

    low, high = 0, round(HIGHEST[0] / STEP)  # in steps: `low` is too small, `high` may be allowed
    while high - low > 1:
        middle = (low + high) // 2
        if allowed(round(middle * STEP, 6)):
            high = middle
        else:
            low = middle
    if best is None:
        any(allowed(budget) for budget in HIGHEST)
    return best, tried


def drop_of(points: float | None, by: str = BY) -> Drop | None:
    """The allowed loss from the options; `by` is only valid with `points`."""
    if points is None:
        if by != BY:
            raise InputError("--by is of use with --max-drop only, such as --max-drop 1.0.")
        return None
    return Drop(points, by)


def describe_drop(found: dict[str, Any]) -> str:
    """The budgets tried, as text."""
    lines = [f"  {found['metric']} of dense {found['dense']:.2f}, allowed to lose {found['allowed']:g}; tried:"]
    for tried in found["tried"]:
        value = tried["value"]
        score = "cannot be met" if value is None else f"{value:.2f} ({value - found['dense']:+.2f})"
        lines.append(f"    {found['by']} {tried['budget']:.2f}  {score}  {'ok' if tried['allowed'] else 'too much'}")
    return "\n".join(lines)


def _nothing(drop: Drop, metric: str, dense: float, tried: list[Tried]) -> str:
    scored = [t for t in tried if t.drop is not None]
    least = min(scored, key=lambda t: t.drop or 0.0, default=None)
    seen = (
        "No budget could be met." if least is None else f"The least lost was {least.drop:.2f}, at {least.budget:.2f}."
    )
    return (
        f"No {drop.by} budget up to {max(HIGHEST)} keeps {metric} within {drop.points:g} points of dense "
        f"({dense:.2f}) on these rows. {seen} Allow a larger --max-drop, or give more data with --samples."
    )
