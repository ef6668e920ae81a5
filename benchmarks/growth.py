"""How the cost of pruning grows: twice the examples, the length, the layers or the width, against a base.

    python benchmarks/growth.py                     # a small base, so that a laptop can do it
    python benchmarks/growth.py --device cuda --width 768 --layers 6 --examples 1024 --length 128

Every case is timed several times, all cases taking turns, and reported as a ratio to the base of the same run: seconds
of each stage, and of the whole. Weights are random: no stage's work depends on their values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, keep_json, random_batches, random_model

import shearling

METHODS = ("surgeon", "paper")
STAGES = {"surgeon": ("measure", "order", "refit"), "paper": ("gradients", "rearrangement", "tuning")}
Case = dict[str, int]


def cases(base: Case) -> Iterator[tuple[str, Case]]:
    yield "base", base
    for name in base:
        yield f"{name} x 2", base | {name: 2 * base[name]}


def once(case: Case, method: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds per stage of one run."""
    width = case["width"]
    shapes = {"hidden_size": width, "num_attention_heads": width // 32, "intermediate_size": 4 * width}
    model = random_model("minilm", num_hidden_layers=case["layers"], **shapes).to(options.device)
    batches = random_batches(case["examples"], case["length"], options.batch_size)
    seconds = shearling.prune(model, batches, flops=options.flops, method=method).report.seconds
    return {**seconds, "in all": sum(seconds.values())}


def run(options: argparse.Namespace) -> dict[str, Any]:
    base = {name: getattr(options, name) for name in ("examples", "length", "layers", "width")}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for turn in range(options.turns + 1):
        for name, case in cases(base):
            for method in METHODS:
                seconds = once(case, method, options)
                if turn:  # the first one warms up
                    found.setdefault((method, name), []).append(seconds)
    rows = []
    for method in METHODS:
        wanted = (*STAGES[method], "in all")
        medians = {
            name: {stage: statistics.median(t[stage] for t in found[method, name]) for stage in wanted}
            for name, _ in cases(base)
        }
        for name, seconds in medians.items():
            ratios = {stage: seconds[stage] / medians["base"][stage] for stage in wanted}
            rows.append({"method": method, "case": name, "ratios": ratios})
    machine = describe_machine(torch.device(options.device))
    return {"base": base, "flops": options.flops, "turns": options.turns, "machine": machine, "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(f"base: {result['base']}, {result['flops']:.0%} FLOPs, {result['machine']['device']}")
    for row in result["rows"]:
        stages = "  ".join(f"{stage} {ratio:.2f}" for stage, ratio in row["ratios"].items())
        print(f"  {row['method']:<8} {row['case']:<13} {stages}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--flops", type=float, default=0.6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    result = run(options)
    show(result)
    keep_json(result, options.out)


if __name__ == "__main__":
    main()
