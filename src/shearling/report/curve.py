"""The results of a sweep as a chart: the metric against the budget, mean and spread over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import Any

from shearling.report.chart import Level, Point, Series, chart

NAMES = {"flops": "FLOPs", "params": "parameters", "latency": "latency"}


def curve_chart(results: Sequence[dict[str, Any]], *, dense: float, title: str = "", standalone: bool = True) -> str:
    """`results` as in results.json; `dense` is the metric of the unpruned model."""
    metric = str(results[0]["metric"])
    kind = _kind(results)
    levels = [Level(dense, f"dense {dense:.2f}", strong=True)]
    if metric != "perplexity":  # points of a metric out of 100; a perplexity has none
        levels.append(Level(dense - 1, "1 point below"))
    return chart(
        series_of(results, kind),
        levels=levels,
        title=title,
        x_label=f"{NAMES.get(kind, kind)}, of dense",
        y_label=metric,
        x_format="{:.0%}".format,
        standalone=standalone,
    )


def series_of(results: Sequence[dict[str, Any]], kind: str = "flops") -> list[Series]:
    """One series a method; a point is the mean over its seeds, its band the smallest and largest value."""
    groups: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in results:
        groups[row["method"]][row[kind]].append(row["value"])
    return [Series(method, [_point(method, x, found[x]) for x in sorted(found)]) for method, found in groups.items()]


def _point(method: str, x: float, values: list[float]) -> Point:
    middle = mean(values)
    if len(values) == 1:
        return Point(x, middle, note=f"{method} at {x:.0%}: {middle:.2f}")
    low, high = min(values), max(values)
    return Point(x, middle, low, high, f"{method} at {x:.0%}: {middle:.2f} ({low:.2f} to {high:.2f})")


def _kind(results: Sequence[dict[str, Any]]) -> str:
    """What the budgets are ratios of; FLOPs where a sweep mixes several kinds."""
    kinds = {name for row in results for name in row.get("constraint", {"flops": 0})}
    return kinds.pop() if len(kinds) == 1 else "flops"
