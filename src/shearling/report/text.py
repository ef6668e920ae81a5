"""Facts as text: coloured in a terminal, plain in a file, a pipe or `print`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shearling.report.facts import FOOTNOTE, Facts, Layer, Row, facts_of

if TYPE_CHECKING:
    from rich.console import Console

BAR = 24
Piece = tuple[str, str]  # text and its rich style


def words(facts: Facts) -> str:
    """Facts as plain text."""
    return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines(facts))


def brief(record: Mapping[str, Any]) -> str:
    """A record in at most five lines."""
    facts = facts_of(record)
    cards = [f"  {card.name}: {card.number} ({card.below})" for card in facts.cards]
    return "\n".join([facts.title, *cards[:4]])


def show(facts: Facts, console: Console | None = None) -> None:
    """Print the result of a command, to stdout."""
    from rich.console import Console
    from rich.text import Text

    screen = console or Console(highlight=False, soft_wrap=True)
    for line in lines(facts):
        text = Text.assemble(*line)
        text.rstrip()
        screen.print(text, soft_wrap=True)


def lines(facts: Facts) -> Iterator[list[Piece]]:
    """Title, layers, dense against pruned, origin, notes."""
    yield [(facts.title, "bold")]
    if facts.layers:
        yield [("", "")]
        yield from map(_layer, facts.layers)
    yield [("", "")]
    yield from _table(facts.rows, facts.columns)
    if any("FLOPs" in row.name for row in facts.rows):
        yield [(f"  {FOOTNOTE}", "dim")]
    if facts.origin:
        yield [("", "")]
    for name, words in facts.origin.items():
        yield [(f"  {name:<20}", "dim"), (words, "")]
    for note in facts.notes:
        yield [(f"  note: {note}", "yellow")]


def _layer(layer: Layer) -> list[Piece]:
    """`  3  heads ████░░ 7/12   filters ███░░░ 812/3072`, and the layer's share of the time."""
    pieces: list[Piece] = [(f"  {layer.depth:>3}  ", "dim")]
    for kind, (left, total) in layer.units.items():
        share = left / total if total else 0.0
        full = max(round(BAR * share), 1) if left else 0
        colour = "green" if share > 0.5 else "yellow" if share > 0.2 else "red"
        pieces += [
            (f"{kind} ", "dim"),
            ("█" * full, colour),
            ("░" * (BAR - full), "dim"),
            (f" {left:>5}/{total:<5}  ", ""),
        ]
    return [*pieces, *([] if layer.time is None else [(f"{layer.time:6.1%} of time", "dim")])]


def _table(rows: Sequence[Row], columns: tuple[str, str]) -> Iterator[list[Piece]]:
    head = Row("", *columns, "")
    wide = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    for row in (head, *rows):
        name, dense, pruned, change = (
            row[i].ljust(wide[i]) if i == 0 else row[i].rjust(wide[i]) for i in range(4)
        )  # fmt: skip
        style = "dim" if row is head else ""
        yield [
            (f"  {name}  {dense}  ", style), (pruned, style or "bold"), (f"  {change}", style),
            (f"  {row.note}" if row.note else "", "dim"),
        ]  # fmt: skip
