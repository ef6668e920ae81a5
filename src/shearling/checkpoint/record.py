"""Read and update `shearling.json` of a checkpoint: its dense model, and later measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shearling.checkpoint.card import refreshed
from shearling.checkpoint.load import read_record
from shearling.files import RECORD, check_file, json_text, write_whole, writing

CURVE = "curve.svg"


def base_of(folder: Path) -> str | None:
    """The local directory or GGUF file of a checkpoint's dense model, or None."""
    if not (folder / RECORD).is_file():
        return None
    base = read_record(folder).get("base") or ""
    if not base.startswith("."):
        return None  # a Hub id: models are only downloaded on request
    path = Path(os.path.normpath(folder.resolve() / base))
    is_model = (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())
    return str(path) if is_model and path.resolve() != folder.resolve() else None


def add_evaluation(folder: Path, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Add a score to the record and the model card, replacing one of the same task."""
    return add_entry(folder, "evaluations", evaluation, key="task")


def add_entry(folder: Path, field: str, entry: dict[str, Any], *, key: str) -> dict[str, Any]:
    """Add an entry to a list in the record and card, replacing one with the same key."""
    record = read_record(folder)
    others = [other for other in record.get(field, []) if other.get(key) != entry[key]]
    return _update(folder, record, {field: [*others, entry]})


def add_curve(folder: Path, drawn: str) -> dict[str, Any]:
    """Save the chart of tried models (SVG) in a checkpoint and show it on the card."""
    write_whole(folder / CURVE, drawn)
    return _update(folder, read_record(folder), {"curve": CURVE})


def _update(folder: Path, record: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Update the model card, then the record."""
    updated = record | more
    card = folder / "README.md"
    with writing(card):
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
    write_whole(card, refreshed(text, record, updated))
    write_whole(folder / RECORD, json_text(updated))
    return updated


def write_page(record: dict[str, Any], folder: Path | str, path: Path, *, force: bool = False) -> None:
    """Write the record as one HTML page; `folder` is the model's path in its code examples."""
    from shearling.report.page import model_page

    check_file(path, force=force)
    write_whole(path, model_page(record, directory=str(folder)))
