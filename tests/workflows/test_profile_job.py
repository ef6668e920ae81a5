"""`shearling profile` and `shearling prune --latency`, as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from latency.tables import table_of
from shearling.cli import run as command
from shearling.errors import OutputError
from shearling.latency.table import load_table
from shearling.models.structure import structure_of
from shearling.report.charts import plot
from tiny import model_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of("bert").save_pretrained(folder)
    return folder


def run(*words: object) -> int:
    return command([str(word) for word in words])


def test_profile_writes_a_table_and_a_picture(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "table.json", tmp_path / "table.svg"
    words = ["profile", directory, "--batch-size", 2, "--seq-len", 8, "--device", "cpu", "--threads", 1]
    assert run(*words, "--budget", 1, "--out", out, "--plot", picture, "--json", "--quiet") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["batch_size"] == 2
    assert printed["out"] == str(out)
    assert load_table(out).whole == printed["whole"]
    assert picture.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert run(*words, "--out", out) == 2  # it is there already
    assert "--force" in capsys.readouterr().err


def test_bad_places_are_told_at_once(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("profile", directory, "--out", tmp_path / "file" / "table.json") == 2
    assert "file is a file" in capsys.readouterr().err.replace("\n", "")


@pytest.fixture
def nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test fail where it comes to the timing."""
    monkeypatch.setattr(
        "shearling.workflows.profile.profile", lambda *args, **kwargs: pytest.fail("timed before checked")
    )


@pytest.mark.usefixtures("nothing_timed")
@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_directory_is_no_file(
    option: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", directory, "--out", tmp_path / "table.json", option, tmp_path, "--force"]
    assert run(*words) == 2
    assert "is a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_timed")
def test_a_folder_that_may_not_be_written_to(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shearling.files.os.access", lambda place, mode: False)  # root may do anything
    assert run("profile", directory, "--out", tmp_path / "table.json") == 2
    assert "No permission" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_timed")
@pytest.mark.parametrize("name", ["table.doc", "table", "table.svg.part"])
def test_pictures_of_an_unknown_ending(
    name: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("profile", directory, "--out", tmp_path / "table.json", "--plot", tmp_path / name) == 2
    assert "svg, png, pdf" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.usefixtures("nothing_timed")
def test_pictures_without_matplotlib(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("profile", directory, "--out", tmp_path / "table.json", "--plot", tmp_path / "table.svg") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_prune_refuses_a_broken_table(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"sublayers": []}', encoding="utf-8")
    words = ["prune", directory, "--data", tmp_path / "none.jsonl", "--table", table, "--dry-run"]
    assert run(*words, "--latency", 0.5) == 2
    assert "shearling profile" in capsys.readouterr().err.replace("\n", " ")
    assert run(*words, "--flops", 0.5) == 2
    assert "--latency" in capsys.readouterr().err


def test_a_plot_of_both_sides(tmp_path: Path) -> None:
    table = table_of(structure_of(model_of("bert")), launch=True)
    assert plot(table, tmp_path / "t.png").stat().st_size > 5000
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    table = table_of(structure_of(model_of("bert")))
    for write in (table.save, lambda path: plot(table, path)):
        (tmp_path / "t.svg").mkdir(exist_ok=True)
        with pytest.raises(OutputError, match=r"Cannot write .*t\.svg"):
            write(tmp_path / "t.svg")
        assert [path.name for path in tmp_path.iterdir()] == ["t.svg"]
