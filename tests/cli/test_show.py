from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from folders import rows_file
from shearling.checkpoint.load import read_record
from shearling.cli import run as command
from shearling.cli.pictures import show_record

SCORE = {"task": "sst2", "metric": "accuracy", "value": 91.25, "examples": 872, "dense": 92.5}


def test_plain_text_in_a_pipe(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(pruned)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "pruned by surgeon to flops 0.5" in out
    assert "heads ░░░░" in out  # nothing left of the attention of layer 0
    assert "pruned from         ../dense" in out
    assert "20 examples" not in out
    assert "16 examples" in out


def test_colours_in_a_terminal(pruned: Path) -> None:
    file = io.StringIO()
    record = read_record(pruned) | {"evaluations": [SCORE], "warnings": ["mind [the] gap"]}
    record["latency"] = {"predicted": 0.5, "measured": 0.52, "device": "a CPU"}
    show_record(record, Console(file=file, force_terminal=True, width=120, color_system="standard"))
    out = file.getvalue()
    assert "\x1b[" in out
    assert "█" in out
    assert "92.50 -> 91.25 on 872 examples" in out
    assert "mind [the] gap" in out
    assert "1.92x faster" in out


def test_json_is_the_record(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(pruned), "--json"]) == 0
    record = read_record(pruned)
    record.pop("kept")
    assert json.loads(capsys.readouterr().out) == record


def test_a_page(pruned: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    assert command(["show", str(pruned), "--html", str(page)]) == 0
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
    assert f"{said['value']:.2f} on 10 examples" in capsys.readouterr().out


def test_scores_are_only_recorded_in_checkpoints(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows_file(tmp_path / "rows.jsonl")
    assert command(["evaluate", str(dense), "--data", str(data), "--record", "--quiet"]) == 2
    assert "no shearling.json" in capsys.readouterr().err
