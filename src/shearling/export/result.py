"""What an export gives: the file, how far it is from PyTorch, and dense and exported side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shearling.export.check import Difference
from shearling.latency.timing import Times

RUNTIMES = {"onnx": "ONNX Runtime", "exported": "PyTorch"}


@dataclass(frozen=True)
class Measured:
    """A file's size and its time for one batch."""

    model: str
    bytes: int
    latency: Times

    def to_json(self) -> dict[str, Any]:
        """Plain data, times in milliseconds."""
        times = {"milliseconds": 1e3 * self.latency.median, "spread": 1e3 * self.latency.spread}
        return {"model": self.model, "bytes": self.bytes, "latency": times}


@dataclass(frozen=True)
class Exported:
    """What was written, how far it is from PyTorch, and how it compares with the dense model."""

    out: Path
    format: str
    precision: str
    inputs: dict[str, list[str | int]]
    outputs: list[str]
    difference: Difference
    batch: list[int]
    this: Measured
    dense: Measured | None

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling export --json`."""
        return {
            "out": str(self.out),
            "format": self.format,
            "precision": self.precision,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "max_difference": self.difference.largest,
            "check": self.difference.to_json(),
            "batch": self.batch,
            "exported": self.this.to_json(),
            "dense": None if self.dense is None else self.dense.to_json(),
        }


def describe(result: Exported) -> str:
    """Where it is, how far from PyTorch, and dense and exported side by side."""
    check = result.difference
    agreed = "" if check.agreement is None else f", {check.agreement:.1%} of the predictions equal"
    takes = ", ".join(f"{name} [{', '.join(map(str, axes))}]" for name, axes in result.inputs.items())
    lines = [
        f"{result.out}: {result.format}, {result.precision}",
        f"  takes {takes}; gives {', '.join(result.outputs)}",
        f"  largest difference from PyTorch {check.largest:.3g} ({check.relative:.2g} of the largest output) "
        f"on {check.batches} batches{agreed}",
        "",
        f"  under {RUNTIMES[result.format]} on this CPU, batch of {' x '.join(map(str, result.batch))}:",
    ]
    if result.dense is not None:
        lines.append(_row("dense", result.dense))
    lines.append(_row("exported", result.this))
    if result.dense is not None:
        faster = result.dense.latency.median / result.this.latency.median
        lines.append(f"  {'':<10}{result.this.bytes / result.dense.bytes:>8.0%} of size  {faster:>8.2f}x faster")
    return "\n".join(lines)


def _row(label: str, found: Measured) -> str:
    took = f"{1e3 * found.latency.median:>10.2f} ms  +- {1e3 * found.latency.spread:.2f}"
    return f"  {label:<10}{found.bytes / 1e6:>8.1f} MB {took}   {found.model}"
