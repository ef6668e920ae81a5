"""Records and comparisons as people see them: coloured in a terminal, plain text in a file or a pipe.

These are the results of their commands, so they go to stdout; progress and remarks stay on stderr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shearling.checkpoint.card import constraint, title
from shearling.report.record import describe, latency_line, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shearling.evaluation.compare import Comparison

BAR = 24


def show_record(record: dict[str, Any], console: Console | None = None) -> None:
    """A pruned checkpoint: bars per layer, costs, scores, where it comes from."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    screen = console or Console(highlight=False)
    if not screen.is_terminal:
        screen.print(plain(record), markup=False, soft_wrap=True)
        return
    screen.print(Text(title(record), style="bold"))
    for part in (_bars(record), _costs(record), _facts(record)):
        screen.print(Padding(part, (1, 0, 0, 2)))
    repairs = [f"{r['sublayer']}: {r['note']}" for r in record.get("repairs", []) if r.get("note")]
    for note in [*record.get("warnings", []), *repairs]:
        screen.print(Text(f"  note: {note}", style="yellow"))


def plain(record: dict[str, Any]) -> str:
    """The same as text alone."""
    lines = [describe(record), ""]
    lines += [f"  {name:<20}{value}" for name, value in scores(record) + provenance(record)]
    return "\n".join(lines)


def scores(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The recorded scores, as a name and words each."""
    found = []
    for entry in record.get("evaluations") or []:
        dense = f"{entry['dense']:.2f} -> " if isinstance(entry.get("dense"), (int, float)) else ""
        em = f", exact match {entry['em']:.2f}" if "em" in entry else ""
        words = f"{dense}{entry['value']:.2f}{em} on {entry['examples']:,} examples"
        found.append((f"{entry['metric']}, {entry['task']}", words))
    return found


def provenance(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the model comes from, as a name and words each."""
    sample, versions = record.get("sample", {}), record.get("versions", {})
    facts = [
        ("pruned from", record.get("base")),
        ("method", f"{record['method']}, to {constraint(record)}"),
        ("sample", f"{sample['examples']:,} examples, {sample['mean_length']:.0f} tokens on average, sha256 "
                   f"{str(sample['fingerprint'])[:16]}" if sample else None),
        ("seed", record.get("seed")),
        ("made with", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _bars(record: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    kinds = list(dict.fromkeys(kind for layer in record["dense_layers"] for kind in layer))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layer", justify="right")
    for kind in kinds:
        table.add_column(kind)
        table.add_column("", justify="right")
    for depth, (now, before) in enumerate(zip(record["layers"], record["dense_layers"], strict=True)):
        cells: list[str | Text] = []
        for kind in kinds:
            if kind in before:
                cells += [_bar(now.get(kind, 0), before[kind]), f"{now.get(kind, 0):,} of {before[kind]:,}"]
            else:
                cells += ["", ""]
        table.add_row(str(depth), *cells)
    return table


def _bar(left: int, total: int) -> Any:
    from rich.text import Text

    share = left / total if total else 0.0
    full = max(round(BAR * share), 1) if left else 0
    colour = "green" if share > 0.5 else "yellow" if share > 0.2 else "red"
    return Text("█" * full, style=colour).append("░" * (BAR - full), style="dim")


def _costs(record: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "dense", "pruned", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    labels = {
        "flops": "MACs, layers", "flops_model": "MACs, model", "params": "parameters, layers",
        "params_model": "parameters, model",
    }  # fmt: skip
    for key, label in labels.items():
        if key in record:
            cost = record[key]
            table.add_row(label, short(cost["dense"]), short(cost["pruned"]), f"{cost['ratio']:.1%}")
    return table


def _facts(record: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, words in scores(record):
        table.add_row(name, f"[bold]{words}[/]")
    if isinstance(record.get("latency"), dict) and "predicted" in record["latency"]:
        table.add_row("latency", latency_line(record["latency"]))
    for name, words in provenance(record):
        table.add_row(name, words.replace("[", r"\["))
    stages = "  ".join(f"{name} {seconds:.2f}" for name, seconds in record.get("seconds", {}).items())
    table.add_row("seconds", stages)
    return table


def print_comparison(result: Comparison, console: Console | None = None) -> None:
    """Two models side by side."""
    from rich.console import Console
    from rich.table import Table

    screen = console or Console(highlight=False, soft_wrap=True)
    a, b = result.sides
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("")
    for side in (a, b):
        table.add_column(side.model.rstrip("/").rpartition("/")[2], justify="right", overflow="fold")
    table.add_column("second of first", justify="right")
    if a.value is not None and b.value is not None:
        table.add_row(
            f"{result.metric}, {result.task}", f"{a.value:.2f}", f"{b.value:.2f}", f"{b.value - a.value:+.2f}"
        )
    for label, ours, theirs, words in (
        ("size on disk", a.bytes, b.bytes, lambda v: f"{v / 1e6:.1f} MB"),
        ("parameters", a.params, b.params, short),
        ("MACs, one example", a.macs, b.macs, short),
        (f"latency, {' x '.join(map(str, result.batch))}", a.milliseconds, b.milliseconds, lambda v: f"{v:.2f} ms"),
    ):
        table.add_row(label, words(ours), words(theirs), f"{theirs / ours:.1%}" if ours else "")
    screen.print(table)
    screen.print(f"\n{_agreed(result)}\nlatency measured in turns on {result.device}", markup=False)


def _agreed(result: Comparison) -> str:
    found = result.agreement
    if found is None:
        return "agreement: the two do not read the same tokens, or give different outputs"
    if found.measure == "equal":
        return f"agreement: {found.value:.2f}% of {found.count:,} predictions are equal"
    what = "Spearman correlation of the predictions" if found.measure == "spearman" else "mean cosine of the embeddings"
    return f"agreement: {what} {found.value:.2f} over {found.count:,}"
