"""How many examples are enough: 512 to 8,192 (as far as the training set goes) against accuracy and time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, aligned, main

SIZES = (512, 1024, 2048, 4096, 8192)
FLOPS = 0.5


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        available = len(lab.bench(task).train)
        for samples in SIZES:
            if samples > available:
                continue
            for method in (SURGEON, PAPER):
                yield {"method": method.name, "samples": samples, **lab.mean(task, method, FLOPS, samples=samples)}


def show(found: list[Row], lab: Lab) -> None:
    lines = [
        [r["task"], r["method"], str(r["samples"]), f"{r['value']:.2f}", f"{r['drop']:+.2f}", f"{r['seconds']:.2f}"]
        for r in found
    ]
    print(aligned([["task", "method", "samples", "value", "drop", "seconds"], *lines]))


if __name__ == "__main__":
    main(sys.modules[__name__])
