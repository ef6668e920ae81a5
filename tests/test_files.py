"""What may be written, and that it is written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shearling.errors import OutputError
from shearling.files import check_file, check_writable, signals_held, whole_directory, whole_files, write_whole, writing


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


def thesis(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "thesis.txt").write_text("years of work")
    return folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "shearling.json").write_text("{}")
    return folder


def test_force_replaces_nothing_that_shearling_did_not_write(tmp_path: Path) -> None:
    mine = thesis(tmp_path / "mine")

    def replace() -> None:
        with whole_directory(mine, force=True) as folder:
            (folder / "new").touch()

    with pytest.raises(OutputError, match=r"mine is not empty.*shearling did not write it"):
        replace()
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_force_replaces_checkpoints_sweeps_and_the_demo(tmp_path: Path) -> None:
    ours = [checkpoint(tmp_path / "checkpoint"), tmp_path / "sweep", tmp_path / "demo"]
    ours[1].mkdir()
    for name in ("sweep.json", "results.json"):
        (ours[1] / name).touch()
    checkpoint(ours[2] / "model")
    for name in ("report.json", "report.md"):
        (ours[2] / name).touch()
    for folder in ours:
        with pytest.raises(OutputError, match="not empty"):
            check_writable(folder)
        check_writable(folder, force=True)
    thesis(ours[2])
    with pytest.raises(OutputError, match="did not write"):
        check_writable(ours[2], force=True)


@pytest.mark.parametrize("place", ["models/mine", "models", "."])
def test_the_source_and_what_holds_it_are_never_replaced(place: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "models" / "mine")
    for folder in (tmp_path, tmp_path / "models"):
        (folder / "shearling.json").touch()
    with pytest.raises(OutputError, match="is the model itself or holds it"):
        check_writable(tmp_path / place, force=True, keep=(None, "org/name", source))
    check_writable(tmp_path / "models", force=True, keep=(object(), "org/name"))  # no directory: nothing to keep


@pytest.mark.parametrize("place", ["here", "."])
@pytest.mark.parametrize("empty", [True, False])
def test_the_working_directory_is_never_replaced(
    place: str, empty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir() if empty else checkpoint(here)
    monkeypatch.chdir(here)
    with pytest.raises(OutputError, match="working directory"):
        check_writable(tmp_path / place, force=True)


def test_a_link_to_the_source_is_the_source(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(OutputError, match="is the model itself"):
        check_writable(tmp_path / "link", force=True, keep=(source,))


def test_messages_speak_to_python_and_to_the_shell(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (lambda: check_writable(checkpoint(tmp_path / "folder")), lambda: check_file(tmp_path / "file")):
        with pytest.raises(OutputError, match=r"--force, force=True") as caught:
            call()
        assert "--out" not in str(caught.value)


def test_files_that_go_together_appear_together(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model.onnx"
    with whole_files(target) as folder:
        (folder / "work").mkdir()
        (folder / "model.onnx.data").write_text("weights")
        target.parent.joinpath("other").touch()
        (folder / "model.onnx").write_text("graph")
        assert not target.exists()
    assert sorted(p.name for p in target.parent.iterdir()) == ["model.onnx", "model.onnx.data", "other"]


def test_files_that_fail_half_way_leave_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_files(tmp_path / "model.onnx") as folder:
            (folder / "model.onnx").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="No space left"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_waits_for_the_end_of_a_block_and_the_second_does_not() -> None:
    before, steps = signal.getsignal(signal.SIGINT), []

    def work(signals: int) -> None:
        with signals_held(most=1):
            for number in range(signals):
                signal.raise_signal(signal.SIGINT)
                steps.append(number)
            steps.append("done")

    with pytest.raises(KeyboardInterrupt):
        work(1)
    with pytest.raises(KeyboardInterrupt):
        work(2)
    assert steps == [0, "done", 0]
    assert signal.getsignal(signal.SIGINT) is before
