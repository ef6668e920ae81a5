"""The points of a sweep: grouping by seed, the recommended point, charts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from shearling.errors import InputError
from shearling.methods import method_of, settings_of
from shearling.report.charts import Level, Point, Series, chart
from shearling.report.facts import KINDS, constraint_of

Result = Mapping[str, Any]
# Settings of a run that are options of `prune` of the same name.
PASSED = ("shape", "multiple_of", "batch_size", "seq_len", "max_length", "pooling", "prefix", "dtype")


def grouped(results: Sequence[Result]) -> list[list[Result]]:
    """Group the seeds of each method and budget; methods in order of appearance, large budgets first."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for row in results:
        groups.setdefault((row["method"], *sorted(row["constraint"].items())), []).append(row)
    order = {method: i for i, method in enumerate(dict.fromkeys(row["method"] for row in results))}
    return sorted(groups.values(), key=lambda g: (order[g[0]["method"]], -g[0]["flops"]))


def pick(results: Sequence[Result]) -> Result | None:
    """The smallest model that loses at most one point on average, or None."""
    fine = [group for group in grouped(results) if change(group) >= -1]
    return min((group[0] for group in fine), key=lambda row: float(row["flops"]), default=None)


def change(group: Sequence[Result]) -> float:
    """Change of the score against dense, mean over seeds."""
    return gain(group[0]["metric"], float(group[0]["dense"]), fmean(row["value"] for row in group))


def gain(metric: str, before: float, after: float) -> float:
    """Improvement of a score; lower is better for perplexity."""
    return before - after if metric == "perplexity" else after - before


def alike(results: Sequence[Result], one: Result) -> list[Result]:
    """The points of the same method and budget, one per seed."""
    return [row for row in results if all(row[part] == one[part] for part in ("method", "constraint"))]


def name_of(method: str, constraint: Mapping[str, float], seed: int = 0) -> str:
    """The folder name of a point: `surgeon-flops-0.5`, with the seed if it is not 0."""
    asked = "-".join(f"{kind}-{ratio:g}" for kind, ratio in constraint.items())
    return f"{method}-{asked}" + (f"-seed-{seed}" if seed else "")


def series_of(results: Sequence[Result], kind: str = "flops") -> list[Series]:
    """One series per method; a point is the mean over seeds, its band the range."""
    groups: dict[str, dict[float, list[float]]] = {}
    for row in results:
        x = place(row, kind)
        if x is not None:
            groups.setdefault(row["method"], {}).setdefault(x, []).append(row["value"])
    return [
        Series(method, [_point(x, found[x]) for x in sorted(found)]) for method, found in groups.items()
    ]  # fmt: skip


def place(row: Result, kind: str) -> float | None:
    """The x value of a point: the requested ratio, the measured latency, or megabytes."""
    if kind == "latency":
        timing = row.get("timing") or {}
        return timing.get("measured")
    return row.get(kind)


def charts_of(results: Sequence[Result], dense: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, SVG) of the chart for every axis with values; the constrained cost first."""
    kinds = {"flops": "FLOPs", "params": "parameters", "latency": "measured latency", "megabytes": "MB"}
    first = asked_kind(results)
    names = sorted(kinds, key=lambda kind: kind != first)
    shown = [k for k in names if (k == first or k != "params") and any(place(r, k) is not None for r in results)]
    return [(kinds[kind], curve_chart(results, dense=dense, kind=kind, standalone=False)) for kind in shown]


def curve_chart(
    results: Sequence[Result],
    *,
    dense: float | Mapping[str, Any],
    title: str = "",
    kind: str | None = None,
    standalone: bool = True,
    this: Result | None = None,
) -> str:
    """The metric against a cost, with the dense model at 100%.

    dense  the dense model's metric, or its entry in sweep.json
    this   the point to mark as this model; default: the recommended one is marked
    """
    facts = dense if isinstance(dense, Mapping) else {"value": dense}
    value, metric, axis = float(facts["value"]), str(results[0]["metric"]), kind or asked_kind(results)
    levels = [Level(value, f"dense {value:.2f}", strong=True)]
    if metric != "perplexity":  # scores in points
        levels.append(Level(value - 1, "1 point less"))
    marked = []
    best = this or (pick(results) if all("constraint" in row for row in results) else None)
    if best is not None and (at := place(best, axis)) is not None:
        marked = [
            (at, fmean(row["value"] for row in alike(results, best)), "recommended" if this is None else "this model")
        ]
    whole = facts.get("megabytes") if axis == "megabytes" else 1.0
    series = series_of(results, axis)
    if whole is not None:
        series.append(Series("dense", [Point(float(whole), value)], line=False))
    return chart(
        series,
        levels=levels,
        marked=marked,
        title=title,
        x_label="weights, MB" if axis == "megabytes" else f"{KINDS.get(axis, axis)}, of dense",
        y_label=metric,
        x_format="{:g}".format if axis == "megabytes" else "{:.0%}".format,
        standalone=standalone,
    )


def tried_chart(drop: Mapping[str, Any], *, title: str = "", standalone: bool = False) -> str:
    """Chart of the budgets tried in a search for the smallest model; `drop` is the record's `max_drop`."""
    found = [one for one in drop["tried"] if one["value"] is not None]
    dense, allowed, lower = drop["dense"], drop["allowed"], drop["metric"] != "perplexity"
    levels = [Level(dense, f"dense {dense:.2f}", strong=True)]
    if allowed:
        bound, label = (dense - allowed, "lowest allowed") if lower else (dense + allowed, "highest allowed")
        levels.append(Level(bound, label))
    chosen = min((one for one in found if one["allowed"]), key=lambda one: float(one["budget"]))
    return chart(
        [
            Series("tried", [Point(one["budget"], one["value"]) for one in found]),
            Series("dense", [Point(1.0, dense)], line=False),
        ],
        levels=levels,
        marked=[(chosen["budget"], chosen["value"], "chosen")],
        title=title,
        x_label=f"{KINDS[drop['by']]}, of dense",
        y_label=drop["metric"],
        x_format="{:.0%}".format,
        standalone=standalone,
    )


def asked_kind(results: Sequence[Result]) -> str:
    """The kind of cost that is constrained; FLOPs if a sweep has several."""
    kinds = {name for row in results for name in row.get("constraint", {"flops": 0})}
    return kinds.pop() if len(kinds) == 1 else "flops"


def asked_of(row: Result) -> str:
    """`50% FLOPs`."""
    return constraint_of(row, of=" ")


def command_of(row: Result, settings: Mapping[str, Any], out: str) -> str:
    """The command that makes a model; data and models given in memory appear as FILE and MODEL."""
    words = [f"--{kind} {ratio:g}" for kind, ratio in row["constraint"].items()]
    words += [f"--method {row['method']}", *_changed(row["method"], settings.get("methods", {}))]
    words += [_option(name, settings[name]) for name in PASSED if settings.get(name) is not None]
    if "latency" in row["constraint"] and settings.get("table"):
        words.append(_option("table", settings.get("table_file") or "TABLE"))
    data = settings["data"]
    file = "FILE" if data.startswith("(") else shlex.quote(data)  # `(list)` was given in memory
    read = [] if data == "Hub" else [f"--data {file}"]
    text, label = settings.get("columns") or (None, None)
    columns = {"task": settings.get("task"), "text_columns": text and ",".join(text), "label_column": label}
    read += [_option(name, value) for name, value in columns.items() if value]
    read += [_option("flops_length", settings["length"])] if settings.get("length") else []
    lines = [
        [f"shearling prune {shlex.quote(settings['model'] or 'MODEL')}"],
        [*read, f"--samples {settings['samples']}"],
        [*words, f"--seed {row['seed']}", f"--out {shlex.quote(out)}"],
    ]
    return " \\\n    ".join(map(" ".join, lines))


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {shlex.quote(str(value))}"


def _changed(name: str, methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The settings of a method that differ from its defaults."""
    try:
        usual = settings_of(method_of(name))
    except InputError:  # a method registered in another process
        usual = {}
    given = methods.get(name, {})
    return [f"--set {key}={value}" for key, value in given.items() if key != "precision" and usual.get(key) != value]


def _point(x: float, values: Sequence[float]) -> Point:
    if len(values) == 1:
        return Point(x, values[0])
    return Point(x, fmean(values), min(values), max(values))
