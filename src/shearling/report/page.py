"""Report pages for a model, a sweep and a comparison: single HTML files without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from shearling._version import __version__
from shearling.report.charts import COLOURS, palette
from shearling.report.facts import (
    FOOTNOTE,
    KINDS,
    Card,
    Facts,
    Layer,
    agreement_rows,
    busy,
    card_of,
    count,
    facts_of,
    facts_of_comparison,
    faster,
    interval,
    layers_of,
    loading,
)  # fmt: skip
from shearling.report.points import alike, asked_of, change, charts_of, command_of, grouped, name_of, pick, tried_chart


class Heat(NamedTuple):
    """Heat map of the units left, for the points of one method: a row per layer, a column per point and kind."""

    name: str
    columns: Sequence[str]
    points: Sequence[Sequence[Layer]]


def model_page(record: Mapping[str, Any], *, directory: str = "DIR") -> str:
    """The page of one pruned model; the record may also have `flipped` and `command`, which are not saved."""
    facts, drop = facts_of(record), record.get("max_drop")
    stages = {name: seconds for name, seconds in record["seconds"].items() if name != "total"}
    settings = {name: record.get(name) for name in ("method", "settings", "constraint", "seed", "sample", "versions")}
    made = [("Make it", record["command"])] if "command" in record else []
    return _render(
        title=facts.title,
        under=f"by {facts.origin['method']}",
        cards=facts.cards,
        compared=facts,
        heats=[Heat("", ["left"], [facts.layers])],
        charts=[] if drop is None else [(KINDS[drop["by"]], tried_chart(drop))],
        metric="" if drop is None else drop["metric"],
        chart_hint="" if drop is None else f"Every budget tried, to lose at most {count(drop['allowed'], 'point')}.",
        tried=drop,
        codes=[*made, ("Load it", loading(directory, record))],
        flipped=record.get("flipped"),
        times=[(record["method"], stages)],
        notes=facts.notes,
        settings=_flat({**facts.origin, **settings}),
    )


def top(facts: Facts) -> str:
    """The top of the page, for a notebook."""
    page = template("top.html").render(title=facts.title, cards=facts.cards, palette=palette(), alone=True)
    return page.replace(":root", ".shearling")  # the notebook keeps its own colours


def compare_page(found: Mapping[str, Any]) -> str:
    """The page of two models; `found` is what `compare --json` prints."""
    facts = facts_of_comparison(found)
    return _render(
        title=facts.title,
        under=f"{found['task']}, {found['examples']:,} examples",
        cards=facts.cards,
        compared=facts,
        flipped=found.get("flipped"),
        sides=facts.columns,
        notes=facts.notes,
    )


def sweep_page(results: Sequence[Mapping[str, Any]], sweep: Mapping[str, Any], *, title: str) -> str:
    """The page of a sweep; `results` as in results.json, `sweep` as in sweep.json."""
    dense, settings, best = sweep["dense"], sweep["settings"], pick(results)
    groups = grouped(results)
    methods = list(dict.fromkeys(group[0]["method"] for group in groups))
    seeds, calibrated = len({row["seed"] for row in results}), results[0]["examples"]
    return _render(
        title=title,
        under=f"{len(results)} models, calibrated on {calibrated:,} and scored on {dense['examples']:,} examples",
        cards=_headline(results, dense, best),
        charts=charts_of(results, dense),
        chart_hint="Mean over seeds; the band is the smallest and the largest value." if seeds > 1 else "",
        metric=dense["metric"],
        points=[_point(group, settings, dense, best) for group in groups],
        heats=[_heat([g[0] for g in groups if g[0]["method"] == method], method, dense) for method in methods],
        times=[(m, _mean_stages([g[0] for g in groups if g[0]["method"] == m])) for m in methods],
        notes=list(dict.fromkeys(note for row in results for note in row.get("notes", []))),
        settings=_flat({**settings, **sweep.get("environment", {})}),
    )


def _headline(
    results: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], best: Mapping[str, Any] | None
) -> list[Card]:
    around = interval(dense["metric"], dense["value"], dense["examples"])
    under = f"95% interval {around[0]:.1f} to {around[1]:.1f}" if around else f"{dense['examples']:,} examples"
    name = f"{dense['metric']}, {dense['task']}"
    if best is None:
        return [Card(name, f"{dense['value']:.2f}", f"dense; {under}"), Card("recommended", "-", "none within 1 point")]
    value = fmean(row["value"] for row in alike(results, best))
    cards = [
        Card(name, f"{dense['value']:.2f} → {value:.2f}", f"dense {under}"),
        Card("recommended", asked_of(best), f"{best['method']}: smallest within 1 point"),
    ]
    timing = best.get("timing") or {}
    if timing.get("measured"):
        where = filter(None, [str(timing.get("device", "")), busy(timing.get("spread", 0.0))])
        cards.append(Card("speed, measured", faster(timing["measured"]), "; ".join(where)))
    if best.get("megabytes") and dense.get("megabytes"):
        cards.append(Card("weights", f"{dense['megabytes']:.1f} → {best['megabytes']:.1f} MB", "dense → recommended"))
    if best.get("agreement"):
        cards.append(card_of(agreement_rows(best["agreement"])[0]))
    for method in dict.fromkeys(row["method"] for row in results if row["method"] != best["method"]):
        fine = pick([row for row in results if row["method"] == method])
        cards.append(Card(method, asked_of(fine) if fine else "-", f"{'smallest' if fine else 'none'} within 1 point"))
    return [*cards, Card("time to prune", f"{best['seconds']:.1f} s", best["method"])]


def _point(
    group: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], dense: Mapping[str, Any], best: Any
) -> dict[str, Any]:
    """A row of the table of points, with the code to make and load its model."""
    first, values = group[0], [row["value"] for row in group]
    timing, lost = first.get("timing") or {}, change(group)
    out = first.get("model") or name_of(first["method"], first["constraint"])
    load = loading(out, dense)
    return {
        "method": first["method"],
        "asked": asked_of(first),
        "best": best is not None and first is best,
        "value": f"{fmean(values):.2f}",
        "range": f"{min(values):.2f} to {max(values):.2f}" if min(values) < max(values) else "",
        "change": f"{lost:+.2f}",
        "kind": "good" if lost >= -1 else "poor" if lost >= -3 else "bad",
        "flops": f"{first['reached']['flops']:.1%}",
        "params": f"{first['reached']['params']:.1%}",
        "speed": faster(timing["measured"]) if timing.get("measured") else "",
        "device": timing.get("device", ""),
        "megabytes": f"{first['megabytes']:.1f}" if first.get("megabytes") else "",
        "seconds": f"{fmean(row['seconds'] for row in group):.2f}",
        "code": f"{command_of(first, settings, out)}\n\n# then, in Python\n{load}",
        "flipped": first.get("flipped"),
    }


def _heat(rows: Sequence[Mapping[str, Any]], method: str, dense: Mapping[str, Any]) -> Heat:
    ratios = [f"{next(iter(row['constraint'].values())):.0%}" for row in rows]
    timed = (row["timing"]["layer_time"] for row in rows if (row.get("timing") or {}).get("layer_time"))
    shares = dense.get("layer_time") or next(timed, None)
    return Heat(method, ratios, [layers_of(row["layers"], dense["layers"], shares) for row in rows])


def _mean_stages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["stages"])
    return {name: fmean(row["stages"].get(name, 0.0) for row in rows) for name in names}


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Settings by dotted name."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{before}{name}.")
        elif value is not None:
            rows.append((f"{before}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


def _render(*, compared: Facts | None = None, **parts: Any) -> str:
    return template("page.html").render(
        compared=compared, palette=palette(), version=__version__, footnote=FOOTNOTE, colours=len(COLOURS),
        **{"sides": ("dense", "pruned"), **parts},
    )  # fmt: skip


@cache
def template(name: str) -> Template:
    """A template of this package."""
    loader = PackageLoader("shearling.report")
    here = Environment(loader=loader, autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True)
    return here.get_template(name)
