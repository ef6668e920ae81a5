"""How agreement with the dense model, which needs no labels, goes with the loss of score: where should a report warn?

Agreement is what every report has: on the examples of the sample that no fit has seen. The loss is on the dev set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, main, pivot

from shearling.engine.agreement import POOR

BUDGETS = (0.7, 0.5, 0.3, 0.2)


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        exam = lab.bench(task).exam
        dense = exam.take(lab.bench(task).model).value
        for method in (SURGEON, PAPER):
            for flops in BUDGETS:
                lab.check_time()
                pruned = lab.pruned(task, method, flops, lab.seeds[0])
                found = pruned.report.agreement
                if found is None:
                    raise ValueError("the sample is too small to keep examples out; give more --samples")
                yield {
                    "task": task, "method": method.name, "flops": flops, "kind": found["kind"],
                    "agreement": found["value"], "examples": found["examples"],
                    "lost": dense - exam.take(pruned.model).value,
                }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    print("agreement:\n" + pivot(found, ("method", "flops"), value="agreement"))
    print("\npoints lost:\n" + pivot(found, ("method", "flops"), value="lost"))
    for warned in (True, False):
        lost = sorted(row["lost"] for row in found if (row["agreement"] < POOR[row["kind"]]) is warned)
        if lost:
            told = f"{lost[0]:.1f} to {lost[-1]:.1f} points lost, {lost[len(lost) // 2]:.1f} in the middle"
            print(f"\n{'with' if warned else 'without'} a warning: {len(lost)} models, {told}")


if __name__ == "__main__":
    main(sys.modules[__name__])
