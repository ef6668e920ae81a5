"""A file is written whole or not at all, and a failure is told in one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shearling.errors import OutputError
from shearling.files import write_whole, writing


@pytest.mark.parametrize("content", ["né\n", b"\x00\xff"])
def test_files_are_replaced(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, "before")
    write_whole(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode("utf-8"))
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def half(partial: Path, data: bytes) -> None:
        with partial.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OutputError, match=f"Cannot write {path}: No space left on device"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "after")
    assert list(tmp_path.iterdir()) == []


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").touch()
    for place in (tmp_path / "folder", tmp_path / "plain" / "file", tmp_path / ("x" * 300)):
        with pytest.raises(OutputError, match="Cannot write"):
            write_whole(place, "text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "plain"]


def test_our_own_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^as it was$"), writing(tmp_path):
        raise OutputError("as it was")
