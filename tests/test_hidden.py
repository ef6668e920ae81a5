from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shearling import hidden
from shearling.files import whole_directory
from shearling.hidden import clear_hidden, hidden_beside, put_in_place


def of_a_dead_process(path: Path) -> Path:
    """The same folder, as a process that is no more would have named it."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    renamed = path.with_name(path.name.replace(f"-{os.getpid()}.", f"-{ended.pid}."))
    return path.rename(renamed)


def test_what_a_killed_process_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "out"
    left = of_a_dead_process(hidden_beside(target, ".part"))
    (left / "half").write_text("half")
    working = hidden_beside(target, ".part")  # of a process that is still there: this one
    other = tmp_path / ".out.notes"
    other.mkdir()
    with whole_directory(target) as folder:
        (folder / "file").write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["out", working.name, other.name])


def test_what_was_set_aside_when_the_kill_came_goes_back(tmp_path: Path) -> None:
    target = tmp_path / "out"
    aside = of_a_dead_process(hidden_beside(target, ".old"))
    (aside / "old").mkdir()
    (aside / "old" / "file").write_text("whole")
    clear_hidden(target)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "file").read_text() == "whole"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_new_takes_the_place_of_the_old(tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:  # as on a system without the call
        monkeypatch.setattr(hidden, "_exchanged", lambda folder, target: False)
    target = tmp_path / "out"
    for content in ("first", "second"):
        folder = hidden_beside(target, ".part")
        (folder / content).write_text(content)
        put_in_place(folder, target)
        assert [p.name for p in target.iterdir()] == [content]
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
