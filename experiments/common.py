"""What the experiments share: a laboratory that measures each model once and never computes a point twice.

A point is one pruned model, scored: (task, method, budget, seed, sample size). Points are kept in `points.jsonl`
beside the tables, so that experiments share them and an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer, named_device
from shearling.data import Rows, encode, find_task, read_rows
from shearling.evaluation.exam import Exam, make_exam
from shearling.latency.timing import device_name
from shearling.methods import Method, Paper, Surgeon
from shearling.methods.ranges import Shape
from shearling.pipeline import Plan, Pruned, measure
from shearling.sample.read import sample_of
from shearling.sample.sample import Sample
from shearling.workflows.prune import prune

TASKS = ("sst2", "stsb", "mrpc", "qnli")
PLANS = 6  # measurements kept in memory
Row = dict[str, Any]


class OutOfTime(Exception):
    """No new point may be started."""


@dataclass
class Bench:
    """One task: its fine-tuned model, its examples, its exam."""

    task: str
    models: Path
    data: Path
    device: str
    limit: int | None
    batch_size: int

    @cached_property
    def folder(self) -> Path:
        found = sorted(p for p in self.models.glob(f"*{self.task}") if (p / "config.json").is_file())
        if not found:
            sys.exit(f"no model for {self.task} under {self.models}: expected a folder whose name ends in {self.task}")
        return found[0]

    @cached_property
    def model(self) -> Any:
        return load_model(str(self.folder), device=self.device)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.folder))

    def rows(self, split: str) -> Rows:
        found = sorted(self.data.glob(f"{self.task}.{split}.*"))
        if not found:
            sys.exit(f"no {split} data for {self.task} under {self.data}: expected {self.task}.{split}.jsonl or .xz")
        return read_rows(found[0])

    @cached_property
    def train(self) -> Rows:
        return self.rows("train")

    @cached_property
    def exam(self) -> Exam:
        return make_exam(
            self.model, self.tokenizer, self.rows("dev"), self.task, batch_size=2 * self.batch_size, limit=self.limit
        )

    @cached_property
    def dense(self) -> float:
        return self.exam.take(self.model).value

    def sample(self, samples: int, seed: int) -> Sample:
        batches = encode(
            self.train, self.tokenizer, find_task(self.task), model_config=self.model.config,
            batch_size=self.batch_size, samples=samples, seed=seed,
        )  # fmt: skip
        return sample_of(batches)


@dataclass
class Lab:
    """The models, the clock, and every point so far."""

    models: Path
    data: Path
    out: Path
    device: str = "auto"
    tasks: Sequence[str] = TASKS
    seeds: Sequence[int] = (0,)
    samples: int = 2048
    limit: int | None = None
    batch_size: int = 32
    deadline: float | None = None
    fresh: bool = False
    shape: Shape = "uneven"
    own_calls: bool = False
    _benches: dict[str, Bench] = field(default_factory=dict)
    _plans: OrderedDict[Any, Plan] = field(default_factory=OrderedDict)
    _samples: OrderedDict[Any, Sample] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = self.out / "points.jsonl"
        if self.fresh:
            self._file.unlink(missing_ok=True)
        self._points: dict[str, Row] = {}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                try:
                    point = json.loads(line)
                except ValueError:  # the last line of a run that was stopped
                    continue
                self._points[point["key"]] = point

    def bench(self, task: str) -> Bench:
        if task not in self._benches:
            self._benches[task] = Bench(task, self.models, self.data, self.device, self.limit, self.batch_size)
        return self._benches[task]

    def sample(self, task: str, samples: int, seed: int) -> Sample:
        return recent(self._samples, (task, samples, seed), lambda: self.bench(task).sample(samples, seed))

    def plan(self, task: str, method: Method, seed: int, samples: int | None = None) -> Plan:
        """One measurement serves every budget and every variant of a method."""
        samples = samples or self.samples
        # What a measurement depends on: surgeon's on labels and damping, the paper's on how it weighs its gradients.
        how = ("labels", "damp") if isinstance(method, Surgeon) else ("importance",)
        family = (method.name, *(getattr(method, setting) for setting in ("precision", *how)))
        sample = self.sample(task, samples, seed)
        plan = recent(
            self._plans,
            (task, family, seed, samples),
            lambda: measure(self.bench(task).model, sample, method=method, seed=seed, samples=samples),
        )
        return replace(plan, method=method)

    def pruned(self, task: str, method: Method, flops: float, seed: int = 0, samples: int | None = None) -> Pruned:
        """From the measurement that all budgets share, or by a call of its own, as users call it."""
        if not self.own_calls:
            return self.plan(task, method, seed, samples).prune(flops=flops, shape=self.shape)
        sample = self.sample(task, samples or self.samples, seed)
        return prune(self.bench(task).model, sample, flops=flops, shape=self.shape, method=method, seed=seed)

    def point(self, task: str, method: Method, flops: float, seed: int = 0, samples: int | None = None) -> Row:
        """One pruned model, scored; from the store if it was done before."""
        samples = samples or self.samples
        settings = {"method": method.name, **asdict(method)}  # type: ignore[call-overload]
        settings.pop("seed", None)
        ways = [self.shape] * (self.shape != "uneven") + ["own calls"] * self.own_calls
        key = json.dumps([task, settings, flops, seed, samples, self.limit, *ways], sort_keys=True)

        def score() -> Row:
            pruned = self.pruned(task, method, flops, seed, samples)
            result = self.bench(task).exam.take(pruned.model)
            report = pruned.report
            return {
                "task": task, "method": method.name, "settings": settings, "flops": flops, "seed": seed,
                "samples": report.examples, "metric": result.metric, "value": result.value,
                "dense": self.bench(task).dense, "ratio": report.flops.ratio,
                "seconds": {**report.seconds, "total": sum(report.seconds.values())},
                "evaluate_seconds": result.seconds, "layers": report.layers,
                "notes": [r.note for r in report.repairs if r.note], "polish": report.polish,
                "stock": report.stock,
            }  # fmt: skip

        return self.kept(key, score)

    def kept(self, key: str, make: Callable[[], Row]) -> Row:
        """A point from the store, or made now and stored."""
        if key not in self._points:
            self.check_time()
            self._keep({"key": key, **make()})
            release()
        return self._points[key]

    def mean(
        self,
        task: str,
        method: Method,
        flops: float,
        *,
        seeds: Sequence[int] | None = None,
        samples: int | None = None,
    ) -> Row:
        """A point averaged over the seeds, as a row of a table."""
        points = [self.point(task, method, flops, seed, samples) for seed in seeds or self.seeds]
        values = [p["value"] for p in points]
        dense = points[0]["dense"]
        return {
            "task": task,
            "flops": flops,
            "metric": points[0]["metric"],
            "dense": dense,
            "value": statistics.fmean(values),
            "drop": dense - statistics.fmean(values),
            "low": min(values),
            "high": max(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
            "seeds": len(values),
            "seconds": statistics.fmean(p["seconds"]["total"] for p in points),
        }

    def check_time(self) -> None:
        """Complain where nothing new may begin."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime

    def _keep(self, point: Row) -> None:
        self._points[point["key"]] = point
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")


def release() -> None:
    """Return the memory of recorded steps to the GPU, where other experiments may run."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def recent(memory: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The value for a key; only the last few stay."""
    if key not in memory:
        memory[key] = make()
    memory.move_to_end(key)
    while len(memory) > PLANS:
        memory.popitem(last=False)
    return memory[key]


def execute(name: str, experiment: Callable[[Lab], Iterator[Row]], lab: Lab) -> list[Row]:
    """Run an experiment as far as the time goes, and write its rows as JSON."""
    rows: list[Row] = []
    began = time.monotonic()

    def write(complete: bool) -> None:
        record = {
            "experiment": name,
            "complete": complete,
            "settings": {
                "samples": lab.samples,
                "seeds": list(lab.seeds),
                "limit": lab.limit,
                "device": device_name(named_device(lab.device)),
            },
            "seconds": round(time.monotonic() - began, 2),
            "rows": rows,
        }
        partial = lab.out / f".{name}.json.part"
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(lab.out / f"{name}.json")

    try:
        for row in experiment(lab):
            rows.append(row)
            write(complete=False)
    except OutOfTime:
        print(f"{name}: out of time; {len(rows)} rows are kept, the same command goes on from there", file=sys.stderr)
        return rows
    write(complete=True)
    return rows


def pivot(rows: Iterable[Row], index: Sequence[str], column: str = "task", value: str = "value") -> str:
    """A table as text: one line per combination of `index`, one column per `column`, and the mean of the line."""
    lines: dict[tuple[Any, ...], dict[Any, float]] = {}
    columns: list[Any] = []
    for row in rows:
        lines.setdefault(tuple(row[name] for name in index), {})[row[column]] = row[value]
        if row[column] not in columns:
            columns.append(row[column])
    cells = [[*index, *map(str, columns), "mean"]]
    for key, found in lines.items():
        whole = len(found) == len(columns)
        average = f"{statistics.fmean(found.values()):.2f}" if whole else "-"
        cells.append([*map(str, key), *(f"{found[c]:.2f}" if c in found else "-" for c in columns), average])
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first line is the head."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]])


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every experiment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", type=Path, required=True, help="folder with one model directory a task")
    parser.add_argument("--data", type=Path, required=True, help="folder with TASK.train.* and TASK.dev.*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where tables go")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--samples", type=int, default=2048, help="calibration examples")
    parser.add_argument("--limit", type=int, help="score on the first so many dev rows only (to try things out)")
    parser.add_argument("--batch-size", type=int, help="32 on a CPU, 128 on a GPU")
    parser.add_argument("--fresh", action="store_true", help="forget the points of earlier runs")
    return parser


def lab_of(options: argparse.Namespace, deadline: float | None = None) -> Lab:
    gpu = named_device(options.device).type != "cpu"
    return Lab(
        options.models, options.data, options.out, options.device, options.tasks.split(","),
        [int(seed) for seed in options.seeds.split(",")], options.samples, options.limit,
        options.batch_size or (128 if gpu else 32), deadline, options.fresh,
    )  # fmt: skip


def main(module: Any) -> None:
    """The command line of one experiment: `rows(lab)` makes it, `show(rows, lab)` prints it."""
    lab = lab_of(arguments(module.__doc__).parse_args())
    name = Path(module.__file__).stem
    module.show(execute(name, module.rows, lab), lab)


PAPER = Paper()
SURGEON = Surgeon()
