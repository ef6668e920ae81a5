"""Units finer than heads: columns of the value and output projections, dimensions of queries and keys, and both.

    python experiments/finer.py --models MODELS --data DATA --seeds 0,1,2
    python experiments/finer.py --models MODELS --data DATA --seeds 0,1,2 --device cuda --polish auto

Everything else is as in `surgeon`: the same measurement, allocation, refit and polish. The students are simulated: what
is gone is zero on both sides, which neither refit nor polish can change, and FLOPs are counted from what is not zero.
Points are printed as they come and kept as lines of OUT/finer.jsonl; the same command goes on where it stopped, and
`--show` prints the table alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Bench, Lab, Row, arguments, lab_of
from finer_model import Chooser, Finer, Study, Variant, macs, repair, sizes
from torch import Tensor

from shearling.costs import SLACK
from shearling.data import encode, find_task
from shearling.engine.distance import compared, output_distance, output_scale
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.memory import cut_batches
from shearling.engine.polish import checked_polish, polish
from shearling.sample.batch import Batch
from shearling.sample.read import sample_of

BUDGETS = "0.2,0.1"
JUDGED = 1024  # dev rows
VARIANTS = {
    "heads": Variant(),
    "columns": Variant(columns=True),
    "columns, own basis": Variant(columns=True, own_basis=True),
    "scores": Variant(scores=True),
    "both": Variant(columns=True, own_basis=True, scores=True),
    "both, level": Variant(columns=True, own_basis=True, scores=True, level=True),
    "both, square": Variant(True, True, True, level=True, square=True),
    "both, level, as fast": Variant(True, True, True, level=True, as_fast=True),
    "both, square, as fast": Variant(True, True, True, level=True, square=True, as_fast=True),
}


class Judge:
    """The distance of a student's outputs from the dense model's on dev rows, which says more than the metric alone."""

    def __init__(self, bench: Bench) -> None:
        self.dense, self.device = bench.model, device_of(bench.model)
        rows, task = bench.rows("dev"), find_task(bench.task)
        batches = encode(
            rows, bench.tokenizer, task, model_config=self.dense.config, batch_size=bench.batch_size, samples=JUDGED
        )
        self.batches = cut_batches(sample_of(batches), self.device, backward=False)
        self.wanted = [self._outputs(self.dense, batch) for batch in self.batches]
        joined = {name: torch.cat([w[name] for w in self.wanted]) for name in self.wanted[0]}
        self.scale = output_scale(self.dense.config, joined)

    def _outputs(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        with frozen(model), torch.inference_mode():
            return compared(model, run(model, batch), batch)

    def __call__(self, model: Any) -> float:
        """The mean over the rows."""
        total = 0.0
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            found = self._outputs(model, batch)
            total += len(batch) * float(output_distance(model.config, found, wanted, batch, self.scale))
        return total / sum(map(len, self.batches))


def point(bench: Bench, judge: Judge, study: Study, chooser: Chooser, flops: float, setting: Any) -> Row:
    """One student, scored before polish and, where it is asked for, after."""
    began = time.monotonic()
    student = chooser.student(chooser.choose(flops))
    repair(study, student)
    row: Row = {"value": bench.exam.take(student.model).value, "distance": judge(student.model)}
    if setting != "off":
        found = polish(study.structure, student, study.plan.sample, setting, share=flops, seed=study.plan.seed,
                       precision=study.plan.method.precision)  # fmt: skip
        row |= {"polished": bench.exam.take(student.model).value, "polished_distance": judge(student.model)}
        row |= {"passes": found.passes}
    ratio = macs(study, student) / macs(study, study.structure)
    if ratio > flops * (1 + SLACK):
        raise SystemExit(f"the student has {ratio:.4f} of the FLOPs, more than {flops}")
    return row | {"ratio": ratio, "layers": sizes(student), "seconds": round(time.monotonic() - began, 1)}


def points(lab: Lab, options: Any, known: set[Any]) -> Iterator[Row]:
    """Every variant at every budget, one measurement a task and seed."""
    names = options.variants.split(";") if options.variants else list(VARIANTS)
    for seed in lab.seeds:
        for task in lab.tasks:
            missing = [
                (name, flops)
                for name in names
                for flops in map(float, options.budgets.split(","))
                if (task, name, flops, seed, str(options.polish)) not in known
            ]
            if not missing:
                continue
            bench = lab.bench(task)
            study, judge = Study(lab.plan(task, Finer(polish="off"), seed)), Judge(bench)
            chooser, last = None, ""
            for name, flops in missing:
                if chooser is None or name != last:
                    chooser, last = Chooser(study, VARIANTS[name]), name
                row = {"task": task, "variant": name, "flops": flops, "seed": seed, "polish": str(options.polish)}
                row |= {"samples": study.plan.sample.examples, "dense": bench.dense}
                yield row | point(bench, judge, study, chooser, flops, options.polish)


def read(path: Path) -> list[Row]:
    """The points so far."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def table(rows: list[Row]) -> list[list[str]]:
    """Per budget and variant: the loss in points of every task, and what is gained over whole heads of the same seeds.

    The last but one column is the distance of the outputs from the dense model's, over that of whole heads.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [["FLOPs", "units", "polish", *tasks, "mean loss", "gain", "distance", "seeds"]]
    polished = [row for row in rows if "polished" in row]
    plain = [row for row in rows if "polished" not in row] or polished  # scored before polish too
    for flops in sorted({row["flops"] for row in rows}, reverse=True):
        for word, score, group in (("no", "value", plain), ("yes", "polished", polished)):
            for name in VARIANTS:
                mine = [row for row in group if (row["flops"], row["variant"]) == (flops, name)]
                if mine:
                    lines.append([f"{flops:.0%}", name, word, *_cells(mine, group, tasks, score)])
    return lines


def _cells(mine: list[Row], rows: list[Row], tasks: list[str], score: str) -> list[str]:
    """One variant at one budget; means over tasks only where there are all of them."""
    distance = "distance" if score == "value" else "polished_distance"

    def same(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("task", "flops", "seed", "polish"))

    whole = {same(row): row for row in rows if row["variant"] == "heads"}
    figures: dict[str, list[tuple[float, float, float]]] = {task: [] for task in tasks}
    for row in mine:
        base = whole[same(row)]
        found = row["dense"] - row[score], row[score] - base[score], row[distance] / base[distance]
        figures[row["task"]].append(found)
    means = {task: [statistics.fmean(column) for column in zip(*rest, strict=True)] for task, rest in figures.items()}
    losses = [f"{means[task][0]:.2f}" if means[task] else "-" for task in tasks]
    if not all(figures.values()):
        return [*losses, "-", "-", "-", str(max(map(len, figures.values())))]
    loss, gain, ratio = (statistics.fmean(column) for column in zip(*means.values(), strict=True))
    return [*losses, f"{loss:.2f}", f"{gain:+.2f}", f"{ratio:.2f}", str(min(map(len, figures.values())))]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budgets", default=BUDGETS, help="comma-separated")
    parser.add_argument("--variants", help=f"separated by semicolons; all by default: {'; '.join(VARIANTS)}")
    parser.add_argument("--polish", default="off", help="off, auto, a number of passes, or seconds as 30s")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    options.polish = int(options.polish) if options.polish.isdigit() else checked_polish(options.polish)
    store = options.out / "finer.jsonl"
    if not options.show:
        lab = lab_of(options)
        if options.fresh:
            store.unlink(missing_ok=True)
        known = {(r["task"], r["variant"], r["flops"], r["seed"], r["polish"]) for r in read(store)}
        for row in points(lab, options, known):
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({k: v for k, v in row.items() if k != "layers"}), file=sys.stderr, flush=True)
    for line in table(read(store)):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
