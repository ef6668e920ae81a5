"""An export in words."""

from __future__ import annotations

from shearling.export.job import Exported, Measured

RUNTIMES = {"onnx": "ONNX Runtime", "exported": "PyTorch"}


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
