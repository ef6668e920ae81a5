from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from folders import rows_file
from shearling.checkpoint.load import read_record
from shearling.cli import run as command


def test_plain_text_in_a_pipe(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(pruned)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "dense, pruned to 50% of its FLOPs" in out
    assert "heads ░░░░" in out  # nothing left of the attention of layer 0
    assert "pruned from         ../dense" in out
    assert "20 examples" not in out
    assert "16 examples" in out


def test_json_is_the_record(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(pruned), "--json"]) == 0
    record = read_record(pruned)
    record.pop("kept")
    assert json.loads(capsys.readouterr().out) == record


def test_a_page(pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "page.html"
    assert command(["show", str(pruned), "--html", str(page)]) == 0
    assert "FLOPs, layers" in capsys.readouterr().out  # the page comes beside the report, not instead of it
    assert "dense, pruned to 50% of its FLOPs" in page.read_text()
    assert command(["show", str(pruned), "--html", str(page)]) == 2
    assert command(["show", str(pruned), "--html", str(page), "--force"]) == 0
    assert [p.name for p in page.parent.iterdir()] == ["page.html"]


def test_no_checkpoint_is_wrong_use(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(dense)]) == 2
    assert "no shearling.json" in capsys.readouterr().err
    assert command(["show", str(tmp_path / "nowhere")]) == 2


def test_evaluate_records_its_score(pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = shutil.copytree(pruned, tmp_path / "mine")
    data = rows_file(tmp_path / "rows.jsonl")
    assert command(["evaluate", str(mine), "--data", str(data), "--record", "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert read_record(mine)["evaluations"] == [said]
    assert f"**{said['value']:.2f}**" in (mine / "README.md").read_text()
    assert command(["show", str(mine)]) == 0
    assert f"{said['value']:.2f}" in capsys.readouterr().out


def test_scores_are_only_recorded_in_checkpoints(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows_file(tmp_path / "rows.jsonl")
    assert command(["evaluate", str(dense), "--data", str(data), "--record", "--quiet"]) == 2
    assert "no shearling.json" in capsys.readouterr().err
