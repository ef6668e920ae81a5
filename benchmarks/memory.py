"""How much memory pruning takes, and that it stays within the promise.

    python benchmarks/memory.py                      # 2,048 x 384 tokens on a GPU (at most 12 GiB),
                                                     # 256 x 384 on a CPU (at most 4 GiB), BERT-base

Each method runs in a process of its own, so that a peak is that method's. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, high_water, keep_json, random_batches, random_model

PROMISE = {"cuda": 12.0, "cpu": 4.0}  # GiB
EXAMPLES = {"cuda": 2048, "cpu": 256}


def peak(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prune once and read the high-water mark. On a CPU, what Python and torch take before the run does not count."""
    import shearling

    device = torch.device(options.device)
    model = random_model(options.shapes).to(device)
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    batches = random_batches(options.examples, options.length, options.batch_size)
    before = _resident() - dense
    pruned = shearling.prune(model, batches, flops=0.6, method=method)
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else high_water() - before
    return {"method": method, "gib": most / 2**30, "dense_gib": dense / 2**30, "seconds": pruned.report.seconds}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert-base", choices=("bert-base", "minilm"))
    parser.add_argument("--device", default=here)
    parser.add_argument("--examples", type=int)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--one", choices=("paper", "surgeon"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    kind = torch.device(options.device).type
    options.examples = options.examples or EXAMPLES[kind]
    if options.one:
        print(json.dumps(peak(options.one, options)))
        return
    runs = []
    for method in ("paper", "surgeon"):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{method:<8} {runs[-1]['gib']:.2f} GiB at most (promised: {PROMISE[kind]:g})", flush=True)
    result = {
        "shapes": options.shapes, "examples": options.examples, "length": options.length,
        "promise_gib": PROMISE[kind], "machine": describe_machine(torch.device(options.device)), "runs": runs,
    }  # fmt: skip
    keep_json(result, options.out)
    if any(run["gib"] > PROMISE[kind] for run in runs):
        sys.exit(f"over the promised {PROMISE[kind]:g} GiB")


if __name__ == "__main__":
    main()
