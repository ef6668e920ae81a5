"""Write a pruned model as a directory that a user of Hugging Face recognises."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.companions import write_companions
from shearling.engine.distributed import on_first
from shearling.engine.silence import quiet_transformers
from shearling.files import RECORD, whole_directory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def save(
    model: PreTrainedModel,
    kept: Sequence[Tensor],
    report: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    source: Any = None,
    sentence: Any = None,
    force: bool = False,
) -> Path:
    """The checkpoint as a directory that loads with plain `from_pretrained`.

    source    where tokenizer and other files come from
    sentence  the SentenceTransformer or CrossEncoder that the model is part of: its own modules are saved too
    """
    from shearling.checkpoint.card import carried_over, model_card, source_facts

    target = Path(directory)
    name = getattr(model.config, "_name_or_path", None) or None
    architecture = type(model).__name__

    def write() -> None:
        with whole_directory(target, force=force, keep=(source, name)) as folder:
            if sentence is not None:
                with quiet_transformers():
                    sentence.save_pretrained(str(folder), create_model_card=False)
            if getattr(model.config, "shearling", None):  # a stock shape needs no file of ours to load
                model.config.auto_map = _auto_map(model)  # and so saving it writes the files that this points to
            with quiet_transformers(notes=True):
                model.save_pretrained(folder)
            has_tokenizer = write_companions(source, model, folder)
            record = report | {
                "base": _base(source, name, folder),
                "architecture": architecture,
                "auto_class": _auto_class(model),
                "own_class": _own_class(model),
                "tokenizer": has_tokenizer,
                "card": carried_over(source_facts(source, name), architecture),
                "kept": [units.tolist() for units in kept],
            }
            (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            (folder / "README.md").write_text(model_card(record), encoding="utf-8")

    on_first(write)
    return target


def _base(source: Any, name: str | None, folder: Path) -> str | None:
    """The dense model: its id on the Hub, or the way to its directory or file from the checkpoint's (`./`, `../`)."""
    local = Path(source) if isinstance(source, (str, os.PathLike)) else Path(name or "")
    if (local / "config.json").is_file() or (local.suffix == ".gguf" and local.is_file()):
        way = os.path.relpath(local.resolve(), folder.resolve())
        return way if way.startswith(".") else f"./{way}"
    return name


def _auto_map(model: Any) -> dict[str, str]:
    """Point every `AutoModel...` class that serves this architecture to the file in the checkpoint.

    What leads to code that came with the model stays, except to classes of a model whose class is transformers' own.
    """
    others = getattr(model.config, "auto_map", None) or {}
    if not _own_class(model):
        others = {name: place for name, place in others.items() if not name.startswith(("AutoModel", "AutoConfig"))}
    return {name: f"modeling_shearling.{name}" for name in _serving(model)} | others


def _auto_class(model: Any) -> str:
    """The `AutoModelFor...` class that gives this very model."""
    if _own_class(model):
        return str(type(model)._auto_class)
    return next((name for name, served in _serving(model).items() if served is type(model)), "AutoModel")


def _own_class(model: Any) -> bool:
    """Whether the class came with the model: transformers has noted which `AutoModel...` fetched it."""
    return type(model)._auto_class is not None


def _serving(model: Any) -> dict[str, Any]:
    """The `AutoModel...` classes that take this configuration, and the class that each gives."""
    from transformers.models.auto import modeling_auto

    autos = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    mappings = {name: getattr(auto, "_model_mapping", {}) for name, auto in autos.items()}
    return {name: served[type(model.config)] for name, served in mappings.items() if type(model.config) in served}
