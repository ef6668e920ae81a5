"""The result of `shearling demo`: its measurements, and the report made from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shearling.latency.timing import device_name
from shearling.pipeline import Pruned
from shearling.report.facts import busy
from shearling.report.record import Cost

NAME = "all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Search:
    """R@1 of finding each query's passage: dense, pruned on the dense index, and pruned on its own index."""

    metric: str
    dense: float
    pruned: float
    pruned_both_sides: float
    passages: int


@dataclass(frozen=True)
class Closeness:
    """Comparison of two embeddings of the same queries.

    neighbours_kept  share of the 10 passages found before that are still among the first 10
    nearest_same     share of queries with the same first passage
    """

    cosine_mean: float
    cosine_worst: float
    neighbours_kept: float
    nearest_same: float


@dataclass(frozen=True)
class Pace:
    """Times of both models on one batch.

    ratio   dense / pruned: above 1 is faster
    spread  the larger half interquartile range over the median
    """

    dense_ms: float
    pruned_ms: float
    ratio: float
    spread: float
    batch_size: int
    tokens: int
    threads: int


@dataclass(frozen=True)
class Example:
    """A query with the first passage found by each model, and the right one."""

    sentence: str
    dense: str
    pruned: str
    right: str

    @property
    def answers(self) -> list[tuple[str, str]]:
        """(who, passage with right or wrong)."""
        same = self.dense == self.pruned
        found = {"both": self.dense} if same else {"dense": self.dense, "pruned": self.pruned}
        return [(who, f"{what} ({'right' if what == self.right else 'wrong'})") for who, what in found.items()]


@dataclass(frozen=True)
class Demo:
    """The pruned model and the demo's measurements.

    out     directory of the pruned model
    report  the report as Markdown
    page    the report as HTML
    """

    pruned: Pruned
    held_out: int
    search: Search
    closeness: Closeness
    file_bytes: Cost
    cpu_latency: Pace
    examples: list[Example]
    demo_seconds: float
    out: Path
    report: Path
    page: Path

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling demo --json`: the record of the run, and the measurements."""
        return self.pruned.report.to_json() | {
            "model": NAME,
            "held_out": self.held_out,
            "search": asdict(self.search),
            "closeness": asdict(self.closeness),
            "file_bytes": self.file_bytes.to_json(),
            "cpu_latency": asdict(self.cpu_latency),
            "examples": list(map(asdict, self.examples)),
            "demo_seconds": self.demo_seconds,
            "out": str(self.out),
            "report": str(self.report),
            "page": str(self.page),
        }


def page_record(result: Demo) -> dict[str, Any]:
    """The record for the report page, with the search as its score and changed results as flipped examples."""
    pace, found = result.cpu_latency, result.search
    return result.pruned.report.to_json() | {
        "base": NAME,
        "evaluation": {
            "task": "search on the dense index", "examples": result.held_out, "metric": found.metric,
            "dense": found.dense, "pruned": found.pruned,
        },
        "timing": {
            "device": device_name(torch.device("cpu")), "measured": pace.pruned_ms / pace.dense_ms,
            "seq_len": pace.tokens, "dense_ms": pace.dense_ms, "pruned_ms": pace.pruned_ms,
            "spread": pace.spread, "batch_size": pace.batch_size, "threads": pace.threads,
        },
        "flipped": {
            "changed": round((1 - result.closeness.nearest_same) * result.held_out), "examples": result.held_out,
            "lost": None, "won": None,
            "shown": [asdict(one) | {"text": one.sentence} for one in result.examples if one.dense != one.pruned],
        },
    }  # fmt: skip


def write_up(result: Demo) -> str:
    """The report as Markdown."""
    table = "\n".join(f"| {name} | {value} |" for name, value in summary(result))
    examples = "\n".join(
        f"\n> {example.sentence}\n\n" + "\n".join(f"* {who}: {what}" for who, what in example.answers)
        for example in result.examples
    )
    return (
        f"# {NAME}, pruned\n\n{result.pruned.report.examples:,} sentences of Python's documentation calibrated it. "
        f"Then it searched for the rest of {result.held_out:,} other paragraphs by their first sentence, on "
        f"the index that the dense model made.\n\n| | |\n|---|---|\n{table}\n\n"
        f"## What stayed\n\n```text\n{result.pruned}\n```\n\n"
        f"## Three searches\n{examples}\n\n"
        f"## Use it\n\n```python\nimport shearling\n\nmodel = shearling.load({str(result.out)!r})\n```\n"
    )


def summary(result: Demo) -> list[tuple[str, str]]:
    """The main results as (name, value)."""
    record, near, pace, found = result.pruned.report, result.closeness, result.cpu_latency, result.search
    size = result.file_bytes
    speed = "; ".join(filter(None, [f"{pace.ratio:.2f}x the speed", busy(pace.spread)]))
    return [
        ("FLOPs of the layers", f"{record.flops.ratio:.1%} of the original's"),
        (f"R@1, {result.held_out:,} queries", f"{found.dense:.1f} -> {found.pruned:.1f} on the dense model's index"),
        ("R@1, new index", f"{found.pruned_both_sides:.1f} (pruned on both sides)"),
        (
            f"CPU latency, {pace.batch_size} x {pace.tokens} tokens",
            f"{pace.dense_ms:.1f} -> {pace.pruned_ms:.1f} ms: {speed}",
        ),
        ("parameters of the layers", f"{record.params.ratio:.1%}"),
        (
            "weights on disk",
            f"{size.dense / 1e6:.1f} -> {size.pruned / 1e6:.1f} MB (the word embeddings are never pruned)",
        ),
        ("cosine to the original", f"{near.cosine_mean:.4f} on average, {near.cosine_worst:.4f} at worst"),
        ("first passage found", f"the same for {near.nearest_same:.1%} of the queries"),
        ("pruning took", f"{sum(record.seconds.values()):.1f} s"),
    ]
