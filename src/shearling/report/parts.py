"""The sections of a page: each takes plain data and gives HTML; every word from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shearling.report.chart import COLOURS
from shearling.report.record import short

COST_NAMES = {
    "flops": "MACs, layers",
    "flops_model": "MACs, whole model",
    "params": "parameters, layers",
    "params_model": "parameters, whole model",
}


def section(title: str, body: str, hint: str = "") -> str:
    """A titled block; empty where there is nothing to show."""
    if not body:
        return ""
    told = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{told}{body}</section>"


def cards(facts: Sequence[tuple[str, str, str]]) -> str:
    """Big numbers: (what, number, words below)."""
    made = (
        f'<div class="card"><div class="what">{escape(what)}</div><div class="number">{escape(number)}</div>'
        f'<div class="below">{escape(below)}</div></div>'
        for what, number, below in facts
    )
    return f'<div class="cards">{"".join(made)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Cells are HTML already; columns from `numbers_from` on are numbers."""
    names = "".join(f"<th{_numeric(i, numbers_from)}>{escape(name)}</th>" for i, name in enumerate(head))
    lines = (
        "<tr>" + "".join(f"<td{_numeric(i, numbers_from)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _numeric(column: int, start: int) -> str:
    return ' class="n"' if column >= start else ""


def change(points: float) -> str:
    """A gain or a loss, coloured: at most one point lost is good."""
    kind = "good" if points >= -1 else "poor" if points >= -3 else "bad"
    return f'<span class="{kind}">{points:+.2f}</span>'


def heat_map(
    sizes: Sequence[Sequence[Mapping[str, int]]], dense: Sequence[Mapping[str, int]], columns: Sequence[str]
) -> str:
    """How much of every sublayer is left: a row a layer, a column a budget, heads and filters side by side."""
    kinds = [kind for kind in ("heads", "filters") if any(layer.get(kind) for layer in dense)]
    groups = "".join(f'<th colspan="{len(columns)}" class="group">{kind} left</th>' for kind in kinds)
    names = "".join(f"<th>{escape(column)}</th>" for _ in kinds for column in columns)
    lines = []
    for depth, layer in enumerate(dense):
        cells = "".join(_heat(size[depth].get(kind, 0), layer.get(kind, 0)) for kind in kinds for size in sizes)
        lines.append(f"<tr><th>{depth}</th>{cells}</tr>")
    return (
        f'<div class="wide"><table class="heat"><thead><tr><th rowspan="2">layer</th>{groups}</tr>'
        f"<tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _heat(left: int, total: int) -> str:
    share = left / total if total else 0.0
    return f'<td style="--share:{100 * share:.0f}%" title="{left} of {total}">{left}</td>'


def layer_bars(layers: Sequence[Mapping[str, int]], dense: Sequence[Mapping[str, int]]) -> str:
    """One model: a bar for what is left of the heads and filters of every layer."""
    kinds = [kind for kind in ("heads", "filters") if any(layer.get(kind) for layer in dense)]
    head = "".join(f"<th>{kind}</th>" for kind in kinds)
    lines = []
    for depth, (now, before) in enumerate(zip(layers, dense, strict=True)):
        cells = ""
        for kind in kinds:
            left, total = now.get(kind, 0), before.get(kind, 0)
            width = 100 * left / total if total else 0
            cells += (
                f'<td><div class="bar {kind}"><i style="width:{width:.1f}%"></i></div>'
                f'<span class="count">{left:,} of {total:,}</span></td>'
            )
        lines.append(f"<tr><th>{depth}</th>{cells}</tr>")
    return (
        f'<div class="wide"><table class="bars"><thead><tr><th>layer</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def time_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Seconds per stage, stacked, on one scale."""
    longest = max((sum(stages.values()) for _, stages in rows), default=0.0) or 1.0
    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    colour = {name: f"var(--s{i % len(COLOURS)})" for i, name in enumerate(names)}
    key = "".join(f'<span><i style="background:{colour[name]}"></i>{escape(name)}</span>' for name in names)
    lines = []
    for label, stages in rows:
        pieces = "".join(
            f'<i style="width:{100 * seconds / longest:.2f}%;background:{colour[name]}" '
            f'title="{escape(name)}: {seconds:.2f} s"></i>'
            for name, seconds in stages.items()
        )
        lines.append(
            f'<div class="time"><span class="label">{escape(label)}</span><span class="stack">{pieces}</span>'
            f'<span class="sum">{sum(stages.values()):.2f} s</span></div>'
        )
    return f'<div class="key">{key}</div>{"".join(lines)}'


def costs(record: Mapping[str, Any]) -> str:
    """Costs before and after."""
    rows = [
        [name, short(record[key]["dense"]), short(record[key]["pruned"]), f"{record[key]['ratio']:.1%}"]
        for key, name in COST_NAMES.items()
        if key in record
    ]
    return table(["cost", "dense", "pruned", "left"], rows)


def latency(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Predicted against measured time, of dense."""
    lines = []
    for label, one in rows:
        measured = one.get("measured")
        faster = "-" if not measured else f"{1 / measured:.2f}x"
        shown = "-" if measured is None else f"{measured:.3f}"
        device = escape(str(one.get("device", "")))
        lines.append([escape(label), f"{one.get('predicted', float('nan')):.3f}", shown, faster, device])
    return table(["", "predicted, of dense", "measured, of dense", "faster", "device"], lines) if lines else ""


def facts(values: Mapping[str, Any]) -> str:
    """Settings by name; nested ones by their way."""
    return table(["setting", "value"], list(_flat(values)), numbers_from=9) if values else ""


def _flat(values: Mapping[str, Any], before: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{before}{name}.")
        elif value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append([escape(f"{before}{name}"), f"<code>{escape(shown)}</code>"])
    return rows


def code(text: str) -> str:
    """A snippet as it is typed."""
    return f"<pre><code>{escape(text)}</code></pre>"


def notes(words: Sequence[str]) -> str:
    """A list of remarks, each once."""
    found = "".join(f"<li>{escape(word)}</li>" for word in dict.fromkeys(words))
    return f"<ul>{found}</ul>" if found else ""
