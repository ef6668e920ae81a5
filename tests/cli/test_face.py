"""The face of the command line: help in panels, old names with a warning, results on stdout, one look."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from bench import write_model, write_rows
from shearling.cli import run

PANELS = ("Model and data", "Constraint", "Output", "Method", "Advanced")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("face")
    write_model(root / "model")
    write_rows(root / "train.jsonl", 64)
    write_rows(root / "dev.jsonl", 24, seed=1)
    return root


def prune(place: Path, *more: str) -> int:
    return run(["prune", str(place / "model"), "--data", str(place / "train.jsonl"), "--device", "cpu", *more])


@pytest.mark.parametrize("name", ["prune", "sweep", "evaluate", "compare", "export", "profile"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_ends_with_three_examples(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, flag]) == 0
    out = capsys.readouterr().out
    assert out.count(f"$ shearling {name} ") == 3
    assert "Advanced" in out or name == "export"


def test_help_of_prune_is_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", "-h"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert "--length" not in out.replace("--max-length", "").replace("--flops-length", "")


def test_eval_fills_json_summary_card_and_page(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "small", tmp_path / "small.html"
    rows = str(place / "dev.jsonl")
    options = ["--flops", "0.5", "--eval", rows, "-o", str(out), "--report", str(page)]
    assert prune(place, *options, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    found = record["evaluation"]
    assert found.keys() == {"task", "metric", "dense", "pruned", "examples"}
    assert found["examples"] == 24
    assert record["agreement"].keys() == {"kind", "value", "examples"}
    assert record["agreement"]["examples"] == 8
    assert record["timing"]["dense_ms"] > 0
    changed = record["flipped"]
    assert changed["examples"] == 24
    assert changed["lost"] - changed["won"] == round((found["dense"] - found["pruned"]) * 24 / 100)
    assert f"{changed['changed']} of 24 predictions changed" in page.read_text()
    assert "--flops 0.5 --method surgeon" in page.read_text()  # the command that makes it
    assert "flipped" not in json.loads((out / "shearling.json").read_text())
    score = f"{found['pruned']:.2f}"
    assert score in (out / "README.md").read_text()
    assert score in page.read_text()
    assert run(["show", str(out)]) == 0
    assert score in capsys.readouterr().out
    assert run(["evaluate", str(out), "--data", rows, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == found["pruned"]
    assert prune(place, *options) == 2  # neither the model nor the page is replaced unasked
    assert prune(place, *options, "--force", "--no-timing") == 0
    said = capsys.readouterr()
    assert score in said.out
    assert f"report written to {page}" in " ".join(said.err.split())
    assert "ms" not in said.out.replace("ms of", "")


def test_without_eval_the_agreement_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(place, "--flops", "0.5", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "agreement with dense" in out
    assert "8 examples" in out


def test_old_names_work_with_a_warning(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(place, "--flops", "0.5", "--dry-run", "--length", "9", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["sample"]["mean_length"] == 9
    assert "--length is now called --flops-length" in " ".join(said.err.split())
    assert prune(place, "--flops", "0.5", "--dry-run", "--flops-length", "9", "--json") == 0
    assert "warning" not in capsys.readouterr().err
    assert prune(place, "--flops", "0.5", "--dry-run", "--batch-size", "4", "--json") == 0
    assert "--batch-size and --seq-len only affect a latency" in " ".join(capsys.readouterr().err.split())
    options = ["--batch-size", "1", "--seq-len", "8", "--device", "cpu", "--out", str(tmp_path / "table.json")]
    assert run(["profile", str(place / "model"), *options, "--budget", "1"]) == 0
    said = capsys.readouterr()
    assert "--budget is now called --seconds" in " ".join(said.err.split())
    assert "whole forward pass" in said.out


def test_what_torchao_says_of_its_kernels_is_not_shown() -> None:
    assert run(["architectures", "--json"]) == 0
    assert not logging.getLogger("torchao").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("given", ["0", "-3", "many", "1.5"])
def test_samples_are_auto_or_a_number(place: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(place, "--flops", "0.5", "--dry-run", "--samples", given) == 2
    assert "--samples" in capsys.readouterr().err


def test_results_go_to_stdout(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["architectures"]) == 0
    said = capsys.readouterr()
    assert "bert" in said.out
    assert said.err == ""
    options = ["--data", str(place / "dev.jsonl"), "--device", "cpu"]
    assert run(["evaluate", str(place / "model"), *options]) == 0
    said = capsys.readouterr()
    assert "accuracy" in said.out
    assert "24 examples" in said.out
    assert "accuracy" not in said.err
    assert run(["evaluate", str(place / "model"), *options, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
