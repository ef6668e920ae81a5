"""The page of a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from shearling.report import parts
from shearling.report.curve import curve_chart
from shearling.report.page import page, snippet


def sweep_page(results: Sequence[dict[str, Any]], told: Mapping[str, Any], *, title: str) -> str:
    """The page of a sweep; `results` as in results.json, `told` as in sweep.json."""
    dense, settings = told["dense"], told["settings"]
    metric, best = dense["metric"], pick(results)
    groups = grouped(results)
    labels = [f"{group[0]['method']}, {_asked(group[0])}" for group in groups]
    timed = [(label, group[0]["timing"]) for label, group in zip(labels, groups, strict=True) if group[0].get("timing")]
    methods = dict.fromkeys(group[0]["method"] for group in groups)
    times = [(m, _mean_stages([g[0] for g in groups if g[0]["method"] == m])) for m in methods]
    return page(
        title,
        f"{len(results)} models; calibrated on {results[0]['examples']:,} examples, scored on {dense['examples']:,}",
        [
            parts.cards(_headline(results, dense, best, methods)),
            parts.section(
                f"{metric} against cost",
                curve_chart(results, dense=dense["value"], standalone=False),
                "Mean over seeds; the band is the smallest and the largest value." if _seeds(results) > 1 else "",
            ),
            parts.section("Every point", _points(groups, dense["value"], metric)),
            parts.section(
                "What is left of each layer",
                "".join(_heat(groups, method, dense) for method in methods),
                "Heads and filters that stay, layer 0 at the top; the stronger the colour, the more.",
            ),
            parts.section("Time to prune, by stage", parts.time_bars(times), "Mean over the points; no training."),
            parts.section("Latency", parts.latency(timed)),
            parts.section("Load a model", parts.code(_how(best, settings, dense.get("architecture")))),
            parts.section("Notes", parts.notes([note for row in results for note in row.get("notes", [])])),
            parts.section("Settings", parts.facts({**settings, **told.get("environment", {})})),
        ],
    )


def grouped(results: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The seeds of one method and budget together; methods in the order they came, large budgets first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["method"], *sorted(row["constraint"].items())), []).append(row)
    order = {method: i for i, method in enumerate(dict.fromkeys(row["method"] for row in results))}
    return sorted(groups.values(), key=lambda g: (order[g[0]["method"]], -g[0]["flops"]))


def pick(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The smallest model that loses at most one point on average; None where none does."""
    fine = [group for group in grouped(results) if _change(group) >= -1]
    return min((group[0] for group in fine), key=lambda row: row["flops"], default=None)


def _change(group: Sequence[dict[str, Any]]) -> float:
    """Points won (or lost) against dense; a perplexity wins by falling."""
    sign = -1 if group[0]["metric"] == "perplexity" else 1
    return sign * (fmean(row["value"] for row in group) - float(group[0]["dense"]))


def _headline(
    results: Sequence[dict[str, Any]], dense: Mapping[str, Any], best: dict[str, Any] | None, methods: Any
) -> list[tuple[str, str, str]]:
    found = [("dense", f"{dense['value']:.2f}", f"{dense['metric']}, {dense['task']}")]
    for method in methods:
        fine = pick([row for row in results if row["method"] == method])
        words = "smallest within 1 point" if fine else "no point within 1 point of dense"
        found.append((method, _asked(fine) if fine else "-", words))
    seconds = fmean(row["seconds"] for row in results if best is None or row["method"] == best["method"])
    found.append(("time to prune", f"{seconds:.1f} s", best["method"] if best else "mean"))
    return found


def _points(groups: Sequence[Sequence[dict[str, Any]]], dense: float, metric: str) -> str:
    rows = []
    for group in groups:
        values = [row["value"] for row in group]
        spread = f" <small>({min(values):.2f} to {max(values):.2f})</small>" if min(values) < max(values) else ""
        first = group[0]
        rows.append([
            escape(first["method"]), _asked(first), f"{fmean(values):.2f}{spread}", parts.change(_change(group)),
            f"{first['reached']['flops']:.1%}", f"{first['reached']['params']:.1%}",
            f"{fmean(row['seconds'] for row in group):.2f}",
        ])  # fmt: skip
    return parts.table(["method", "asked", metric, "change", "FLOPs left", "parameters left", "seconds"], rows)


def _heat(groups: Sequence[Sequence[dict[str, Any]]], method: str, dense: Mapping[str, Any]) -> str:
    mine = [group[0] for group in groups if group[0]["method"] == method]
    sizes = [row["layers"] for row in mine]
    ratios = [next(iter(row["constraint"].values())) for row in mine]
    return f"<h3>{escape(method)}</h3>" + parts.heat_map(sizes, dense["layers"], [f"{r:.0%}" for r in ratios])


def _asked(row: Mapping[str, Any]) -> str:
    names = {"flops": "FLOPs", "params": "parameters", "latency": "latency"}
    return ", ".join(f"{100 * ratio:.4g}% {names.get(kind, kind)}" for kind, ratio in row["constraint"].items())


def _mean_stages(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["stages"])
    return {name: fmean(row["stages"].get(name, 0.0) for row in rows) for name in names}


def _seeds(results: Sequence[dict[str, Any]]) -> int:
    return len({row["seed"] for row in results})


def _how(best: dict[str, Any] | None, settings: Mapping[str, Any], architecture: str | None) -> str:
    if best is None:
        return "# no point stays within one point of dense; prune less, or give more data"
    if "model" in best:
        return snippet(best["model"], architecture)
    asked = " ".join(f"--{kind} {ratio:g}" for kind, ratio in best["constraint"].items())
    data = "" if settings["data"] == "Hub" else f"--data {shlex.quote(settings['data'])} "
    command = (
        f"shearling prune {shlex.quote(settings['model'])} \\\n"
        f"    {data}--task {settings['task']} --samples {settings['samples']} \\\n"
        f"    {asked} --method {best['method']} --seed {best['seed']} --out my-model"
    )
    return f"{command}\n\n{snippet('my-model', architecture)}"
