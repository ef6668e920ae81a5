"""`shearling profile` and `shearling prune --latency`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latency.tables import table_of
from shearling.cli import run as command
from shearling.latency.plot import plot
from shearling.latency.table import load_table
from shearling.models.structure import structure_of
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
    assert run("profile", directory, "--out", tmp_path / "no" / "table.json") == 2
    assert "no folder" in capsys.readouterr().err


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
