"""High sparsity: pruned, polished, and retrained (3 epochs, 2e-5), with the dense model as teacher after polish."""

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
    "surgeon": Surgeon(polish="off"),
    "surgeon + polish": Surgeon(polish=40),
}
DISTILLED = "surgeon + polish"  # also retrained with the dense model's outputs and hidden states
BUDGETS = (0.2, 0.1, 0.05)
RECIPE = Recipe(epochs=3, lr=2e-5)


def rows(lab: Lab) -> Iterator[Row]:
    for flops in BUDGETS:
        for task in sorted(lab.tasks, key=lambda name: len(lab.bench(name).train)):  # the quick ones first
            for start, method in STARTS.items():
                bench = lab.bench(task)
                for teacher in (None, bench.model) if start == DISTILLED else (None,):
                    lab.check_time()
                    pruned = lab.pruned(task, method, flops)
                    before = bench.exam.take(pruned.model).value
                    encoder = make_encoder(bench.tokenizer, find_task(task), bench.model.config)
                    train = bench.train.head(lab.limit)
                    trained = retrain(pruned.model, encoder, train, RECIPE, teacher=teacher, device=lab.device)
                    yield {
                        "task": task, "flops": flops, "start": start, "teacher": teacher is not None,
                        "dense": bench.dense, "before": before, "after": bench.exam.take(pruned.model).value,
                        "examples": len(train), "steps": trained.steps, "seconds": trained.seconds,
                    }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "start"), value="before"), end="\n\nafter retraining:\n")
    print(pivot(found, ("flops", "start", "teacher"), value="after"))


if __name__ == "__main__":
    main(sys.modules[__name__])
