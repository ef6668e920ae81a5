"""The tuning of the authors' released code differs from the paper in four ways; each against ours: released.json.

Damping on the normal equations instead of the least squares, the first layer's attention left as it is, the last FFN
of a classifier tuned on the first token only, and a teacher that is itself pruned, to the square root of the ratio.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from common import PAPER, Lab, Row, main, pivot
from torch import Tensor

from shearling.engine import repair as walk
from shearling.methods import paper as method
from shearling.models.structure import Stack, structure_of
from shearling.paper import tune as tuning
from shearling.pipeline import Plan

BUDGETS = (0.7, 0.5, 0.3)


def damped_normal_equations(plan: Plan, flops: float) -> AbstractContextManager[Any]:
    """min |N r - rest|^2 + damp^2 |r|^2, with N = A^T A where the paper has A."""

    def solve(normal: Tensor, rest: Tensor, damp: float) -> Tensor:
        values, vectors = torch.linalg.eigh(normal)
        return vectors @ (values / (values**2 + damp**2) * (vectors.T @ rest))

    return patch.object(tuning, "_solve", solve)


@contextmanager
def first_attention_untuned(plan: Plan, flops: float) -> Iterator[None]:
    first = plan.structure.sublayers[0]
    usual = method.tune
    called = False

    def tune(weight: Tensor, bias: Tensor | None, moments: Any, width: int, *, damp: float) -> tuning.Tuned:
        nonlocal called
        found = usual(weight, bias, moments, width, damp=damp)
        its_turn = not called and width == first.width  # where nothing is left of it, the first call is for an FFN
        called = True
        return tuning.Tuned(torch.ones_like(found.mask), found.before, found.before) if its_turn else found

    with patch.object(method, "tune", tune):
        yield


def last_on_first_token(plan: Plan, flops: float) -> AbstractContextManager[Any]:
    usual_moments, usual_rows = walk._Pair._moments, Stack.rows

    def rows(self: Stack, batch: Any, shape: torch.Size, part: Any = "all") -> Tensor:
        every = torch.arange(shape.numel())
        found = usual_rows(self, batch, shape, part)
        chosen = every[found if isinstance(found, slice) else found.cpu()]
        return chosen[chosen % shape[1] == 0]

    def moments(self: Any, *args: Any, **how: Any) -> Any:
        last = self.depth == len(self.dense.sublayers) - 1 and self.part == len(self.dense.sublayers[-1]) - 1
        with patch.object(Stack, "rows", rows) if last else nullcontext():
            return usual_moments(self, *args, **how)

    return patch.object(walk._Pair, "_moments", moments)


def pruned_teacher(plan: Plan, flops: float) -> AbstractContextManager[Any]:
    untuned = replace(plan, method=replace(PAPER, tune=False))
    teacher = structure_of(untuned.prune(flops=math.sqrt(flops)).model)
    usual = method.Paper.repair

    def repair(self: Any, _: Any, student: Any, sample: Any, *, stages: Any, states: Any = None) -> Any:
        return usual(self, teacher, student, sample, stages=stages)

    return patch.object(method.Paper, "repair", repair)


Change = Callable[[Plan, float], AbstractContextManager[Any]]
CHANGES: dict[str, Change] = {
    "damped normal equations": damped_normal_equations,
    "first attention untuned": first_attention_untuned,
    "last FFN on the first token": last_on_first_token,
    "pruned teacher": pruned_teacher,
}
VARIANTS = {"paper": (), **{name: (change,) for name, change in CHANGES.items()}, "all four": tuple(CHANGES.values())}


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        bench = lab.bench(task)
        for flops in BUDGETS:
            for name, changes in VARIANTS.items():
                values = []
                for seed in lab.seeds:
                    lab.check_time()
                    plan = lab.plan(task, PAPER, seed)
                    with ExitStack() as stack:
                        for change in changes:
                            stack.enter_context(change(plan, flops))
                        model = plan.prune(flops=flops).model
                    values.append(bench.exam.take(model).value)
                yield {
                    "variant": name, "task": task, "flops": flops, "value": statistics.fmean(values),
                    "low": min(values), "high": max(values), "seeds": len(values),
                }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "variant")))


if __name__ == "__main__":
    main(sys.modules[__name__])
