"""What a unit is worth: magnitude, gradient or Fisher in the search, without and with rearrangement (tuning on)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Lab, Row, main, pivot

from shearling.methods import Paper

KINDS = ("magnitude", "gradient", "fisher")
BUDGETS = (0.6, 0.8, 0.4)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in lab.tasks:
            for rearranged in (False, True):
                for kind in KINDS:
                    method = Paper(importance=kind, rearrange=rearranged)
                    yield {"importance": kind, "rearranged": rearranged, **lab.mean(task, method, flops)}


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "rearranged", "importance")))


if __name__ == "__main__":
    main(sys.modules[__name__])
