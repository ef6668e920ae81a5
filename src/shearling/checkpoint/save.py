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
    force: bool = False,
) -> Path:
    """The checkpoint as a directory that loads with plain `from_pretrained`."""
    target = Path(directory)

    def write() -> None:
        with whole_directory(
            target, force=force, keep=(source, getattr(model.config, "_name_or_path", None))
        ) as folder:
            write_checkpoint(model, kept, report, folder, source)

    on_first(write)
    return target


def write_checkpoint(
    model: PreTrainedModel, kept: Sequence[Tensor], report: dict[str, Any], folder: Path, source: Any
) -> None:
    """All files of a checkpoint."""
    from shearling.checkpoint.card import carried_over, model_card, source_facts

    if getattr(model.config, "shearling", None):  # a stock shape needs no file of ours to load
        model.config.auto_map = _auto_map(model)  # and so saving it writes the file that this points to
    with quiet_transformers(notes=True):
        model.save_pretrained(folder)
    has_tokenizer = write_companions(source, model, folder)
    architecture = type(model).__name__
    name = getattr(model.config, "_name_or_path", None) or None
    record = report | {
        "base": _base(source, name, folder),
        "architecture": architecture,
        "auto_class": _auto_class(model),
        "tokenizer": has_tokenizer,
        "card": carried_over(source_facts(source, name), architecture),
        "kept": [units.tolist() for units in kept],
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")


def _base(source: Any, name: str | None, folder: Path) -> str | None:
    """The dense model: its id on the Hub, or the way to its directory or file from the checkpoint's (`./`, `../`)."""
    local = Path(source) if isinstance(source, (str, os.PathLike)) else Path(name or "")
    if (local / "config.json").is_file() or (local.suffix == ".gguf" and local.is_file()):
        way = os.path.relpath(local.resolve(), folder.resolve())
        return way if way.startswith(".") else f"./{way}"
    return name


def _auto_map(model: Any) -> dict[str, str]:
    """Point every `AutoModel...` class that serves this architecture to the file in the checkpoint."""
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if name.startswith("AutoModel")]
    mappings = {name: getattr(getattr(modeling_auto, name), "_model_mapping", {}) for name in names}
    return {name: f"modeling_shearling.{name}" for name, served in mappings.items() if type(model.config) in served}


def _auto_class(model: Any) -> str:
    """The `AutoModelFor...` class that gives this very model."""
    from transformers.models.auto import modeling_auto

    for name in _auto_map(model):
        if getattr(modeling_auto, name)._model_mapping[type(model.config)] is type(model):
            return name
    return "AutoModel"
