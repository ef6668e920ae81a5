"""`shearling prune`, as a user runs it: a folder in, a smaller folder out, one JSON object, honest exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shearling
from data.tiny import bert_config, bert_tokenizer, build
from shearling.cli import run

SENTENCES = [
    "the film was good",
    "the film was bad",
    "anna lives in paris",
    "not a good city",
    "who is walking in the river ?",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with its tokenizer."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model") / "dense"
    build(transformers.BertForSequenceClassification, bert_config()).save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"sentence": f"{SENTENCES[i % 5]} {i % 10}", "label": i % 2} for i in range(80)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prune(model: Path, data: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `shearling prune` with options; gives (exit code, stdout, stderr)."""

    def call(*options: object, task: str = "sst2", model: Path = model, data: Path = data) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["prune", str(model), "--data", str(data), "--task", task, *map(str, options)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_prune_show_and_evaluate(
    prune: Any, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    target = tmp_path / "small"
    code, out, err = prune("--flops", 0.5, "--method", method, "--out", target, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert out.count("\n") == 1
    assert record["method"] == method
    assert record["constraint"] == {"flops": 0.5}
    for name in ("flops", "params", "flops_model", "params_model"):
        assert set(record[name]) == {"dense", "pruned", "ratio"}
    assert record["flops"]["ratio"] <= 0.5 + 1e-9
    assert all(set(layer) == {"heads", "filters"} for layer in record["layers"])
    assert record["seconds"]["total"] > 0
    assert record["out"] == str(target)
    assert record["sample"]["examples"] == 80

    assert run(["show", str(target), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    for name in ("method", "constraint", "flops", "params", "layers", "seconds"):
        assert shown[name] == record[name]

    assert run(["evaluate", str(target), "--data", str(data), "--task", "sst2", "--json"]) == 0
    score = json.loads(capfd.readouterr().out)
    assert {"task", "metric", "value", "examples"} <= score.keys()
    assert score["examples"] == 80
    assert 0 <= score["value"] <= 100

    loaded = shearling.load(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert loaded(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits.shape == (5, 2)


def test_the_result_goes_to_stdout_and_remarks_to_stderr(prune: Any, tmp_path: Path) -> None:
    code, out, err = prune("--flops", 0.6, "--out", tmp_path / "small")
    assert code == 0
    assert "FLOPs, layers" in out
    assert "agreement with dense" in out
    assert "FLOPs" not in err
    assert "written to" in err
    code, out, err = prune("--flops", 0.6, "--out", tmp_path / "quiet", "--quiet")
    assert (code, out, err.strip()) == (0, "", "")


def test_a_process_keeps_stdout_pure(model: Path, data: Path, tmp_path: Path) -> None:
    """In a process of its own, warnings of every library included."""
    command = [sys.executable, "-m", "shearling", "prune", str(model), "--data", str(data), "--task", "sst2"]
    options = ["--flops", "0.5", "--params", "0.5", "--out", str(tmp_path / "small"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(shearling.__file__).parents[1])}
    result = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["constraint"] == {"flops": 0.5, "params": 0.5}


def test_a_dry_run_writes_nothing(prune: Any, tmp_path: Path) -> None:
    code, out, _ = prune("--flops", 0.5, "--out", tmp_path / "a" / "small", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["out"] is None
    assert json.loads(out)["flops"]["ratio"] <= 0.5 + 1e-9
    code, _, err = prune("--flops", 0.5, "--dry-run")
    assert code == 0
    assert "not written" in err
    assert list(tmp_path.iterdir()) == []


def test_the_seed_and_the_options_arrive(prune: Any, tmp_path: Path) -> None:
    options = ("--flops", 0.5, "--dry-run", "--json", "--method", "paper", "--importance", "random", "--no-rearrange")
    runs = [json.loads(prune(*options, "--no-tune", "--seed", seed, "--samples", 40)[1]) for seed in (1, 1, 2)]
    assert runs[0]["settings"]["importance"] == "random"
    assert runs[0]["settings"]["tune"] is False
    assert runs[0]["sample"]["examples"] == 40
    assert runs[0]["sample"] == runs[1]["sample"] != runs[2]["sample"]
    assert runs[0]["layers"] == runs[1]["layers"]
    stock = json.loads(prune("--flops", 0.6, "--dry-run", "--json", "--shape", "stock")[1])
    assert stock["shape"] == "stock"
    assert {dial["kind"] for dial in stock["stock"]["dials"]} == {"heads", "filters"}
    seconds = json.loads(prune("--flops", 0.5, "--dry-run", "--json", "--no-refit")[1])["seconds"]
    assert "refit" not in seconds
    layers = json.loads(prune("--flops", 0.5, "--dry-run", "--json", "--multiple-of", 8)[1])["layers"]
    assert all(layer["filters"] % 8 == 0 for layer in layers)


def test_what_exists_is_replaced_only_with_force(prune: Any, tmp_path: Path) -> None:
    target = tmp_path / "small"
    target.mkdir()
    (target / "mine").write_text("mine")
    code, out, err = prune("--flops", 0.5, "--out", target, "--json")
    assert (code, out) == (2, "")
    assert "not empty" in err
    assert [p.name for p in target.iterdir()] == ["mine"]
    code, out, err = prune("--flops", 0.5, "--out", target, "--force")
    assert code == 2
    assert "did not write it" in err.replace("\n", " ")
    assert [p.name for p in target.iterdir()] == ["mine"]
    mine = tmp_path / "checkpoint"
    assert prune("--flops", 0.5, "--out", mine)[0] == 0
    (mine / "extra").write_text("extra")
    assert prune("--flops", 0.5, "--out", mine, "--force")[0] == 0
    assert not (mine / "extra").exists()


WRONG_USE: dict[str, tuple[list[object], str]] = {
    "no constraint": ([], "Give a constraint"),
    "nothing": (["--flops", 0], "outside (0, 1]"),
    "more than all": (["--flops", 1.5], "outside (0, 1]"),
    "not a number": (["--flops", "half"], "--flops"),
    "too little": (["--flops", 1e-9], "not a single unit"),
    "no such method": (["--flops", 0.5, "--method", "magic"], "No method 'magic'"),
    "an option of the other method": (["--flops", 0.5, "--no-tune"], "option of method paper"),
    "no such importance": (["--flops", 0.5, "--method", "paper", "--importance", "size"], "not known"),
    "no such dtype": (["--flops", 0.5, "--dtype", "int3"], "No dtype 'int3'"),
    "no such device": (["--flops", 0.5, "--device", "abacus"], "abacus"),
    "no such option": (["--flop", 0.5], "flop"),
    "no such column": (["--flops", 0.5, "--text-columns", "words"], "words"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_is_two_and_one_message(prune: Any, tmp_path: Path, case: str) -> None:
    options, message = WRONG_USE[case]
    code, out, err = prune(*options, "--out", tmp_path / "sub" / "small", "--json")
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing written


def test_no_place_to_write_is_wrong_use(prune: Any) -> None:
    code, _, err = prune("--flops", 0.5)
    assert code == 2
    assert "--out" in err


def test_bad_models_and_data(prune: Any, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "small"

    def refused(message: str, **changes: Any) -> None:
        code, out, err = prune("--flops", 0.5, "--out", target, "--json", **changes)
        assert (code, out) == (2, ""), err
        assert message in err
        assert "Traceback" not in err

    empty = tmp_path / "empty"
    empty.mkdir()
    refused("has no config.json", model=empty)
    refused("needs the network", model=Path("nobody/nothing"))
    bare = tmp_path / "bare"
    transformers.BertModel.from_pretrained(model).save_pretrained(bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    bert_tokenizer().save_pretrained(bare)
    refused("never trained", model=bare)
    refused("gone.jsonl", data=tmp_path / "gone.jsonl")
    (tmp_path / "none.jsonl").write_text("")
    refused("none.jsonl", data=tmp_path / "none.jsonl")
    assert not target.parent.exists()


def test_labels_out_of_range_are_told_when_they_are_used(prune: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"sentence": s, "label": 7}) + "\n" for s in SENTENCES))
    code, _, err = prune("--flops", 0.5, "--dry-run", "--method", "paper", data=path)
    assert code == 2
    assert "7" in err


def test_a_pruned_model_may_be_pruned_again(prune: Any, tmp_path: Path) -> None:
    assert prune("--flops", 0.7, "--out", tmp_path / "once")[0] == 0
    code, out, err = prune("--flops", 0.6, "--out", tmp_path / "twice", "--json", model=tmp_path / "once")
    assert code == 0, err
    assert json.loads(out)["flops"]["ratio"] <= 0.6 + 1e-9
    assert shearling.load(tmp_path / "twice") is not None


def test_interruptions_and_surprises(prune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, expected in (
        (KeyboardInterrupt(), 130),
        (RuntimeError("surprise"), 1),
        (shearling.CheckFailed("bad"), 1),
    ):

        def fail(*args: object, error: BaseException = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("shearling.pipeline.Plan.meet", fail)
        code, out, err = prune("--flops", 0.5, "--out", tmp_path / "small", "--json")
        assert (code, out) == (expected, "")
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_says_so(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from folders import rows_file

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shearling.workflows.pruning.measure", interrupted)
    command = ["prune", str(dense), "--data", str(rows_file(tmp_path / "rows.jsonl")), "--flops", "0.5"]
    assert run([*command, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 130
    assert "interrupted; nothing was left half-written" in capsys.readouterr().err
