"""Write files and folders atomically; the only place that decides whether something may be written.

Output is written under a hidden name beside the target, flushed to disk and renamed, so a visible file is complete.
`force` replaces the named file, or a folder that shearling wrote, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shearling.errors import OutputError, ShearlingError
from shearling.hidden import clear_hidden, hidden_beside, put_in_place

RECORD = "shearling.json"  # in every checkpoint
EXPORT = "shearling-export.json"  # in every directory that an export wrote
SWEEP = ("sweep.json", "results.json")  # in the folder of every sweep
DEMO = "report.json"  # in the folder of the demo, beside other reports and the checkpoint
FORCE = "replace it with force (--force, force=True)"


def check_writable(target: Path, *, force: bool = False, keep: Iterable[Any] = ()) -> None:
    """Raise unless a folder may be written here; called before the work starts.

    force  a folder that shearling wrote may be replaced
    keep   paths that are never replaced, nor a folder that contains them: the source model. Values that are not
           directories are ignored (a model in memory or on the Hub). The working directory is always kept.
    """
    check_folder(target)
    if not target.is_dir():
        return
    here = target.resolve()
    for word, place in [("the working directory", Path.cwd()), *(("the model", p) for p in map(_directory, keep) if p)]:
        if here == place.resolve() or here in place.resolve().parents:
            raise OutputError(f"{target} is {word} itself or holds it; name a folder of its own to write to.")
    if not any(target.iterdir()):
        return
    if not force:
        raise OutputError(f"{target} exists and is not empty; choose another place, or {FORCE}.")
    if not is_ours(target):
        raise OutputError(
            f"{target} is not empty and holds no {RECORD}: shearling did not write it and does not replace it, with "
            "force or without. Choose another place, or remove it yourself."
        )


def is_ours(folder: Path) -> bool:
    """Whether shearling wrote this folder: a checkpoint, a sweep, an export, or the demo's."""
    if any((folder / name).is_file() for name in (RECORD, EXPORT)) or all((folder / n).is_file() for n in SWEEP):
        return True
    inside = list(folder.iterdir())
    return (folder / DEMO).is_file() and all(p.stem == "report" or (p / RECORD).is_file() for p in inside)


def check_folder(target: Path) -> None:
    """Raise unless the folder exists or could be created."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # checked below
    except (OSError, ValueError) as error:
        raise OutputError(f"{target} cannot be a directory: {getattr(error, 'strerror', None) or error}.") from None
    with writing(target):
        if target.is_symlink() and not target.exists():
            raise OutputError(f"{target} is a link that leads nowhere; remove it or choose another place.")
        if target.exists() and not target.is_dir():
            raise OutputError(f"{target} exists and is a file; choose another place.")
        _check_permission(target)


def check_file(path: Path, *, force: bool = False) -> None:
    """Raise unless a file may be written here."""
    with writing(path):
        if path.is_dir():
            raise OutputError(f"{path} is a directory; name a file in it.")
        if path.exists() and not force:
            raise OutputError(f"{path} exists; choose another name, or {FORCE}.")
        _check_permission(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically."""
    with whole_files(path) as folder:
        (folder / path.name).write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_directory(target: Path, *, force: bool = False, keep: Iterable[Any] = ()) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on success and is removed on failure."""
    check_writable(target, force=force, keep=keep)
    target = target.resolve()  # a symlink to a directory is kept, its target is replaced
    with _hidden_beside(target) as folder:
        yield folder
        _flush([*folder.rglob("*"), folder])
        folder.chmod(0o755)
        try:
            check_writable(target, force=force, keep=keep)
        except OutputError as error:  # another run wrote there meanwhile
            spare = _free_name(target)
            folder.rename(spare)
            raise OutputError(f"{error} It appeared during this run; what this run made is in {spare}.") from None
        with signals_held():
            put_in_place(folder, target)


def _free_name(target: Path) -> Path:
    """NAME-2, NAME-3, ...: the first that does not exist."""
    return next(p for n in count(2) if not (p := target.with_name(f"{target.name}-{n}")).exists())


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for a file of this name and its companions, which are moved beside `path` on success.

    Subfolders are scratch space and are removed.
    """
    with _hidden_beside(path) as folder:
        yield folder
        made = sorted((p for p in folder.iterdir() if p.is_file()), key=lambda p: p.name == path.name)
        _flush(made)
        for part in made:  # the main file last, so that its companions exist when it appears
            part.replace(path.parent / part.name)


@contextmanager
def _hidden_beside(target: Path) -> Iterator[Path]:
    """Yield a hidden folder next to the target; it is always removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_hidden(target)
        folder = hidden_beside(target, ".part")
    except OSError as error:
        raise OutputError(f"Cannot write {target}: {error.strerror}.") from None
    try:
        yield folder
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"Cannot write {target}: {reason}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn operating system errors about this path into an OutputError."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, ShearlingError):
            raise
        raise OutputError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error


def _check_permission(target: Path) -> None:
    parent = target.resolve().parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not existing.is_dir():
        raise OutputError(f"{existing} is a file, so nothing can be written in it as {target}; choose another place.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"No permission to write in {existing}; choose another place.")


def _directory(place: Any) -> Path | None:
    """Returns the path if it is a directory."""
    with suppress(TypeError, OSError, ValueError):
        path = Path(place)
        return path if place and path.is_dir() else None
    return None


@contextmanager
def signals_held(*, most: int | None = None) -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM to the end of a block; all of them, or only the first `most`."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: object) -> None:
        came.append(number)
        if most is not None and len(came) > most:
            release()
            signal.raise_signal(number)

    def release() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        release()
    if came:
        signal.raise_signal(came[0])


def _flush(paths: Iterable[Path]) -> None:
    """Flush everything to disk before the rename makes it visible."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def json_text(value: Any) -> str:
    """Format a record for a JSON file."""
    return json.dumps(value, indent=1) + "\n"
