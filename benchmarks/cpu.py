"""Pruning on a CPU, with default settings, beside one plain forward and backward pass over the same examples.

    python benchmarks/cpu.py --model minilm-l6-sst2 --task sst2 --data sst2.train.jsonl.xz

There the number of examples is the time, and `samples="auto"` uses fewer where the budget allows it. The plain pass is
what training would do: batches of 32 as they come, padded to their longest. Turns are interleaved; ratios count, not
seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, keep_json

import shearling
from shearling import Surgeon
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import encode, read_rows

EXAMPLES = 2048
Row = dict[str, Any]


def plain(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    for batch in batches:
        model(**batch).logits.logsumexp(-1).sum().backward()
        model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def pruned(model: Any, batches: list[dict[str, torch.Tensor]], flops: float, precision: str) -> Row:
    """Seconds of one call, and how many examples it used."""
    start = time.perf_counter()
    report = shearling.prune(model, batches, flops=flops, method=Surgeon(precision=precision), progress=False).report
    return {
        "flops": flops,
        "precision": report.settings["precision"],
        "seconds": time.perf_counter() - start,
        "examples": report.examples,
        "passes": report.polish["passes"] if report.polish else 0,
        "stages": report.seconds,
    }


def run(options: argparse.Namespace) -> list[Row]:
    """Every budget in turns with the plain pass; medians over the turns."""
    model, tokenizer = load_model(options.model, device="cpu", dtype="float32"), load_tokenizer(options.model)
    batches = [
        dict(batch)
        for batch in encode(
            read_rows(options.data), tokenizer, options.task, model_config=model.config, batch_size=32,
            samples=EXAMPLES, labels="ignore", bucket=False,
        )
    ]  # fmt: skip
    plain(model, batches[:4])
    points = [(float(flops), how) for flops in options.budgets.split(",") for how in options.precision.split(",")]
    turns = [
        (plain(model, batches), [pruned(model, batches, *point) for point in points]) for _ in range(options.turns)
    ]
    rows = []
    for number, row in enumerate(turns[-1][1]):
        ratios = [found[number]["seconds"] / passed for passed, found in turns]
        rows.append(row | {"ratio": statistics.median(ratios), "plain": turns[-1][0]})
    return rows


def main() -> None:
    """Print a table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--budgets", default="0.5,0.3,0.1")
    parser.add_argument("--precision", default="bfloat16", help="of the passes; bfloat16,float32 shows both")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    rows = run(options)
    print("| FLOPs | precision | examples | passes of polish | of a plain pass |\n|---|---|---|---|---|")
    for row in rows:
        cells = f"{row['flops']:.0%} | {row['precision']} | {row['examples']:,} | {row['passes']} | {row['ratio']:.2f}"
        print(f"| {cells} |")
    keep_json({"task": options.task, "machine": describe_machine(torch.device("cpu")), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
