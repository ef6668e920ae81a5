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
from shearling.workflows.evaluate import evaluate_source, known_dense, record_evaluation
from shearling.workflows.source import Source

SCORE = {"task": "sst2", "metric": "accuracy", "value": 81.25, "examples": 872, "rows": "abc"}


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
    entry = found.to_json() | {"dense": 99.5}
    (mine / "shearling.json").write_text(json.dumps(record | {"evaluations": [entry]}))
    seen: list[str] = []
    result = record_evaluation(source(mine), watcher=lambda stage, done, total: seen.append(stage))
    assert result.dense == 99.5
    assert seen == ["load", "load", "read", "read", "evaluate", "evaluate"]  # one model, one batch
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
        ({"evaluations": [SCORE | {"dense": 91}]}, 91.0),
        ({"evaluations": [SCORE]}, None),
        ({"evaluations": [SCORE | {"dense": 91.0, "task": "cola"}]}, None),
        ({"evaluations": [SCORE | {"dense": 91.0, "value": 80.0}]}, None),  # scored in another way
        ({"evaluations": [SCORE | {"dense": 91.0, "examples": 100}]}, None),
        ({"evaluations": [SCORE | {"dense": 91.0, "rows": "xyz"}]}, None),  # as many other rows, with the same score
        ({"evaluations": [{k: v for k, v in SCORE.items() if k != "rows"} | {"dense": 91.0}]}, None),  # of an older one
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


def test_rows_of_another_file_are_scored_anew(mine: Path) -> None:
    """As many rows, and the same score of the pruned model: only what stands in them tells the files apart."""
    first = record_evaluation(source(mine))
    record = json.loads((mine / "shearling.json").read_text())
    record["evaluations"][0]["dense"] = 99.5
    (mine / "shearling.json").write_text(json.dumps(record))
    other = mine.parent / "other.jsonl"
    other.write_text((mine.parent / "rows.jsonl").read_text().replace("film", "city"))
    again = record_evaluation(Source(str(mine), str(other), device="cpu"))
    assert again.examples == first.examples
    assert again.rows != first.rows
    assert again.dense != 99.5
