"""What `shearling.json` says beyond the report of the run: where the model comes from, and what was measured later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shearling.checkpoint.card import refreshed
from shearling.checkpoint.load import read_record
from shearling.files import RECORD, check_file, json_text, write_whole, writing

CURVE = "curve.svg"


def base_of(folder: Path) -> str | None:
    """The dense model that a checkpoint names and that can be found from here: a directory, a GGUF file, or None."""
    if not (folder / RECORD).is_file():
        return None
    base = read_record(folder).get("base") or ""
    if not base.startswith("."):
        return None  # a Hub id: fetching a model is for the user to ask for
    path = Path(os.path.normpath(folder.resolve() / base))
    is_model = (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())
    return str(path) if is_model and path.resolve() != folder.resolve() else None


def add_evaluation(folder: Path, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Write a score into the record and the model card; a later one of the same task takes its place."""
    return add_entry(folder, "evaluations", evaluation, key="task")


def add_entry(folder: Path, field: str, entry: dict[str, Any], *, key: str) -> dict[str, Any]:
    """Write an entry of a field into record and card, in the place of an earlier one with the same key."""
    record = read_record(folder)
    others = [other for other in record.get(field, []) if other.get(key) != entry[key]]
    return _update(folder, record, {field: [*others, entry]})


def add_curve(folder: Path, drawn: str) -> dict[str, Any]:
    """Put the curve of the models that were tried beside a checkpoint and on its card; `drawn` is SVG."""
    write_whole(folder / CURVE, drawn)
    return _update(folder, read_record(folder), {"curve": CURVE})


def _update(folder: Path, record: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Bring the model card up to date, then the record."""
    updated = record | more
    card = folder / "README.md"
    with writing(card):
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
    write_whole(card, refreshed(text, record, updated))
    write_whole(folder / RECORD, json_text(updated))
    return updated


def write_page(record: dict[str, Any], folder: Path | str, path: Path, *, force: bool = False) -> None:
    """The record as one HTML file; `folder` is where the model is."""
    from shearling.report.page import model_page

    check_file(path, force=force)
    write_whole(path, model_page(record, directory=str(folder)))
