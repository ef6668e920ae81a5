"""High sparsity with retraining (3 epochs, 2e-5, no teacher): from the paper's binary mask, and from surgeon."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Lab, Row, main, pivot

from shearling.data import find_task
from shearling.data.encoder import make_encoder
from shearling.methods import Method, Paper, Surgeon
from shearling.workflows.training import Recipe, retrain

STARTS: dict[str, Method] = {
    "binary mask (paper)": Paper(tune=False),
    "surgeon, no refit": Surgeon(refit=False),
    "surgeon": Surgeon(),
}
BUDGETS = (0.2, 0.3, 0.1)
RECIPE = Recipe(epochs=3, lr=2e-5)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in sorted(lab.tasks, key=lambda name: len(lab.bench(name).train)):  # the quick ones first
            for start, method in STARTS.items():
                lab.check_time()
                bench = lab.bench(task)
                pruned = lab.pruned(task, method, flops)
                before = bench.exam.take(pruned.model).value
                encoder = make_encoder(bench.tokenizer, find_task(task), bench.model.config)
                train = bench.train.head(lab.limit)
                trained = retrain(pruned.model, encoder, train, RECIPE, device=lab.device)
                after = bench.exam.take(pruned.model).value
                yield {
                    "task": task, "flops": flops, "start": start, "dense": bench.dense, "before": before,
                    "after": after, "examples": len(train), "steps": trained.steps, "seconds": trained.seconds,
                }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "start"), value="before"), end="\n\nafter retraining:\n")
    print(pivot(found, ("flops", "start"), value="after"))


if __name__ == "__main__":
    main(sys.modules[__name__])
