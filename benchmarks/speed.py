"""How long pruning takes as users call it: any batch size, first call of a process and later calls, both methods.

    python benchmarks/speed.py                                    # BERT-base, 2,048 examples of GLUE length
    python benchmarks/speed.py --length 384                       # SQuAD-like
    python benchmarks/speed.py --shapes minilm --batch-sizes 32   # something a laptop can do
    python benchmarks/speed.py --command-line                     # also `shearling prune`, beside the bare imports
    python benchmarks/speed.py --methods surgeon --flops 0.1 --polish 40 --batch-sizes 32    # with 40 passes of polish

Every row is a process of its own, after one that does not count and reads the libraries from the disk. The batches
come from a DataLoader of that batch size, the first call is the first thing the process does once the model is on its
device, and two more calls follow; then a plan is measured, a budget is pruned from it, and one more. Weights are
random: no stage's work depends on their values. The yardstick is one plain forward and backward over the same examples,
as training would run them. "floor" is what the matrix products that the method cannot do without would take at the rate
of a large product measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CALLS = 3


def one(options: argparse.Namespace) -> dict[str, Any]:
    """One row: this process's first call, the later ones, and one more budget from a plan."""
    import torch
    from machine import describe_machine, loader_of, random_model

    import shearling

    device = torch.device(options.device)
    model = random_model(options.shapes).to(device)
    loader = loader_of(options.examples, options.length, options.batch_size)
    _wait(device)
    method: Any = options.method
    if options.polish is not None:
        method = {"paper": shearling.Paper, "surgeon": shearling.Surgeon}[method](polish=options.polish)
    calls, stages = [], []
    for _ in range(CALLS):
        start = time.perf_counter()
        pruned = shearling.prune(model, loader, flops=options.flops, method=method, samples=options.samples)
        _wait(device)
        calls.append(time.perf_counter() - start)
        stages.append(pruned.report.seconds)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    plan = shearling.measure(model, loader, method=method, samples=options.samples)
    plan.prune(flops=options.flops)
    _wait(device)
    start = time.perf_counter()
    plan.prune(flops=0.9 * options.flops)
    _wait(device)
    budget = time.perf_counter() - start
    result = {
        "method": options.method,
        "batch_size": options.batch_size,
        "examples": pruned.report.examples,
        "first": calls[0],
        "later": min(calls[1:]),
        "one_more_budget": budget,
        "peak_gib": None if peak is None else peak / 2**30,
        "stages_first": stages[0],
        "stages_later": stages[-1],
        "machine": describe_machine(device),
    }
    return result | (_yardsticks(model, options) if options.yardstick else {})


def _yardsticks(model: Any, options: argparse.Namespace) -> dict[str, float]:
    """One plain forward and backward over the examples, and the time that the products alone would take."""
    from machine import loader_of

    from shearling.engine.memory import cut_batches
    from shearling.models.structure import structure_of
    from shearling.sample.read import sample_of

    device = next(model.parameters()).device
    sample = sample_of(loader_of(options.examples, options.length, 256))
    batches = cut_batches(sample, device, backward=True)
    model.train(False).requires_grad_(True)
    _plain(model, batches[-1:], device)
    plain = _plain(model, batches, device)
    tokens = options.examples * (sample.mean_length or 0.0)
    floors = floor_flops(structure_of(model), tokens, options.flops, options.examples)
    return {"plain": plain, "tokens": tokens, "floor": floors[options.method] / matrix_rate(device)}


def _plain(model: Any, batches: Any, device: Any) -> float:
    _wait(device)
    start = time.perf_counter()
    for batch in batches:
        model(**batch.inputs, **batch.labels).loss.backward()
        model.zero_grad(set_to_none=True)
    _wait(device)
    return time.perf_counter() - start


def matrix_rate(device: Any) -> float:
    """Floating-point operations per second of a large float32 product, TF32 where there is TF32."""
    import torch

    torch.set_float32_matmul_precision("high")
    n = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    a @ b
    _wait(device)
    start = time.perf_counter()
    for _ in range(5):
        a @ b
    _wait(device)
    torch.set_float32_matmul_precision("highest")
    return 5 * 2 * n**3 / (time.perf_counter() - start)


def floor_flops(structure: Any, tokens: float, ratio: float, examples: int) -> dict[str, float]:
    """What each method must multiply at least: passes over the layers, Gram matrices, Fisher blocks."""
    forward = 2.0 * tokens * sum(s.units * s.weights_per_unit for s in structure.sublayers)
    grams = 2.0 * tokens * sum((s.units * s.width) ** 2 for s in structure.sublayers)
    outputs = 2.0 * tokens * sum(s.weight.shape[0] ** 2 for s in structure.sublayers)
    fisher = 2.0 * examples * sum(s.units**2 for s in structure.sublayers)
    student = ratio * forward + ratio**2 * grams  # its passes, and its Gram matrices
    return {
        "paper": 2 * forward + fisher + forward + student,  # gradients; blocks; teacher and student in tuning
        "surgeon": 2 * forward + grams + outputs + forward + student + outputs,  # the last for realignment
    }


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def command_line(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of `shearling prune` on a directory and a file, and of importing and loading alone."""
    from machine import model_folder

    with tempfile.TemporaryDirectory() as place:
        folder, data = model_folder(Path(place), "minilm", rows=2048)
        bare = (
            "import torch; from transformers import AutoModelForSequenceClassification as A, AutoTokenizer;"
            f"m = A.from_pretrained({str(folder)!r}); AutoTokenizer.from_pretrained({str(folder)!r});"
            f"m.to({options.device!r}); torch.cuda.is_available() and torch.cuda.synchronize()"
        )
        prune = ["-m", "shearling", "prune", str(folder), "--data", str(data), "--flops", "0.5", "--quiet"]
        commands = {
            "bare": ["-c", bare],
            "prune": [*prune, "--device", options.device, "--out", str(Path(place) / "out")],
        }
        found = {}
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True)
            found[name] = time.perf_counter() - start
        return found | {"more": found["prune"] - found["bare"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method and batch size."""
    lines = ["| method | batch size | first call | later calls | one more budget | peak |", "|---|---|---|---|---|---|"]
    for row in rows:
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        times = " | ".join(f"{row[name]:.2f} s" for name in ("first", "later", "one_more_budget"))
        lines.append(f"| `{row['method']}` | {row['batch_size']:,} | {times} | {peak} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every row in a process of its own; what is measured is kept at once."""
    from machine import keep_json

    settings = {name: getattr(options, name) for name in ("shapes", "examples", "length", "flops", "samples", "polish")}
    result: dict[str, Any] = {"settings": settings, "rows": []}
    subprocess.run([sys.executable, "-c", "import shearling.workflows.prune, transformers.models.bert"], check=True)
    if options.command_line:
        result["command_line"] = command_line(options)
    for method in options.methods.split(","):
        for number, size in enumerate(map(int, options.batch_sizes.split(","))):
            command = [
                sys.executable, __file__, "--one", "--method", method, "--batch-size", str(size), "--shapes",
                options.shapes, "--examples", str(options.examples), "--flops", str(options.flops), "--device",
                options.device, "--samples", str(options.samples),
            ]  # fmt: skip
            command += ["--length", str(options.length)] if options.length else []
            command += ["--polish", str(options.polish)] if options.polish else []
            command += ["--yardstick"] if number == 0 else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
            row = json.loads(done.stdout.splitlines()[-1])
            result["machine"] = row.get("machine")
            result["rows"].append(row)
            print(table([row]).splitlines()[-1], flush=True)
            keep_json(result, options.out)
    return result


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert-base", choices=("bert-base", "minilm"))
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--length", type=int, help="tokens of every example; GLUE-like lengths by default")
    parser.add_argument("--batch-sizes", default="1,8,32,256,1024", help="of the DataLoader")
    parser.add_argument("--flops", type=float, default=0.6)
    parser.add_argument("--samples", default="auto")
    parser.add_argument("--polish", type=int, help="so many passes, instead of what the method decides")
    parser.add_argument("--methods", default="paper,surgeon")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--command-line", action="store_true", help="also time `shearling prune`")
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    for name, kind in (("--method", str), ("--batch-size", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    for name in ("--one", "--yardstick"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.samples = int(options.samples) if options.samples != "auto" else "auto"
    if options.one:
        print(json.dumps(one(options)))
        return
    result = run(options)
    print(
        f"\n{result['machine']['device']}, {options.shapes}, {options.examples:,} examples\n\n{table(result['rows'])}"
    )
    for row in result["rows"]:
        if options.polish:
            stages = (row["stages_first"]["polish"], row["stages_later"]["polish"])
            print(f"{row['method']}: polish took {stages[0]:.2f} s of the first call, {stages[1]:.2f} s of a later one")
        if "plain" in row:
            floor = f"{row['floor'] / row['later']:.0%} of a later call is the floor"
            print(f"{row['method']}: {row['later'] / row['plain']:.2f} times a plain forward and backward; {floor}")
    if "command_line" in result:
        print("command line: " + ", ".join(f"{name} {value:.1f} s" for name, value in result["command_line"].items()))


if __name__ == "__main__":
    main()
