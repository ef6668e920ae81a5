"""Two public models that were never fine-tuned for one task, before and after pruning.

    python experiments/real_models.py embedding --model all-mpnet-base-v2 --data stsb.train.jsonl.xz \\
        --eval stsb.dev.jsonl.xz
    python experiments/real_models.py lm --model SmolLM2-135M-Instruct.Q4_1.gguf --data squad_v2.train.jsonl.xz \\
        --eval squad_v2.dev.jsonl.xz --text-column context --flops 0.9,0.8,0.7

An embedding model (a directory of sentence-transformers will do) is scored by the Spearman correlation of its cosine
similarities with human scores, a language model by its perplexity on text it was not calibrated on. One measurement
serves all budgets. Rows are added to `results/real_models.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import Rows, encode, find_task, read_rows
from shearling.evaluation.exam import make_exam
from shearling.pipeline import measure

RESULTS = Path(__file__).parent / "results" / "real_models.json"


def main() -> None:
    """Measure once, prune to every budget, score each."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, device="auto", dtype="float32")
    tokenizer = load_tokenizer(options.model)
    began = time.perf_counter()
    task = find_task(options.task)
    sample = encode(
        texts(options.data, options.text_column),
        tokenizer,
        task,
        model_config=model.config,
        max_length=options.max_length,
        batch_size=options.batch_size,
        samples=options.samples,
        labels="ignore",
    )
    exam = make_exam(
        model,
        tokenizer,
        texts(options.eval, options.text_column),
        task,
        batch_size=options.batch_size,
        max_length=options.max_length,
        limit=options.limit,
    )
    dense = exam.take(model)
    base = {
        "model": Path(options.model).name,
        "task": options.task,
        "metric": dense.metric,
        "samples": sum(len(batch["input_ids"]) for batch in sample),
        "max_length": options.max_length,
        "eval_examples": dense.examples,
        "method": options.method,
    }
    keep(base | {"flops": 1.0, "value": round(dense.value, 3)})
    plan = measure(model, sample, method=options.method, samples=options.samples, watcher=watch)
    for ratio in options.flops.split(","):
        pruned = plan.prune(flops=float(ratio))
        score = exam.take(pruned.model)
        keep(
            base
            | {
                "flops": float(ratio),
                "value": round(score.value, 3),
                "params_model": pruned.report.params_model.ratio,
                "seconds": {k: round(v, 1) for k, v in pruned.report.seconds.items()},
                "wall": round(time.perf_counter() - began, 1),
            }
        )


def texts(path: str, column: str | None) -> Rows:
    """The rows of a file; of one column, each text once."""
    rows = read_rows(path)
    return rows if column is None else Rows({"text": list(dict.fromkeys(rows.column(column)))}, source=path)


def keep(row: dict[str, Any]) -> None:
    """Add one result, in place of an earlier one of the same settings."""
    same = ("model", "task", "method", "flops", "samples", "max_length", "eval_examples")
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = [old for old in rows if any(old.get(name) != row.get(name) for name in same)] + [row]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(r)}" for r in rows) + "\n]\n")
    print(json.dumps(row), flush=True)


def watch(stage: str, done: int, total: int) -> None:
    """One line a stage."""
    if done == total:
        print(f"  {stage}: {total}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune an embedding model or a language model, and score it.")
    parser.add_argument("task", choices=("embedding", "lm"))
    parser.add_argument("--model", required=True, help="a model directory, or a .gguf file")
    parser.add_argument("--data", required=True, help="text to calibrate on")
    parser.add_argument("--eval", required=True, help="pairs with scores, or text to take the perplexity of")
    parser.add_argument("--text-column", help="the column with running text")
    parser.add_argument("--flops", default="0.7,0.5,0.3")
    parser.add_argument("--method", default="surgeon")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--limit", type=int, default=400, help="rows to score on")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
