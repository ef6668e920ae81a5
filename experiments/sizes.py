"""How much faster and smaller a model pruned to 50, 30 and 10% of its FLOPs is on this CPU: sizes.json.

Dense and pruned models of a task take turns on a batch of 32 examples of 64 tokens; a megabyte is a million bytes of
weights in float32. `headline.py` puts the rows on the README's first screen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import SURGEON, Lab, Row, main, pivot

from shearling.latency.timing import in_turns

BUDGETS = (0.5, 0.3, 0.1)
BATCH, LENGTH = 32, 64
ROUNDS = 101


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        lab.check_time()
        dense = lab.bench(task).model.cpu()
        pruned = [lab.pruned(task, SURGEON, flops, lab.seeds[0]).model.cpu() for flops in BUDGETS]
        times = in_turns([_forward(model) for model in (dense, *pruned)], torch.device("cpu"), rounds=ROUNDS)
        for flops, model, time in zip(BUDGETS, pruned, times[1:], strict=True):
            yield {
                "task": task,
                "flops": flops,
                "speedup": times[0].median / time.median,
                "megabytes": _megabytes(model),
                "dense_megabytes": _megabytes(dense),
                "size": _megabytes(model) / _megabytes(dense),
            }


def _forward(model: Any) -> Callable[[], object]:
    tokens = torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def run() -> object:
        with torch.inference_mode():
            return model(input_ids=tokens, attention_mask=torch.ones_like(tokens))

    return run


def _megabytes(model: Any) -> float:
    return float(sum(p.numel() for p in model.parameters()) * 4 / 1e6)


def show(found: list[Row], lab: Lab) -> None:
    print("times faster than dense:\n" + pivot(found, ("flops",), value="speedup"))
    print("\nsize, of dense:\n" + pivot(found, ("flops",), value="size"))


if __name__ == "__main__":
    main(sys.modules[__name__])
