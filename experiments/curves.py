"""Accuracy against FLOPs, both methods, every task (the paper's main figure): curves.json and curves-TASK.svg."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, main, pivot

from shearling.report.points import curve_chart

BUDGETS = (0.5, 0.3, 0.7, 0.6, 0.2, 0.1, 0.4, 0.8, 0.9)  # the most telling first, in case time runs out


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in lab.tasks:
            for method in (SURGEON, PAPER):
                yield {"method": method.name, **lab.mean(task, method, flops)}


def show(found: list[Row], lab: Lab) -> None:
    found = sorted(found, key=lambda row: (row["method"] != "surgeon", -row["flops"]))
    print(pivot(found, ("method", "flops")))
    for task in {row["task"] for row in found}:
        mine = [row for row in found if row["task"] == task]
        picture = curve_chart(mine, dense=mine[0]["dense"], title=task)
        (lab.out / f"curves-{task}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(sys.modules[__name__])
