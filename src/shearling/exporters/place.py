"""Where an export goes: a file, or a directory, complete or not there at all."""

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
# Keys about loading weights, which a served directory does not hold.
LOADING = ("shearling", "quantization_config", "auto_map", "transformers_weights", "per_layer_config")


@dataclass(frozen=True)
class Place:
    """What to write.

    out     the file or directory that appears in the end
    served  a directory for servers: the ONNX file in `onnx/`, with configuration and tokenizer
    folder  whether `out` is a directory
    """

    out: Path
    served: bool = False
    folder: bool = False

    def file(self, folder: Path) -> Path:
        """What the format writes, inside the folder that is filled."""
        return folder / SERVED if self.served else folder if self.folder else folder / self.out.name


def place_of(out: Path, kind: Format, model: str) -> Place:
    """A name without `.onnx` is a directory for servers; the model's own directory takes the file in as it is."""
    if SERVED.suffix != kind.suffix or out.suffix == SERVED.suffix:
        return Place(out, folder=not kind.suffix)
    if out.is_dir() and out.resolve() == Path(model).resolve():
        return Place(out / SERVED)
    return Place(out, served=True, folder=True)


def check_place(place: Place, kind: Format, *, force: bool, source: str) -> None:
    """Complain early about the place to write to."""
    if place.folder:
        check_writable(place.out, force=force, keep=(source,))
    elif place.out.is_dir():
        raise OutputError(f"{place.out} is a directory; name a file, such as {place.out / ('model' + kind.suffix)}.")
    else:
        check_file(place.out, force=force)


@contextmanager
def whole(place: Place, *, force: bool) -> Iterator[Path]:
    """What the format writes to; it appears complete, or not at all."""
    with whole_directory(place.out, force=force) if place.folder else whole_files(place.out) as folder:
        yield place.file(folder)


def mark(folder: Path, entry: dict[str, Any]) -> None:
    """Say in a directory that shearling wrote it, and what it holds."""
    (folder / EXPORT).write_text(json_text(entry), encoding="utf-8")


def add_companions(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path
) -> None:
    """Configuration, tokenizer and sentence-transformers' files beside a served model."""
    if source.is_dir():
        copy_companions(source, folder)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = {k: v for k, v in model.config.to_dict().items() if k not in LOADING}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")


def size_of(path: Path) -> int:
    """Bytes of a file and of the weights beside it, or of a directory."""
    if path.is_dir():
        return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
    return sum(part.stat().st_size for part in path.parent.glob(path.stem + ".*") if part.is_file())
