"""Embedding models before and after pruning: search and sentence similarity, and what the calibration texts are worth.

    python experiments/embedding.py --model minilm=DIR --model mpnet=DIR --data DIR --device cuda
    python experiments/embedding.py --model minilm=DIR --data DIR --study            # texts, domains, draws
    python experiments/embedding.py --model minilm=DIR --data DIR --latency          # one query, on this CPU

`--data` holds stsb.*, squad_v2.*, xquad.dev.* and wikitext2.valid.* as in ../shared. Calibration texts are sentences of
STS-B and questions and paragraphs of SQuAD's training part. Scored: question -> paragraph among XQuAD's paragraphs and
among those of SQuAD's dev part (R@1 and MRR@10; the pruned model on both sides, and for the queries only, on the index
of the dense model), and the Spearman correlation on STS-B's dev part. Rows go to `results/embedding.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import Rows, encode, read_rows
from shearling.engine.hooks import frozen
from shearling.evaluation.exam import Exam, make_exam
from shearling.latency.timing import device_name, in_turns
from shearling.models.pooling import pooling_of, set_pooling
from shearling.pipeline import Plan, measure
from shearling.report.charts import Level, Point, Series, chart
from shearling.surgeon.measure import measure as curvatures
from shearling.surgeon.order import order

RESULTS = Path(__file__).parent / "results" / "embedding.json"
BUDGETS = (0.8, 0.7, 0.6, 0.5, 0.3)
SAMPLES = 2048
SIZES = (512, 1024, 2048, 4096, 8192)
DRAWS = (1, 2, 4)
Row = dict[str, Any]


class Bench:
    """One embedding model with its exams."""

    def __init__(self, name: str, folder: str, data: Path, device: str, batch_size: int) -> None:
        self.name, self.data, self.batch_size = name, data, batch_size
        self.model = load_model(folder, device=device, dtype="float32")
        self.tokenizer = load_tokenizer(folder)
        self.exams = {
            "xquad": self.exam(self.rows("xquad.dev"), "retrieval", own=True),
            "xquad, dense index": self.exam(self.rows("xquad.dev"), "retrieval", own=False),
            "squad": self.exam(self.answered(), "retrieval", own=True),
            "squad, dense index": self.exam(self.answered(), "retrieval", own=False),
            "stsb": self.exam(self.rows("stsb.dev"), "sts", own=True),
        }

    def rows(self, stem: str) -> Rows:
        found = sorted(self.data.glob(f"{stem}.*"))
        if not found:
            sys.exit(f"no {stem}.jsonl or .xz under {self.data}")
        return read_rows(found[0])

    def answered(self) -> Rows:
        """SQuAD's dev questions that their paragraph answers."""
        rows = self.rows("squad_v2.dev")
        return rows.select(i for i, answers in enumerate(rows.column("answers")) if answers)

    def exam(self, rows: Rows, task: str, *, own: bool) -> Exam:
        index = None if own else self.model
        metric = "r@1" if task == "retrieval" else None
        return make_exam(self.model, self.tokenizer, rows, task, batch_size=64, metric=metric, index=index)

    def texts(self, count: int, domain: str = "mixed", seed: int = 0) -> list[str]:
        """Calibration texts: a quarter paragraphs, as many questions, the rest sentences; or one kind alone."""
        squad, sts = self.rows("squad_v2.train"), self.rows("stsb.train")
        kinds = {
            "paragraphs": list(dict.fromkeys(squad.column("context"))),
            "questions": list(dict.fromkeys(squad.column("question"))),
            "sentences": list(dict.fromkeys([*sts.column("sentence1"), *sts.column("sentence2")])),
        }
        if domain == "wikitext":
            kinds["wikitext"] = [t for t in self.rows("wikitext2.valid").column("text") if len(t.split()) > 8]
        rng = random.Random(seed)
        if domain != "mixed":
            return rng.sample(kinds[domain], min(count, len(kinds[domain])))
        chosen = rng.sample(kinds["paragraphs"], min(count // 4, len(kinds["paragraphs"])))
        chosen += rng.sample(kinds["questions"], min(count // 4, len(kinds["questions"])))
        return [*chosen, *rng.sample(kinds["sentences"], count - len(chosen))]

    def plan(self, texts: Sequence[str], *, draws: int = 1, seed: int = 0) -> Plan:
        """Measured on these texts; with several draws, on the mean of as many gradients' second moments."""
        batches = encode(
            Rows({"text": list(texts)}), self.tokenizer, "embedding", model_config=self.model.config,
            batch_size=self.batch_size, labels="ignore", pooling=pooling_of(self.model),
        )  # fmt: skip
        plan = measure(self.model, batches, samples=len(texts), seed=seed)
        if draws == 1:
            return plan
        several = [curvatures(plan.structure, plan.sample, seed=seed + draw) for draw in range(draws)]
        for parts in zip(*several, strict=True):
            parts[0].G = torch.stack([part.G for part in parts]).mean(0)
        return replace(plan, evidence=order(several[0]))

    def score(self, model: Any) -> Row:
        row: Row = {}
        for name, exam in self.exams.items():
            result = exam.take(model)
            row[name] = round(result.value, 2)
            if "mrr@10" in result.extra:
                row[f"{name}, mrr@10"] = round(result.extra["mrr@10"], 2)
        return row


def sweep(bench: Bench, keep: Any, budgets: Sequence[float] = BUDGETS) -> None:
    """All budgets from one measurement."""
    keep({"study": "budget", "model": bench.name, "flops": 1.0, **bench.score(bench.model)})
    plan = bench.plan(bench.texts(SAMPLES))
    for flops in budgets:
        pruned = plan.prune(flops=flops)
        seconds = round(sum(pruned.report.seconds.values()), 1)
        scores = bench.score(pruned.model)
        keep({"study": "budget", "model": bench.name, "flops": flops, "texts": SAMPLES, "seconds": seconds, **scores})


def study(bench: Bench, keep: Any, budgets: Sequence[float] = BUDGETS, flops: float = 0.5) -> None:
    """At one budget: the loss, the number of draws, the number of texts, and texts of another kind."""
    own = pooling_of(bench.model)
    common = {"model": bench.name, "flops": flops}
    texts = bench.texts(SAMPLES)
    set_pooling(bench.model, replace(own, normalize=False, similarity="dot"))
    plan = bench.plan(texts)
    set_pooling(bench.model, own)
    pruned = plan.prune(flops=flops)
    keep(common | {"study": "loss", "loss": "as it is", "texts": SAMPLES, **bench.score(pruned.model)})
    for seed in (0, 1):
        for draws in DRAWS:
            pruned = bench.plan(bench.texts(SAMPLES, seed=seed), draws=draws, seed=10 * seed).prune(flops=flops)
            keep(common | {"study": "draws", "draws": draws, "seed": seed, **bench.score(pruned.model)})
    for size in SIZES:
        pruned = bench.plan(bench.texts(size)).prune(flops=flops)
        keep(common | {"study": "texts", "texts": size, **bench.score(pruned.model)})
    for domain in ("paragraphs", "questions", "sentences", "wikitext"):
        chosen = bench.texts(SAMPLES, domain)
        pruned = bench.plan(chosen).prune(flops=flops)
        keep(common | {"study": "domain", "domain": domain, "texts": len(chosen), **bench.score(pruned.model)})


def latency(bench: Bench, keep: Any, budgets: Sequence[float] = BUDGETS, rounds: int = 101) -> None:
    """One query on this CPU, dense and pruned in turns."""
    plan = bench.plan(bench.texts(256))
    query = bench.tokenizer(bench.rows("xquad.dev").column("question")[0], return_tensors="pt")
    for flops in budgets:
        small = plan.prune(flops=flops).model
        with frozen(bench.model), frozen(small), torch.inference_mode():
            runs = [partial(model, **query) for model in (bench.model, small)]
            dense, pruned = in_turns(runs, torch.device("cpu"), rounds=rounds)
        keep({
            "study": "latency", "model": bench.name, "flops": flops, "ratio": round(dense.median / pruned.median, 3),
            "dense_ms": round(1e3 * dense.median, 3), "pruned_ms": round(1e3 * pruned.median, 3),
            "tokens": query["input_ids"].shape[-1], "threads": torch.get_num_threads(),
            "device": device_name(torch.device("cpu")),
        })  # fmt: skip


def plot(rows: Sequence[Row], name: str) -> str:
    """R@1 on XQuAD against the budget, in both modes."""
    points = [row for row in rows if row["study"] == "budget" and row["model"] == name]
    dense = next(row["xquad"] for row in points if row["flops"] == 1.0)
    series = [
        Series(label, [Point(row["flops"], row[key], note=f"{label} at {row['flops']:.0%}: {row[key]:.2f}")
                       for row in sorted(points, key=lambda row: row["flops"]) if row["flops"] < 1])
        for label, key in (("pruned queries, dense index", "xquad, dense index"), ("pruned on both sides", "xquad"))
    ]  # fmt: skip
    return chart(
        series, levels=[Level(dense, f"dense {dense:.2f}", strong=True), Level(dense - 1, "1 point below")],
        title=f"{name}: search", x_label="FLOPs, of dense", y_label="R@1", x_format="{:.0%}".format,
    )  # fmt: skip


def main() -> None:
    """Run what was asked for, adding rows to the results as they come."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row] = json.loads(options.out.read_text()) if options.out.is_file() else []
    keys = ("study", "model", "flops", "texts", "draws", "domain", "seed", "loss", "device")

    def keep(row: Row) -> None:
        rows[:] = [old for old in rows if any(old.get(k) != row.get(k) for k in keys)] + [row]
        options.out.write_text("[\n" + ",\n".join(f" {json.dumps(r)}" for r in rows) + "\n]\n")
        print(json.dumps(row), flush=True)

    for word in options.model:
        name, _, folder = word.partition("=")
        bench = Bench(name, folder, options.data, "cpu" if options.latency else options.device, options.batch_size)
        budgets = [float(word) for word in options.flops.split(",")]
        (latency if options.latency else study if options.study else sweep)(bench, keep, budgets)
        if not (options.latency or options.study):
            options.out.with_name(f"embedding-{name}.svg").write_text(plot(rows, name))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune embedding models and score them as their users would.")
    parser.add_argument("--model", action="append", required=True, help="NAME=DIRECTORY; may be given several times")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--flops", default=",".join(map(str, BUDGETS)), help="budgets, comma-separated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--study", action="store_true", help="what the loss, draws, texts and domains change, at 50%%")
    what.add_argument("--latency", action="store_true", help="time one query on this CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
