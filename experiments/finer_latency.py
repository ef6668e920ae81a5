"""Time of attention with units finer than heads against whole heads of the same FLOPs.

    python experiments/finer_latency.py --points experiments/results/finer.jsonl

Shapes of MiniLM-L6 (384 wide, heads of 32). First one attention: every layout keeps as many value columns and as many
score dimensions in all, so its projections and products cost the same; what differs is over how many heads they are
spread. Then the layers of the models that finer.py chose at the same FLOPs: whole heads, and heads of one size a layer.
Times are of one CPU thread, which other work on the machine disturbs little: medians of turns taken in one run, as
ratios to whole heads; above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEAD = 384, 32
SHAPES = ((1, 32), (1, 128), (32, 32), (32, 128))  # batch, length
Sizes = Sequence[tuple[int, int]]  # of every head: (score dimensions, value columns)


def layouts(heads: int) -> dict[str, list[Sizes]]:
    """By name, the groups of heads that attend together; all keep heads x 32 dimensions and columns."""
    total = heads * HEAD
    level = total // 12  # twelve heads of one size
    half = 6 * [(level // 2, level // 2)], 6 * [(level + level // 2, level + level // 2)]
    return {
        "whole heads": [heads * [(HEAD, HEAD)]],
        "twelve heads of one size": [12 * [(level, level)]],
        "two sizes, a call each": [*half],
        "two sizes, padded": [12 * [half[1][0]]],
    }


class Attention(nn.Module):
    """Projections, attention group by group, output projection."""

    def __init__(self, groups: list[Sizes]) -> None:
        super().__init__()
        self.groups = groups
        scores = sum(r for sizes in groups for r, _ in sizes)
        columns = sum(c for sizes in groups for _, c in sizes)
        self.query, self.key = nn.Linear(HIDDEN, scores), nn.Linear(HIDDEN, scores)
        self.value, self.out = nn.Linear(HIDDEN, columns), nn.Linear(columns, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        found, at_score, at_column = [], 0, 0
        for sizes in self.groups:
            (rank, columns), count = sizes[0], len(sizes)
            scores, values = count * rank, count * columns
            mine = (
                part[..., start : start + size].unflatten(-1, (count, -1)).transpose(1, 2)
                for part, start, size in ((q, at_score, scores), (k, at_score, scores), (v, at_column, values))
            )
            heads = F.scaled_dot_product_attention(*mine, scale=HEAD**-0.5)
            found.append(heads.transpose(1, 2).flatten(2))
            at_score, at_column = at_score + scores, at_column + values
        out: Tensor = self.out(found[0] if len(found) == 1 else torch.cat(found, -1))
        return out


class Layers(nn.Module):
    """The prunable layers of a student of finer.py, with norms and residuals; all heads of a layer have one size."""

    def __init__(self, layers: list[dict[str, int]]) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(self._attention(**layer) for layer in layers)
        self.ups = nn.ModuleList(nn.Linear(HIDDEN, layer["filters"]) for layer in layers)
        self.downs = nn.ModuleList(nn.Linear(layer["filters"], HIDDEN) for layer in layers)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2 * len(layers)))

    @staticmethod
    def _attention(heads: int, columns: int, scores: int, filters: int) -> nn.Module:
        if heads and (columns % heads or scores % heads):
            raise SystemExit(f"{heads} heads with {columns} columns and {scores} score dimensions have several sizes")
        return Attention([heads * [(scores // heads, columns // heads)]]) if heads else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.attentions, self.ups, self.downs, self.norms[::2], self.norms[1::2], strict=True)
        for attention, up, down, first, second in parts:
            x = first(x + attention(x))
            x = second(x + down(F.gelu(up(x))))
        return x


def chosen(points: Path) -> dict[tuple[str, float], dict[str, list[dict[str, int]]]]:
    """By task and budget, the layers of each variant, of the first seed."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for line in points.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["variant"] == "heads" or "level" in row["variant"] or "square" in row["variant"]:
            found.setdefault((row["task"], row["flops"]), {}).setdefault(row["variant"], row["layers"])
    return {key: layers for key, layers in found.items() if "heads" in layers}


def medians(modules: dict[str, nn.Module], x: Tensor, seconds: float) -> dict[str, float]:
    """CPU time of one call, in turns, over so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in modules}
    with torch.inference_mode():
        for module in modules.values():
            module(x)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name, module in modules.items():
                start = time.thread_time()
                module(x)
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measured(modules: dict[str, nn.Module], base: str, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for every shape of input."""
    for batch, length in SHAPES:
        found = medians(modules, torch.randn(batch, length, HIDDEN), seconds)
        ratios = {name: round(found[name] / found[base], 3) for name in found}
        yield {"batch": batch, "length": length, "base_ms": round(1e3 * found[base], 3), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, help="finer.jsonl; without it, one attention alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "finer_latency.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for heads in (6, 3):
        modules: dict[str, nn.Module] = {name: Attention(groups).eval() for name, groups in layouts(heads).items()}
        rows += [{"what": f"{heads} heads"} | row for row in measured(modules, "whole heads", options.seconds)]
    for (task, flops), layers in (chosen(options.points) if options.points else {}).items():
        modules = {name: Layers(sizes).eval() for name, sizes in layers.items()}
        rows += [{"what": f"{task} at {flops:.0%}"} | row for row in measured(modules, "heads", options.seconds)]
    for row in rows:
        print(json.dumps(row))
    record = {"torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
