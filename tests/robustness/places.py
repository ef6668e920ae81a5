"""Somewhere to go wrong: a small model, its data, and what a command line made of them does."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from folders import TEXTS
from latency.tables import table_of
from shearling.checkpoint.pretrained import load_model
from shearling.models.structure import structure_of

WEIGHTS = "model.safetensors"


@dataclass
class Place:
    """A folder of its own for one test; `dense` and `pruned` are shared and must be copied before a change."""

    folder: Path
    dense: Path
    pruned: Path

    @property
    def out(self) -> Path:
        return self.folder / "result" / "small"

    def rows(self, name: str = "rows.jsonl", content: str | bytes | None = None) -> str:
        """A data file; sound rows unless the content is given."""
        path = self.folder / name
        if content is None:
            content = lines(*({"text": text, "label": number % 2} for number, text in enumerate(TEXTS * 2)))
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def model(self, change: Callable[[Path], object], *, of: str = "dense") -> str:
        """A copy of the model directory with something changed in it."""
        folder = self.folder / "model"
        shutil.copytree(getattr(self, of), folder)
        change(folder)
        return str(folder)

    def table(self, change: Callable[[dict[str, Any]], object] = lambda record: None) -> str:
        """A latency table of the dense model, with something changed in it."""
        record = table_of(structure_of(load_model(str(self.dense), device="cpu"))).to_json()
        change(record)
        path = self.folder / "table.json"
        path.write_text(json.dumps(record))
        return str(path)

    def command(self, *options: object, model: str | None = None, data: str | None = None) -> list[str]:
        """`shearling prune` into `out`."""
        start = ["prune", model or str(self.dense), "--data", data or self.rows(), "--device", "cpu", "--json"]
        return [*start, "--out", str(self.out), *map(str, options)]

    def snapshot(self) -> dict[str, str]:
        """Every file here and what is in it."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in self.folder.rglob("*")
        }


def lines(*rows: dict[str, Any]) -> str:
    """Rows as jsonl."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def json_edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change an object in a JSON file of a model directory."""

    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def weight_edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the weights of a model directory."""

    def edit(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def byte_edit(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], None]:
    """Change the bytes of a file of a model directory."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None
