"""Where the time goes: seconds per stage at 60% FLOPs, second run of two (the first one warms the device up)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, aligned, main

from shearling.pipeline import measure

FLOPS = 0.6


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        sample = lab.sample(task, lab.samples, 0)
        for method in (SURGEON, PAPER):
            for _ in range(2):
                lab.check_time()
                report = measure(lab.bench(task).model, sample, method=method).prune(flops=FLOPS).report
            total = sum(report.seconds.values())
            yield {
                "task": task, "method": method.name, "flops": FLOPS, "examples": report.examples,
                "mean_length": report.mean_length, "seconds": report.seconds, "total": total,
                "share": {stage: seconds / total for stage, seconds in report.seconds.items()},
            }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    for name in ("surgeon", "paper"):
        mine = [row for row in found if row["method"] == name]
        if mine:
            stages = list(mine[0]["seconds"])
            lines = [
                [
                    row["task"],
                    *(f"{row['seconds'][s]:.2f} ({row['share'][s]:.0%})" for s in stages),
                    f"{row['total']:.2f}",
                ]
                for row in mine
            ]
            print(aligned([[name, *stages, "total s"], *lines]), end="\n\n")


if __name__ == "__main__":
    main(sys.modules[__name__])
