"""How long pruning takes: stage by stage, against one plain forward and backward, and against the floor.

    python benchmarks/speed.py                                    # BERT-base, 2,048 examples of GLUE length
    python benchmarks/speed.py --shapes minilm --examples 512     # something a laptop can do
    python benchmarks/speed.py --length 384                       # SQuAD-like

Weights are random: no stage's work depends on their values. The yardstick runs the same batches, forward and backward
with gradients for every weight, as training would. The floor is the time that the matrix products which the stages
cannot do without would take at the rate of a large product measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, keep_json, random_batches, random_model

import shearling
from shearling.engine.hooks import device_of
from shearling.engine.memory import bounded
from shearling.models.structure import Structure, structure_of
from shearling.sample.sample import Sample, sample_of


def plain_seconds(model: Any, sample: Sample) -> float:
    """One forward and backward over the sample, gradients for all weights."""
    device = device_of(model)
    model.train(False).requires_grad_(True)
    _wait(device)
    start = time.perf_counter()
    for batch in sample:
        here = batch.to(device)
        model(**here.inputs, **here.labels).loss.backward()
        model.zero_grad(set_to_none=True)
    _wait(device)
    return time.perf_counter() - start


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations per second of a large float32 product, TF32 where there is TF32."""
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


def floor_flops(structure: Structure, tokens: int, ratio: float, examples: int) -> dict[str, float]:
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    model = random_model(options.shapes).to(device)
    batches = random_batches(options.examples, options.length, options.batch_size)
    sample = bounded(sample_of(batches), device)
    tokens = sum(int(b["attention_mask"].sum()) for b in batches)
    structure = structure_of(model)
    plain_seconds(model, sample.first(8))
    plain = plain_seconds(model, sample)
    rate = matrix_rate(device)
    floors = floor_flops(structure, tokens, options.flops, options.examples)
    results = {}
    for method in options.methods.split(","):
        if not options.cold:
            shearling.prune(model, batches[:2], flops=options.flops, method=method)
        _wait(device)
        start = time.perf_counter()
        pruned = shearling.prune(model, batches, flops=options.flops, method=method)
        _wait(device)
        seconds = time.perf_counter() - start
        results[method] = {
            "seconds": seconds,
            "stages": pruned.report.seconds,
            "over_plain": seconds / plain,
            "floor_seconds": floors[method] / rate,
            "floor_share": floors[method] / rate / seconds,
        }
    return {
        "shapes": options.shapes,
        "examples": options.examples,
        "tokens": tokens,
        "flops": options.flops,
        "plain_forward_backward_seconds": plain,
        "matrix_rate_tflops": rate / 1e12,
        "machine": describe_machine(device),
        "methods": results,
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['shapes']}, {result['examples']} examples, {result['tokens']:,} tokens, {result['flops']:.0%} FLOPs, "
        f"{result['machine']['device']}: plain forward+backward {result['plain_forward_backward_seconds']:.2f} s, "
        f"matrix rate {result['matrix_rate_tflops']:.2f} TFLOP/s"
    )
    for method, r in result["methods"].items():
        share = f"{r['over_plain']:5.2f}x plain  {r['floor_share']:.0%} is the floor"
        stages = "  ".join(f"{name} {seconds:.2f}" for name, seconds in r["stages"].items())
        print(f"  {method:<8} {r['seconds']:7.2f} s  {share}  ({stages})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert-base", choices=("bert-base", "minilm"))
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--length", type=int, help="tokens of every example; GLUE-like lengths unless given")
    parser.add_argument("--batch-size", type=int, help="examples; 1,024 on a GPU, 32 on a CPU")
    parser.add_argument("--flops", type=float, default=0.6)
    parser.add_argument("--methods", default="paper,surgeon")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cold", action="store_true", help="no warm-up run before the timed one")
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    options.batch_size = options.batch_size or (1024 if options.device.startswith("cuda") else 32)
    result = run(options)
    show(result)
    keep_json(result, options.out)


if __name__ == "__main__":
    main()
