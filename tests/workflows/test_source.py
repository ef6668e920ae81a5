"""What a job does before any model is run; the commands' own tests run the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from folders import TEXTS, rows_file
from shearling.cli import run
from shearling.data import find_task
from shearling.evaluation.exam import _place
from shearling.workflows.source import SCORED_TOKENS, Source
from tiny import model_of


@pytest.mark.parametrize(("task", "max_length"), [("squad_v2", None), ("sst2", None), ("sst2", 512)])
def test_a_batch_to_score_fits_at_its_longest(
    monkeypatch: pytest.MonkeyPatch, task: str, max_length: int | None
) -> None:
    monkeypatch.setattr(Source, "examples_per_batch", 10_000)  # as a GPU would like them
    chosen = find_task(task)
    longest = max_length or chosen.max_length
    size = Source("model", max_length=max_length).scored_per_batch(chosen)
    assert size * longest <= SCORED_TOKENS < (size + 1) * longest
    assert Source("model", batch_size=7).scored_per_batch(chosen) == 7


def test_a_model_is_scored_where_it_is_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, cpu = model_of("bert"), torch.device("cpu")
    assert _place(model, None, cpu) == cpu
    assert _place(model, "cpu", cpu) == cpu
    assert _place(model, "auto", cpu).type == "cuda"


ODD = "".join(json.dumps({"text": text, "label": f"genre {n}"}) + "\n" for n, text in enumerate(TEXTS * 2))


@pytest.mark.parametrize("command", ["prune", "sweep"])
@pytest.mark.parametrize("task", [(), ("--task", "classification")])
def test_labels_that_no_method_uses_are_not_looked_at(
    dense: Path, tmp_path: Path, task: tuple[str, ...], command: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(ODD)
    scored = ("--eval", str(rows_file(tmp_path / "dev.jsonl"))) if command == "sweep" else ()
    options = ["--data", str(tmp_path / "rows.jsonl"), *task, *scored, "--flops", "0.5", "--device", "cpu", "--quiet"]
    assert run([command, str(dense), *options, "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("options", [("--labels",), ("--method", "paper")])
def test_labels_that_are_used_must_fit(
    dense: Path, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(ODD)
    command = ["prune", str(dense), "--data", str(tmp_path / "rows.jsonl"), "--flops", "0.5", "--device", "cpu"]
    assert run([*command, *options, "--out", str(tmp_path / "out")]) == 2
    assert "genre 0" in capsys.readouterr().err


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights takes long: whatever can be known before is said before."""
    import transformers

    def read(*args: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", read)


EARLY = {
    "prune": ["--data", "{data}", "--flops", "0.5", "--out", "{out}"],
    "sweep": ["--data", "{data}", "--eval", "{data}", "--out", "{out}"],
    "evaluate": ["--data", "{data}"],
    "retrain": ["--data", "{data}", "--out", "{out}"],
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", EARLY)
def test_a_missing_file_is_found_before_the_weights_are_read(
    command: str, dense: Path, pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pruned if command == "retrain" else dense
    options = [word.format(data=tmp_path / "none.jsonl", out=tmp_path / "out") for word in EARLY[command]]
    assert run([command, str(model), *options, "--device", "cpu"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_weights")
def test_a_missing_eval_file_is_found_before_the_weights_are_read(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(rows_file(tmp_path / "rows.jsonl")), "--eval", str(tmp_path / "none.jsonl")]
    for command in (["prune", str(dense), *data, "--max-drop", "1"], ["sweep", str(dense), *data]):
        assert run([*command, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        assert "there is no file" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["prune", "sweep", "profile"])
def test_an_unsupported_family_is_found_before_the_weights_are_read(
    command: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    data = ["--data", str(rows_file(tmp_path / "rows.jsonl"))] if command != "profile" else []
    data += ["--flops", "0.5"] if command == "prune" else []
    assert run([command, str(folder), *data, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "'mamba'" in capsys.readouterr().err
