"""What each stage brings: search, + rearrangement, + tuning (the paper's ablation table); surgeon's order, + refit."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Lab, Row, main, pivot

from shearling.methods import Paper, Surgeon

STAGES = {
    "paper: search": Paper(rearrange=False, tune=False),
    "paper: + rearrangement": Paper(tune=False),
    "paper: + tuning": Paper(),
    "surgeon: order": Surgeon(refit=False),
    "surgeon: + refit": Surgeon(),
}
BUDGETS = (0.6, 0.4)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in lab.tasks:
            for stages, method in STAGES.items():
                yield {"stages": stages, **lab.mean(task, method, flops)}


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "stages")))


if __name__ == "__main__":
    main(sys.modules[__name__])
