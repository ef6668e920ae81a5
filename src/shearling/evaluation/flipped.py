"""Examples on which the predictions of two models differ, with their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shearling.data.columns import find_text_columns
from shearling.errors import DataError
from shearling.evaluation.scores import Predictions, Questions

SHOWN = 10  # examples
LONGEST = 280  # characters of a text
NONE = "(no answer)"


@dataclass(frozen=True)
class Flip:
    """One example: the label (empty if unknown), and both predictions."""

    text: str
    right: str
    dense: str
    pruned: str


@dataclass(frozen=True)
class Flipped:
    """The number of changed predictions, and some of the examples.

    lost, won  predictions that only the dense, or only the pruned model has right; None without labels
    """

    changed: int
    examples: int
    lost: int | None
    won: int | None
    shown: Sequence[Flip]


def flipped(asked: Questions, dense: Predictions | None, pruned: Predictions | None) -> Flipped | None:
    """Compare two models' predictions for the same rows; lost right answers come first.

    None for tasks without discrete predictions: numbers, embeddings, text.
    """
    if dense is None or pruned is None or len(dense.made) != len(pruned.made):
        return None
    labelled = bool(dense.right)
    changed = [number for number, (a, b) in enumerate(zip(dense.made, pruned.made, strict=True)) if a != b]
    lost = {n for n in changed if labelled and dense.correct[n] and not pruned.correct[n]}
    won = {n for n in changed if labelled and pruned.correct[n] and not dense.correct[n]}
    first = sorted(changed, key=lambda n: (n not in lost, n))[:SHOWN]
    texts = texts_of(asked, first)
    shown = [
        Flip(text, (dense.right[n] or NONE) if labelled else "", dense.made[n] or NONE, pruned.made[n] or NONE)
        for n, text in zip(first, texts, strict=True)
    ]
    return Flipped(
        len(changed), len(dense.made), len(lost) if labelled else None, len(won) if labelled else None, shown
    )


def texts_of(asked: Questions, numbers: Sequence[int]) -> list[str]:
    """The texts of some rows: only the question for question answering, the row number for images and audio."""
    try:
        names = find_text_columns(asked.rows, asked.task, asked.encoder.text_columns)
    except DataError:
        return [f"row {number}" for number in numbers]
    if asked.task.kind == "question-answering":
        names = names[:1]
    columns = [asked.rows.column(name) for name in names]
    return [_short(" | ".join(_words(column[number], number) for column in columns)) for number in numbers]


def _words(value: Any, number: int) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else f"row {number}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
