"""What the precision of the passes changes on a GPU: units chosen otherwise than in float32, and the metric.

The passes that measure and repair run in bfloat16 by default (norms, residuals, sums and solves do not). Units that are
nearly interchangeable trade places at the least disturbance, so the share that differs is compared with what a sample
of other examples changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from common import PAPER, SURGEON, Lab, Row, main, pivot
from torch import Tensor

from shearling.engine.precision import Precision

METHODS = {"surgeon": SURGEON, "paper": PAPER, "paper, search alone": replace(PAPER, rearrange=False, tune=False)}
BUDGETS = (0.7, 0.5, 0.3)


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        for name, method in METHODS.items():
            for flops in BUDGETS:
                exact: list[Tensor] = []
                for precision in (*get_args(Precision), "float32, another sample"):
                    lab.check_time()
                    other = precision not in get_args(Precision)
                    chosen = replace(method, precision="float32" if other else precision)
                    pruned = lab.pruned(task, chosen, flops, seed=lab.seeds[0] + other)
                    exact = exact or pruned.kept
                    value = lab.bench(task).exam.take(pruned.model).value
                    differ = 100 * differing(exact, pruned.kept)
                    yield {"method": name, "task": task, "flops": flops, "precision": precision,
                           "value": value, "differ": differ}  # fmt: skip


def differing(kept: list[Tensor], others: list[Tensor]) -> float:
    """The share of the units kept in one model that the other lacks."""
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(kept, others, strict=True))
    return 1 - shared / sum(map(len, kept))


def show(found: list[Row], lab: Lab) -> None:
    print("units that differ from float32, in %:\n" + pivot(found, ("method", "flops", "precision"), value="differ"))
    print("\nmetric:\n" + pivot(found, ("method", "flops", "precision")))


if __name__ == "__main__":
    main(sys.modules[__name__])
