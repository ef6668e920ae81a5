"""Write a pruned model: into a hidden folder first, then renamed, so that what can be seen is complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from shearling.checkpoint.sentence import MODULES, modules_with_transformer_on_top, transformer_in
from shearling.engine.distributed import on_first
from shearling.engine.silence import quiet_transformers
from shearling.errors import OutputError
from shearling.files import check_permission

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

RECORD = "shearling.json"
MODELING = "modeling_shearling.py"
# Tokenizer, processor, generation and sentence-transformers files that go with a model.
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.spm", "*.model",
    "spiece*", "sentencepiece*", "*preprocessor_config.json", "processor_config.json", "chat_template*",
    "generation_config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "[0-9]_*", "LICENSE*", "NOTICE*",
)  # fmt: skip


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
        with whole_directory(target, force=force) as folder:
            write_checkpoint(model, kept, report, folder, source)

    on_first(write)
    return target


def write_checkpoint(
    model: PreTrainedModel, kept: Sequence[Tensor], report: dict[str, Any], folder: Path, source: Any
) -> None:
    """All files of a checkpoint."""
    from shearling.checkpoint.card import carried_over, model_card, source_facts

    model.config.auto_map = _auto_map(model)
    with quiet_transformers(notes=True):
        model.save_pretrained(folder)
    shutil.copyfile(_modeling_file(), folder / MODELING)
    if isinstance(source, (str, os.PathLike)):
        copy_companions(Path(source), folder)
    elif source is not None:
        source.save_pretrained(folder)  # a tokenizer or processor
    architecture = type(model).__name__
    name = getattr(model.config, "_name_or_path", None) or None
    record = report | {
        "base": _base(source, name, folder),
        "architecture": architecture,
        "auto_class": _auto_class(model),
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


def copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer and other files that belong to the model but not to its weights."""
    inside = transformer_in(source)  # a directory of sentence-transformers may keep the model in a folder of its own
    if inside is not None and inside != source:
        (folder / MODULES).write_text(modules_with_transformer_on_top(source), encoding="utf-8")
        copy_companions(inside, folder)
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path == inside:
                continue
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


@contextmanager
def whole_directory(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `target` at the end, or leaves no trace."""
    check_writable(target, force=force)
    target = target.resolve()  # a link to a directory stays, its target is replaced
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise OutputError(f"Cannot write beside {target}: {error.strerror}.") from None
    try:
        yield folder
        _sync(folder)
        folder.chmod(0o755)
        with _undisturbed():
            _put_in_place(folder, target)
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in its own way
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"Could not write {target}: {reason}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_writable(target: Path, *, force: bool = False) -> None:
    """Complain early: before minutes of work, not after."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # looked at below
    except (OSError, ValueError) as error:
        raise OutputError(f"{target} cannot be a directory: {getattr(error, 'strerror', None) or error}.") from None
    if target.is_symlink() and not target.exists():
        raise OutputError(f"{target} is a link that leads nowhere; remove it or choose another --out.")
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target} exists and is a file; choose another --out.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise OutputError(f"{target} exists and is not empty; choose another --out, or replace it with --force.")
    check_permission(target)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C wait for the few milliseconds of a swap."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is told of signals
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if came:
        signal.raise_signal(came[0])


def _put_in_place(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(aside / "old")
    try:
        folder.rename(target)
    except BaseException:
        (aside / "old").rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the disk hold every byte before the rename makes them visible."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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


def _modeling_file() -> Path:
    return Path(str(resources.files("shearling.models") / MODELING))
