"""Where an export goes: a file, or a directory, complete or not there at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shearling.checkpoint.save import copy_companions
from shearling.errors import OutputError
from shearling.export.formats import Format
from shearling.files import check_permission, writing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SERVED = Path("onnx") / "model.onnx"  # where Text Embeddings Inference and sentence-transformers look
LOADING = ("quantization_config", "auto_map", "per_layer_config")  # of weights that a served directory does not hold


@dataclass(frozen=True)
class Place:
    """What to write.

    out     the file or directory that appears in the end
    served  a directory for servers: the ONNX file in `onnx/`, with configuration and tokenizer
    """

    out: Path
    served: bool = False

    def file(self, folder: Path) -> Path:
        """What the format writes, inside a folder that stands for the one `out` is in."""
        return folder / self.out.name / SERVED if self.served else folder / self.out.name


def place_of(out: Path, kind: Format, model: str) -> Place:
    """A name without `.onnx` is a directory for servers; the model's own directory takes the file in as it is."""
    if SERVED.suffix != kind.SUFFIX or out.suffix == SERVED.suffix:
        return Place(out)
    if out.is_dir() and out.resolve() == Path(model).resolve():
        return Place(out / SERVED)
    return Place(out, served=True)


def check_place(place: Place, kind: Format, *, force: bool) -> None:
    """Complain early about the place to write to."""
    out, is_folder = place.out, place.served or not kind.SUFFIX
    if out.is_dir() and not is_folder:
        raise OutputError(f"{out} is a directory; name a file, such as {out / ('model' + kind.SUFFIX)}.")
    if out.exists() and not force and not (is_folder and out.is_dir() and not any(out.iterdir())):
        raise OutputError(f"{out} exists; choose another --out, or replace it with --force.")
    check_permission(out)


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A hidden folder next to the file, gone afterwards whatever happens."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    except OSError as error:
        raise OutputError(f"Cannot write beside {out}: {error.strerror}.") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def put_in_place(folder: Path, out: Path) -> None:
    """Rename what was written to where it belongs, the file that is opened last of all."""
    parts = sorted(folder.iterdir(), key=lambda path: path.name == out.name)
    with writing(out):
        for part in parts:
            target = out.parent / part.name
            if target.is_dir():
                shutil.rmtree(target)
            part.replace(target)


def size_of(path: Path) -> int:
    """Bytes of a file and of the weights beside it, or of a directory."""
    if path.is_dir():
        return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
    return sum(part.stat().st_size for part in path.parent.glob(path.stem + ".*") if part.is_file())
