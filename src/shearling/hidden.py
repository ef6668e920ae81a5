"""Hidden temporary folders beside an output: create them, swap them into place, clean up after a killed process."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def hidden_beside(target: Path, suffix: str) -> Path:
    """Create a hidden folder next to the target; its name contains the host and process id."""
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.{_host()}-{os.getpid()}.", suffix=suffix, dir=target.parent))


def clear_hidden(target: Path) -> None:
    """Remove what killed processes left beside the target; a target that they had moved aside is restored."""
    ours = re.compile(re.escape(f".{target.name}.{_host()}-") + r"(\d+)\.[^.]+\.(part|old)")
    for path in sorted(target.parent.glob(f".{target.name}.*")) if target.parent.is_dir() else []:
        found = ours.fullmatch(path.name)
        if found is None or _alive(int(found[1])):
            continue
        if not target.exists() and (path / "old").is_dir():
            (path / "old").rename(target)
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename the folder to the target; a previous target stays complete until then and is removed afterwards."""
    if not target.exists():
        folder.rename(target)
        return
    if _exchanged(folder, target):
        shutil.rmtree(folder, ignore_errors=True)
        return
    aside = hidden_beside(target, ".old")
    target.rename(aside / "old")
    try:
        folder.rename(target)
    except BaseException:
        (aside / "old").rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchanged(folder: Path, target: Path) -> bool:
    """Swap two folders atomically, so that a kill leaves the old or the new one; False where the OS cannot."""
    with suppress(AttributeError, OSError):
        call = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(call(AT_FDCWD, os.fsencode(folder), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE) == 0)
    return False


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", platform.node()) or "here"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # the process exists but belongs to another user
        return True
    return True
