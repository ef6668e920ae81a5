"""The result of an export: the file, its difference from PyTorch, and a comparison with the dense model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shearling.exporters.check import Difference
from shearling.latency.timing import Times

STEPS = ("dense", "model", "exported")


@dataclass(frozen=True)
class Measured:
    """Size of a file, and its latency for one batch."""

    model: str
    bytes: int
    latency: Times

    def to_json(self) -> dict[str, Any]:
        """Plain data with times in milliseconds."""
        times = {"milliseconds": 1e3 * self.latency.median, "spread": 1e3 * self.latency.spread}
        return {"model": self.model, "bytes": self.bytes, "latency": times}


@dataclass(frozen=True)
class Exported:
    """The written file, its difference from PyTorch, and a comparison with the dense model."""

    out: Path
    format: str
    precision: str
    inputs: dict[str, list[str | int]]
    outputs: list[str]
    difference: Difference
    batch: list[int]
    runtime: str
    this: Measured
    dense: Measured | None
    scores: dict[str, Any] | None = None  # of dense, pruned and exported model, with --eval
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling export --json`."""
        return {
            "out": str(self.out),
            "format": self.format,
            "precision": "int8" if self.precision.startswith("int8") else self.precision,
            "quantisation": self.precision.partition("-")[2] or None,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "max_difference": self.difference.largest,
            "check": asdict(self.difference),
            "runtime": self.runtime,
            "batch": self.batch,
            "exported": self.this.to_json(),
            "dense": None if self.dense is None else self.dense.to_json(),
            "evaluation": self.scores,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        """The report of the command line."""
        check = self.difference
        agreed = "" if check.agreement is None else f", {check.agreement:.1%} of the predictions equal"
        takes = ", ".join(f"{name} [{', '.join(map(str, axes))}]" for name, axes in self.inputs.items())
        lines = [
            f"{self.out}: {self.format}, {self.precision}",
            f"  takes {takes}; gives {', '.join(self.outputs)}",
            f"  largest difference from PyTorch {check.largest:.3g} ({check.relative:.2g} of the largest output) "
            f"on {check.batches} batches{agreed}",
            "",
            f"  under {self.runtime} on this CPU, batch of {' x '.join(map(str, self.batch))}:",
        ]
        if self.dense is not None:
            lines.append(_row("dense", self.dense))
        lines.append(_row("exported", self.this))
        if self.dense is not None:
            faster = self.dense.latency.median / self.this.latency.median
            lines.append(f"  {'':<10}{self.this.bytes / self.dense.bytes:>8.0%} of size  {faster:>8.2f}x faster")
        if self.scores is not None:
            steps = ", ".join(f"{k} {self.scores[k]:.2f}" for k in STEPS if self.scores.get(k) is not None)
            lines += ["", f"  {self.scores['metric']} on {self.scores['examples']:,} examples: {steps}"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def entry(self, folder: Path) -> dict[str, Any]:
        """The entry in a checkpoint's record."""
        inside = self.out.resolve().is_relative_to(folder.resolve())
        return {
            "out": str(self.out.resolve().relative_to(folder.resolve())) if inside else self.out.name,
            "format": self.format,
            "precision": self.precision,
            "runtime": self.runtime,
            "bytes": self.this.bytes,
            "agreement": self.difference.agreement,
        }


def _row(label: str, found: Measured) -> str:
    took = f"{1e3 * found.latency.median:>10.2f} ms  +- {1e3 * found.latency.spread:.2f}"
    return f"  {label:<10}{found.bytes / 1e6:>8.1f} MB {took}   {found.model}"
