"""How much the draw of the sample matters: seeds 0 to 9, mean, spread and deviation."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, aligned, main

BUDGETS = (0.5,)
SEEDS = range(10)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in lab.tasks:
            for method in (SURGEON, PAPER):
                yield {"method": method.name, **lab.mean(task, method, flops, seeds=SEEDS)}


def show(found: list[Row], lab: Lab) -> None:
    head = ["task", "flops", "method", "dense", "mean", "deviation", "low", "high"]
    lines = [
        [row["task"], f"{row['flops']:g}", row["method"]]
        + [f"{row[name]:.2f}" for name in ("dense", "value", "deviation", "low", "high")]
        for row in found
    ]
    print(aligned([head, *lines]))


if __name__ == "__main__":
    main(sys.modules[__name__])
