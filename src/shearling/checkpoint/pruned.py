"""The result of pruning: the smaller model and its record, saved as a Hugging Face model directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shearling.checkpoint.card import carried_over, model_card, source_facts
from shearling.checkpoint.companions import write_companions
from shearling.checkpoint.record import write_page
from shearling.engine.distributed import on_first
from shearling.engine.silence import quiet_transformers
from shearling.files import RECORD, json_text, whole_directory
from shearling.report.record import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Pruned:
    """The pruned model, its kept units, and the record of the run.

    flipped  examples on which the dense and pruned predictions differ, if both were scored. They contain texts of the
             evaluation set, so they are shown on report pages but never saved in a checkpoint.
    """

    model: PreTrainedModel
    kept: list[Tensor]
    report: Report
    flipped: Mapping[str, Any] | None = None

    @property
    def transformer(self) -> PreTrainedModel:
        """The pruned transformer: `model`, or the one inside it."""
        return self.model

    def save(self, directory: str | os.PathLike[str], *, source: Any = None, force: bool = False) -> Path:
        """Write a checkpoint that loads with plain `from_pretrained`.

        source  directory with the tokenizer and other files, or the tokenizer itself; not needed for models of
                sentence-transformers
        """
        target, model = Path(directory), self.transformer
        sentence: Any = None if model is self.model else self.model
        source = source if sentence is None else None
        name = getattr(model.config, "_name_or_path", None) or None

        def write() -> None:
            with whole_directory(target, force=force, keep=(source, name)) as folder:
                if sentence is not None:
                    with quiet_transformers():
                        sentence.save_pretrained(str(folder), create_model_card=False)
                if getattr(model.config, "shearling", None):  # stock shapes load without our modelling file
                    model.config.auto_map = _auto_map(model)  # saving writes the files that it names
                with quiet_transformers(notes=True):
                    model.save_pretrained(folder)
                record = self.report.to_json() | {
                    "base": _base(source, name, folder),
                    "architecture": type(model).__name__,
                    "auto_class": _auto_class(model),
                    "own_class": _own_class(model),
                    "tokenizer": write_companions(source, model, folder),
                    "card": carried_over(source_facts(source, name), type(model).__name__),
                    "kept": [units.tolist() for units in self.kept],
                }
                (folder / RECORD).write_text(json_text(record), encoding="utf-8")
                (folder / "README.md").write_text(model_card(record), encoding="utf-8")

        on_first(write)
        return target

    def write_report(self, path: str | os.PathLike[str], *, directory: str = "DIR", force: bool = False) -> Path:
        """Write the report as one HTML page; `directory` is the model's path in its code examples."""
        write_page(self.report.to_json() | {"flipped": self.flipped}, directory, Path(path), force=force)
        return Path(path)

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def _base(source: Any, name: str | None, folder: Path) -> str | None:
    """The dense model: its Hub id, or its path relative to the checkpoint (`./`, `../`)."""
    local = Path(source) if isinstance(source, (str, os.PathLike)) else Path(name or "")
    if (local / "config.json").is_file() or (local.suffix == ".gguf" and local.is_file()):
        way = os.path.relpath(local.resolve(), folder.resolve())
        return way if way.startswith(".") else f"./{way}"
    return name


def _auto_map(model: Any) -> dict[str, str]:
    """Map every `AutoModel...` class of this architecture to the modelling file in the checkpoint.

    Entries for custom code stay, except model and configuration entries if the model's class is one of transformers.
    """
    others = getattr(model.config, "auto_map", None) or {}
    if not _own_class(model):
        others = {name: place for name, place in others.items() if not name.startswith(("AutoModel", "AutoConfig"))}
    return {name: f"modeling_shearling.{name}" for name in _serving(model)} | others


def _auto_class(model: Any) -> str:
    """The `AutoModelFor...` class that loads this model."""
    if _own_class(model):
        return str(type(model)._auto_class)
    return next((name for name, served in _serving(model).items() if served is type(model)), "AutoModel")


def _own_class(model: Any) -> bool:
    """Whether the class is custom: transformers notes which `AutoModel...` loaded it."""
    return type(model)._auto_class is not None


def _serving(model: Any) -> dict[str, Any]:
    """Maps the `AutoModel...` classes that support this configuration to the classes they load."""
    from transformers.models.auto import modeling_auto

    autos = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    mappings = {name: getattr(auto, "_model_mapping", {}) for name, auto in autos.items()}
    return {name: served[type(model.config)] for name, served in mappings.items() if type(model.config) in served}
