"""Writing files: may it be done, whole or not at all, and a failure told in one sentence."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shearling.errors import OutputError

BLOCK = 2**20  # bytes that a digest reads at once
PARTS = 16


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by way of a hidden one beside it, which is gone afterwards whatever happens."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the system says against this place, as an error of ours."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"Cannot write {path}: {error.strerror or error}.") from error


def check_permission(target: Path) -> None:
    """Whether something may be made at this place."""
    parent = target.resolve().parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"No permission to write in {existing}; choose another --out.")


def weights_digest(model: str) -> str | None:
    """A digest of sizes, and of blocks from all over the files; None for a Hub id, which names its weights itself."""
    place = Path(model)
    if not place.exists():
        return None
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*.safetensors")) if place.is_dir() else [place]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for part in range(PARTS + 1):  # the first and the last block among them
                file.seek(max(0, (size - BLOCK) * part // PARTS))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()
