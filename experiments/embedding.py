"""Embedding models before and after pruning: search and sentence similarity, polish, and what the texts are worth.

    python experiments/embedding.py --model all-MiniLM-L6-v2=DIR --data DIR --device cuda
    python experiments/embedding.py --model all-MiniLM-L6-v2=DIR --data DIR --device cuda --polish auto --study
    python experiments/embedding.py --model all-MiniLM-L6-v2=DIR --data DIR --latency      # one query, on this CPU

`bge.py` makes the directory of bge-small-en-v1.5. `--data` holds stsb.*, squad_v2.*, xquad.dev.* and wikitext2.valid.*
as in ../shared. Calibration texts are sentences of STS-B and questions and paragraphs of SQuAD's training part. Scored:
question -> paragraph among XQuAD's paragraphs and among those of SQuAD's dev part (R@1 and MRR@10; the pruned model on
both sides, and for the queries only, on the index of the dense model), and the Spearman correlation on STS-B's dev
part. Rows go to `results/embedding.json`; the same command goes on where it stopped, and `--minutes` ends it at the
next row.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.cli.options import polish as polish_of
from shearling.data import Rows, encode, read_rows
from shearling.engine.distil import Recipe
from shearling.engine.hooks import frozen
from shearling.engine.polish import polish
from shearling.engine.progress import Stages
from shearling.evaluation.exam import Exam, make_exam
from shearling.exporters import onnx
from shearling.exporters.formats import Job
from shearling.exporters.graph import reference
from shearling.latency.timing import device_name, in_turns
from shearling.methods import surgeon
from shearling.models.pooling import pooling_of, set_pooling
from shearling.models.structure import structure_of
from shearling.pipeline import Plan, Pruned, measure

RESULTS = Path(__file__).parent / "results" / "embedding.json"
BUDGETS = (0.8, 0.7, 0.6, 0.5, 0.3)
SAMPLES = 2048
SIZES = (512, 1024, 2048, 4096, 8192)
DRAWS = (1, 2, 4)
DOMAINS = ("paragraphs", "questions", "sentences", "wikitext")
EXAMS = ("xquad", "squad", "stsb")
STUDY_FLOPS = 0.5
LOSSES = {
    "distance of the embeddings": Recipe(hidden=0.0, similarities=0.0),
    "+ similarities within a batch": Recipe(hidden=0.0),
    "+ hidden states": Recipe(),
}
RECIPES = {
    "hidden x 10": Recipe(hidden=10.0),
    "no noise": Recipe(noise=0.0),
    "noise 0.2": Recipe(noise=0.2),
    "rate 1e-4": Recipe(rate=1e-4),
    "rate 1e-3": Recipe(rate=1e-3),
    "batch 32": Recipe(examples=32),
}
POWERS = (
    [0.0, 0.0],
    [1.0, 0.5],
    [2.0, 0.0],
    [2.0, 0.5],
    [2.0, 1.0],
)  # of a text's length, in measuring and in refitting
STUDIES = ("texts", "domain", "lengths", "draws", "loss")  # what `--study` alone runs; others by name
KEYS = (
    "study",
    "model",
    "flops",
    "polish",
    "texts",
    "draws",
    "domain",
    "seed",
    "loss",
    "recipe",
    "powers",
    "device",
    "threads",
)
Row = dict[str, Any]


class Results:
    """Rows on disk; a row that is there already is not made again."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.ends = path, time.monotonic() + 60 * minutes
        self.rows: list[Row] = json.loads(path.read_text()) if path.is_file() else []

    def add(self, keys: Row, make: Callable[[], Row]) -> None:
        """The row of these keys, made unless it is there."""
        if any(all(old.get(k) == keys.get(k) for k in KEYS) for old in self.rows):
            return
        if time.monotonic() > self.ends:
            sys.exit("out of time; the same command goes on from here")
        row = keys | make()
        self.rows.append(row)
        self.path.write_text("[\n" + ",\n".join(f" {json.dumps(r)}" for r in self.rows) + "\n]\n")
        print(json.dumps(row), flush=True)


class Bench:
    """One embedding model with its exams."""

    def __init__(self, name: str, folder: str, options: argparse.Namespace) -> None:
        self.name, self.data, self.batch_size = name, options.data, options.batch_size
        self.wanted = options.exams.split(",")
        self.model = load_model(folder, device="cpu" if options.latency else options.device, dtype="float32")
        self.tokenizer = load_tokenizer(folder)

    @cached_property
    def exams(self) -> dict[str, Exam]:
        """By name; the dense model embeds an index once."""
        found = {}
        for name in self.wanted:
            if name == "stsb":
                found[name] = self._exam(self.rows("stsb.dev"), "sts")
            else:
                rows = self.rows("xquad.dev") if name == "xquad" else self.answered()
                found[name] = self._exam(rows, "retrieval")
                found[f"{name}, dense index"] = self._exam(rows, "retrieval", index=self.model)
        return found

    def _exam(self, rows: Rows, task: str, **more: Any) -> Exam:
        metric = "r@1" if task == "retrieval" else None
        return make_exam(self.model, self.tokenizer, rows, task, batch_size=64, metric=metric, **more)

    def rows(self, stem: str) -> Rows:
        found = sorted(self.data.glob(f"{stem}.*"))
        if not found:
            sys.exit(f"no {stem}.jsonl or .xz under {self.data}")
        return read_rows(found[0])

    def answered(self) -> Rows:
        """SQuAD's dev questions that their paragraph answers."""
        rows = self.rows("squad_v2.dev")
        return rows.select(i for i, answers in enumerate(rows.column("answers")) if answers)

    def kinds(self) -> dict[str, list[str]]:
        """Texts to calibrate on; questions and paragraphs have the model's prompts of queries and documents, if any."""
        squad, sts = self.rows("squad_v2.train"), self.rows("stsb.train")
        query, document = (pooling_of(self.model).prompt(use) for use in ("query", "document"))
        return {
            "paragraphs": [document + text for text in dict.fromkeys(squad.column("context"))],
            "questions": [query + text for text in dict.fromkeys(squad.column("question"))],
            "sentences": list(dict.fromkeys([*sts.column("sentence1"), *sts.column("sentence2")])),
        }

    def texts(self, count: int, domain: str = "mixed", seed: int = 0) -> list[str]:
        """A quarter paragraphs, as many questions, the rest sentences; or one kind alone; or others, of WikiText."""
        rng = random.Random(seed)
        shares = {"paragraphs": count // 4, "questions": count // 4, "sentences": count}
        if domain == "wikitext":
            kinds = wikitext(self.rows("wikitext2.valid").column("text"))
        else:
            kinds, shares = self.kinds(), shares if domain == "mixed" else {domain: count}
        chosen: list[str] = []
        for kind, wanted in shares.items():
            chosen += rng.sample(kinds[kind], min(wanted, count - len(chosen), len(kinds[kind])))
        return chosen

    def plan(self, texts: Sequence[str], *, draws: int = 1, seed: int = 0) -> Plan:
        """Measured on these texts; with several draws, on the mean of as many gradients' second moments."""
        batches = encode(
            Rows({"text": list(texts)}), self.tokenizer, "embedding", model_config=self.model.config,
            batch_size=self.batch_size, labels="ignore", pooling=pooling_of(self.model),
        )  # fmt: skip
        plan = measure(self.model, batches, samples=len(texts), seed=seed)
        evidence = None
        for draw in range(draws if draws > 1 else 0):
            evidence = plan.method.measure(
                plan.structure, plan.sample, seed=seed + draw, stages=Stages(None), earlier=evidence
            )
        return plan if evidence is None else replace(plan, evidence=evidence)

    def score(self, model: Any) -> Row:
        row: Row = {}
        for name, exam in self.exams.items():
            result = exam.take(model)
            row[name] = round(result.value, 2)
            if "mrr@10" in result.extra:
                row[f"{name}, mrr@10"] = round(result.extra["mrr@10"], 2)
        return row

    def point(self, plan: Callable[[], Plan], flops: float, setting: str) -> Row:
        """Prune to this budget, polish as asked, and score; with what the report says of the run."""
        pruned = prune(plan(), flops, setting)
        report = pruned.report
        row: Row = {"texts": report.examples, "cosine": round(report.agreement["value"], 2)}
        if report.polish:
            row |= {"passes": report.polish["passes"], "polish_seconds": round(report.polish["seconds"], 1)}
        return row | {"seconds": round(sum(report.seconds.values()), 1)} | self.score(pruned.model)


def wikitext(lines: Sequence[str]) -> dict[str, list[str]]:
    """Paragraphs of WikiText and their sentences; it has no questions."""
    paragraphs = [line for line in lines if len(line.split()) > 8]
    sentences = [part for text in paragraphs for part in re.split(r"(?<= [.?!]) |\n", text) if len(part.split()) > 4]
    return {"paragraphs": paragraphs, "questions": [], "sentences": list(dict.fromkeys(sentences))}


def prune(plan: Plan, flops: float, setting: str) -> Pruned:
    """The measurement serves every way to polish."""
    return replace(plan, method=replace(plan.method, polish=polish_of(setting))).prune(flops=flops)


def sweep(bench: Bench, results: Results, budgets: Sequence[float], polishes: Sequence[str]) -> None:
    """All budgets from one measurement, polished in every way asked for."""
    common = {"study": "budget", "model": bench.name}
    results.add(common | {"flops": 1.0}, lambda: bench.score(bench.model))
    plan = Once(lambda: bench.plan(bench.texts(SAMPLES)))
    for setting in polishes:
        for flops in budgets:
            keys = common | {"flops": flops, "polish": setting, "texts": SAMPLES}
            results.add(keys, partial(bench.point, plan, flops, setting))


class Once:
    """A plan that is measured when it is first asked for."""

    def __init__(self, make: Callable[[], Plan]) -> None:
        self.make, self.found = make, None

    def __call__(self) -> Plan:
        self.found = self.found or self.make()
        return self.found


def study(bench: Bench, results: Results, names: Sequence[str], setting: str, flops: float) -> None:
    """At one budget: the texts, what long ones count, draws, the loss of measuring, loss and recipe of polish."""
    common = {"model": bench.name, "flops": flops, "polish": setting}

    def add(keys: Row, plan: Callable[[], Plan]) -> None:
        results.add(common | keys, lambda: bench.point(plan, flops, setting))

    if "texts" in names:
        for size in SIZES:
            add({"study": "texts", "texts": size}, lambda size=size: bench.plan(bench.texts(size)))
    if "domain" in names:
        for domain in DOMAINS:
            texts = bench.texts(SAMPLES, domain)
            add({"study": "domain", "domain": domain, "texts": len(texts)}, partial(bench.plan, texts))
    if "lengths" in names:
        for powers in POWERS:
            plan = partial(bench.plan, bench.texts(SAMPLES))
            with patch.multiple(surgeon, MEASURED=powers[0], REFITTED=powers[1]):
                add({"study": "lengths", "powers": powers, "texts": SAMPLES}, plan)
    if "draws" in names:
        for seed in (0, 1):
            for draws in DRAWS:
                plan = partial(bench.plan, bench.texts(SAMPLES, seed=seed), draws=draws, seed=10 * seed)
                add({"study": "draws", "draws": draws, "seed": seed, "texts": SAMPLES}, plan)
    if "direction" in names:
        add({"study": "direction", "texts": SAMPLES}, partial(_unnormalised, bench))
    for name, recipes in {"loss": LOSSES, "recipe": RECIPES}.items():
        if name in names:
            by_recipe(bench, results, common | {"study": name, "texts": SAMPLES}, setting, recipes)


def _unnormalised(bench: Bench) -> Plan:
    """Measured with the embedding as it is, not of length one."""
    own = pooling_of(bench.model)
    set_pooling(bench.model, replace(own, normalize=False, similarity="dot"))
    try:
        return bench.plan(bench.texts(SAMPLES))
    finally:
        set_pooling(bench.model, own)


def by_recipe(bench: Bench, results: Results, common: Row, setting: str, recipes: Mapping[str, Recipe]) -> None:
    """One pruned model, polished by every recipe."""
    plan = Once(lambda: bench.plan(bench.texts(SAMPLES)))
    start: list[Any] = []
    flops: float = common["flops"]

    def make(recipe: Recipe) -> Row:
        start[:] = start or [prune(plan(), flops, "off").model]
        student = copy.deepcopy(start[0])
        teacher, sample = plan().structure, plan().sample
        found = polish(teacher, structure_of(student), sample, polish_of(setting), share=flops, recipe=recipe)
        return {"judge": [found.before, found.after], "passes": found.passes} | bench.score(student)

    for name, recipe in recipes.items():
        results.add(common | {"recipe": name}, partial(make, recipe))


def latency(bench: Bench, results: Results, budgets: Sequence[float], rounds: int = 101) -> None:
    """One query on this CPU, dense and pruned in turns, in PyTorch and in ONNX Runtime."""
    plan = Once(lambda: bench.plan(bench.texts(256)))
    query = bench.tokenizer(bench.rows("xquad.dev").column("question")[0], return_tensors="pt")
    cpu = torch.device("cpu")

    def make(flops: float) -> Row:
        models = (bench.model, prune(plan(), flops, "off").model)
        row: Row = {"tokens": query["input_ids"].shape[-1]}
        with frozen(models[0]), frozen(models[1]), tempfile.TemporaryDirectory() as folder:
            runs = [partial(model, **query) for model in models]
            files = [as_onnx(model, query, Path(folder) / f"{i}.onnx") for i, model in enumerate(models)]
            for name, pair in {"": runs, "onnx_": files}.items():
                with torch.inference_mode():
                    dense, pruned = (1e3 * found.median for found in in_turns(pair, cpu, rounds=rounds))
                row |= {f"{name}ratio": round(dense / pruned, 3)}
                row |= {f"{name}dense_ms": round(dense, 3), f"{name}pruned_ms": round(pruned, 3)}
        return row

    for flops in budgets:
        keys = {"study": "latency", "model": bench.name, "flops": flops, "device": device_name(cpu)}
        results.add(keys | {"threads": torch.get_num_threads()}, partial(make, flops))


def as_onnx(model: Any, query: Mapping[str, torch.Tensor], path: Path) -> Callable[[], object]:
    """A run of the model's ONNX file on the query."""
    two = {name: torch.cat([value, value]) for name, value in query.items()}  # one would be taken for a fixed size
    onnx.write(Job(copy.deepcopy(model), two, list(reference(model, [two])[0]), path))
    return partial(onnx.open_runner(path), dict(query))


def main() -> None:
    """Run what was asked for, adding rows to the results as they come."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = Results(options.out, options.minutes)
    usual = (STUDY_FLOPS,) if options.study else BUDGETS
    polishes, budgets = options.polish.split(","), [float(word) for word in options.flops.split(",") if word] or usual
    for word in options.model:
        name, _, folder = word.partition("=")
        bench = Bench(name, folder, options)
        if options.latency:
            latency(bench, results, budgets)
        elif options.study:
            for setting, flops in product(polishes, budgets):
                study(bench, results, options.study.split(","), setting, flops)
        else:
            sweep(bench, results, budgets, polishes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune embedding models and score them as their users would.")
    parser.add_argument("--model", action="append", required=True, help="NAME=DIRECTORY; may be given several times")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--flops", default="", help=f"budgets, comma-separated; else {BUDGETS}, a study {STUDY_FLOPS}")
    parser.add_argument("--polish", default="off,auto,20", help="settings of polish, comma-separated")
    parser.add_argument("--exams", default=",".join(EXAMS), help="of xquad, squad and stsb")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--out", type=Path, default=RESULTS)
    what = parser.add_mutually_exclusive_group()
    every = ",".join(STUDIES)
    what.add_argument("--study", nargs="?", const=every, help=f"by default {every}; also direction, recipe")
    what.add_argument("--latency", action="store_true", help="time one query on this CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
