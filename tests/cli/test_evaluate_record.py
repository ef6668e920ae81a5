"""`evaluate --record`: the score of the pruned model and of the dense one in record and card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from folders import rows_file
from shearling.checkpoint.load import read_record
from shearling.cli import run as command
from shearling.workflows.source import Source, evaluate_source, known_dense, record_evaluation

SCORE = {"task": "sst2", "metric": "accuracy", "value": 81.25, "examples": 872}


@pytest.fixture
def mine(dense: Path, pruned: Path, tmp_path: Path) -> Path:
    """A checkpoint to write into, its dense model beside it."""
    shutil.copytree(dense, tmp_path / "dense")
    return shutil.copytree(pruned, tmp_path / "mine")


def source(folder: Path) -> Source:
    return Source(str(folder), str(rows_file(folder.parent / "rows.jsonl")), device="cpu")


def test_the_dense_model_is_scored_where_it_is_at_hand(mine: Path) -> None:
    result = record_evaluation(source(mine), limit=7)
    dense = evaluate_source(source(mine.parent / "dense"), limit=7)
    assert result.dense == dense.value
    assert read_record(mine)["evaluations"] == [result.to_json()]
    assert f"| {dense.value:.2f} | **{result.value:.2f}** |" in (mine / "README.md").read_text()
    assert f"dense {dense.value:.2f}" in str(result)


def test_what_the_record_knows_is_not_scored_again(mine: Path) -> None:
    found = evaluate_source(source(mine))
    record = json.loads((mine / "shearling.json").read_text())
    drop = {"metric": found.metric, "examples": found.examples, "value": found.value, "dense": 99.5}
    (mine / "shearling.json").write_text(json.dumps(record | {"max_drop": drop}))
    seen: list[str] = []
    result = record_evaluation(source(mine), watcher=lambda stage, done, total: seen.append(stage))
    assert result.dense == 99.5
    assert seen == ["evaluate"]  # one model, one batch
    shutil.rmtree(mine.parent / "dense")
    assert record_evaluation(source(mine)).dense == 99.5


def test_a_dense_model_that_cannot_be_scored_is_no_reason_to_fail(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mine.parent / "dense" / "model.safetensors").unlink()
    result = record_evaluation(source(mine))
    assert result.dense is None
    assert "could not be scored" in caplog.text
    assert read_record(mine)["evaluations"] == [result.to_json()]
    assert "not measured" in (mine / "README.md").read_text()


@pytest.mark.parametrize(
    ("record", "dense"),
    [
        ({"max_drop": SCORE | {"dense": 90.0}}, 90.0),
        ({"evaluations": [SCORE | {"dense": 91}]}, 91.0),
        ({"evaluations": [SCORE]}, None),
        ({"evaluations": [SCORE | {"dense": 91.0, "task": "cola"}]}, None),
        ({"max_drop": SCORE | {"dense": 90.0, "value": 80.0}}, None),  # so it was on other rows
        ({"max_drop": SCORE | {"dense": 90.0, "examples": 100}}, None),
        ({"max_drop": SCORE | {"dense": "?"}}, None),
        ({"max_drop": 3}, None),
        ({}, None),
    ],
)
def test_only_a_score_on_the_same_rows_is_taken(record: dict[str, Any], dense: float | None) -> None:
    assert known_dense(record, SCORE) == dense


def test_quiet_is_without_words(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(dense), "--data", str(rows_file(tmp_path / "rows.jsonl")), "--device", "cpu"]
    assert command([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert command([*arguments, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra"].keys() == {"f1", "matthews"}
