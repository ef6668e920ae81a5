"""Output paths of exports: a file or a directory, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.companions import copy_companions
from shearling.errors import OutputError
from shearling.exporters.table import Format
from shearling.files import EXPORT, check_file, check_writable, json_text, whole_directory, whole_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SERVED = Path("onnx") / "model.onnx"  # where Text Embeddings Inference and sentence-transformers look
# Configuration keys about loading weights, which a served directory does not have.
LOADING = ("shearling", "quantization_config", "auto_map", "transformers_weights", "per_layer_config")


@dataclass(frozen=True)
class Place:
    """The output of an export.

    out     the final file or directory
    served  whether it is a directory for servers: `onnx/model.onnx` with configuration and tokenizer
    folder  whether `out` is a directory
    """

    out: Path
    served: bool = False
    folder: bool = False

    def file(self, folder: Path) -> Path:
        """The path to write to inside the temporary folder."""
        return folder / SERVED if self.served else folder if self.folder else folder / self.out.name


def place_of(out: Path, kind: Format, model: str) -> Place:
    """Choose the layout: without the suffix `.onnx`, a directory for servers, or a file in the model's directory."""
    if SERVED.suffix != kind.suffix or out.suffix == SERVED.suffix:
        return Place(out, folder=not kind.suffix)
    if out.is_dir() and out.resolve() == Path(model).resolve():
        return Place(out / SERVED)
    return Place(out, served=True, folder=True)


def check_place(place: Place, kind: Format, *, force: bool, source: str) -> None:
    """Raise early if the output cannot be written."""
    if place.folder:
        check_writable(place.out, force=force, keep=(source,))
    elif place.out.is_dir():
        raise OutputError(f"{place.out} is a directory; name a file, such as {place.out / ('model' + kind.suffix)}.")
    else:
        check_file(place.out, force=force)


@contextmanager
def whole(place: Place, *, force: bool) -> Iterator[Path]:
    """Yield the path that the format writes to; the output appears only when it is complete."""
    with whole_directory(place.out, force=force) if place.folder else whole_files(place.out) as folder:
        yield place.file(folder)


def mark(folder: Path, entry: dict[str, Any]) -> None:
    """Mark a directory as written by shearling, with a description of its content."""
    (folder / EXPORT).write_text(json_text(entry), encoding="utf-8")


def add_companions(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path
) -> None:
    """Add configuration, tokenizer and sentence-transformers files to a served model."""
    if source.is_dir():
        copy_companions(source, folder)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = {k: v for k, v in model.config.to_dict().items() if k not in LOADING}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")


def size_of(path: Path) -> int:
    """Bytes of a file with its weights, or of a directory."""
    if path.is_dir():
        return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
    return sum(part.stat().st_size for part in path.parent.glob(path.stem + ".*") if part.is_file())
