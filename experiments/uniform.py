"""The same ratio in every layer against a searched one: magnitude, gradient and Fisher, without and with tuning."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Lab, Row, main, pivot

from shearling.methods import Method, Paper, Surgeon


def variants() -> dict[str, Method]:
    found: dict[str, Method] = {}
    for tuned, suffix in ((False, ""), (True, " + tuning")):
        for kind in ("magnitude", "gradient", "fisher"):
            uniform = Paper(importance=kind, allocation="uniform", rearrange=False, tune=tuned)
            found[f"uniform {kind}{suffix}"] = uniform
        found[f"paper{suffix}"] = Paper(tune=tuned)
    return found | {"surgeon, no refit": Surgeon(refit=False), "surgeon": Surgeon()}


BUDGETS = (0.6, 0.8, 0.4)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in lab.tasks:
            for name, method in variants().items():
                yield {"variant": name, **lab.mean(task, method, flops)}


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "variant")))


if __name__ == "__main__":
    main(sys.modules[__name__])
