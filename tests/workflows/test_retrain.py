from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shearling
from bench import write_model, write_rows
from shearling.checkpoint.load import read_record
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.checkpoint.record import add_entry, add_evaluation
from shearling.cli import run
from shearling.errors import CheckpointError, InputError, ModelError, OutputError
from shearling.methods import Surgeon
from shearling.report.facts import facts_of
from shearling.report.text import words
from shearling.target import Target
from shearling.workflows.pruning import prune_source
from shearling.workflows.retrain import retrain_source, write_retrained
from shearling.workflows.source import Source
from shearling.workflows.training import Recipe, check_alone, distillation_loss

RECIPE = Recipe(epochs=3, lr=2e-3, batch_size=16)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("retrain")
    write_model(root / "model")
    write_rows(root / "train.jsonl", 160)
    write_rows(root / "dev.jsonl", 60, seed=1)
    source = Source(str(root / "model"), str(root / "train.jsonl"), "sst2", samples=64, device="cpu")
    prune_source(source, Target(flops=0.4), Surgeon(), out=root / "pruned")
    return root


def train(place: Path, out: Path, recipe: Recipe = RECIPE, **options: Any) -> dict[str, Any]:
    source = Source(str(place / "pruned"), str(place / "train.jsonl"), "sst2", device="cpu")
    return retrain_source(source, recipe, out, **options)


def test_it_learns_and_is_again_a_checkpoint(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    facts = train(place, out, evaluation=str(place / "dev.jsonl"))["retrained"]
    assert facts["after"]["value"] >= facts["before"]["value"] + 5
    assert facts["steps"] == 30
    record = json.loads((out / "shearling.json").read_text())
    before = json.loads((place / "pruned" / "shearling.json").read_text())
    assert record["retrained"] == facts
    assert record["evaluations"] == [facts["after"]]
    assert f"**{facts['after']['value']:.2f}**" in (out / "README.md").read_text()
    assert record["layers"] == before["layers"]
    assert record["kept"] == before["kept"]
    assert (out / record["base"]).resolve() == (place / "model").resolve()
    assert not list(tmp_path.glob(".out.*"))  # no trace of the training is left

    from transformers import AutoModelForSequenceClassification

    ids = torch.arange(5, 15)[None]
    ours = shearling.load(out).eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
    alone = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = [model(ids).logits for model in (ours, theirs, alone)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    with pytest.raises(OutputError, match="not empty"):
        train(place, out)


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_weights(place: Path, tmp_path: Path) -> None:
    train(place, tmp_path / "whole")

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "retrain" and done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path / "parts", watcher=stop)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(OutputError, match="other settings"):
        train(place, tmp_path / "parts", Recipe(epochs=3, lr=1e-3, batch_size=16))
    (tmp_path / ".parts.retrain" / "checkpoint-15" / "optimizer.pt").unlink()  # torn: the one before is taken
    facts = train(place, tmp_path / "parts")["retrained"]
    assert facts["resumed_from"] == 12
    whole, parts = (shearling.load(tmp_path / name).state_dict() for name in ("whole", "parts"))
    for name, tensor in whole.items():
        assert torch.allclose(tensor, parts[name], atol=1e-6), name


def test_a_teacher_is_learned_from(place: Path, tmp_path: Path) -> None:
    """With all the weight on a teacher of firm opinions, its answers are learned, whatever the labels say."""
    write_model(tmp_path / "teacher")
    dense = load_model(str(tmp_path / "teacher"), device="cpu")
    with torch.no_grad():
        dense.classifier.bias.copy_(torch.tensor([2.0, -2.0]))
    dense.save_pretrained(tmp_path / "teacher")
    train(place, tmp_path / "out", replace(RECIPE, alpha=1.0, lr=5e-3), teacher=str(tmp_path / "teacher"))
    before, after = (load_model(str(folder), device="cpu") for folder in (place / "pruned", tmp_path / "out"))
    texts = [json.loads(line)["sentence"] for line in (place / "train.jsonl").read_text().splitlines()]
    batch = load_tokenizer(str(place / "model"))(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted, old, new = (F.log_softmax(model(**batch).logits, -1) for model in (dense, before, after))
    far, near = (F.kl_div(answers, wanted, log_target=True, reduction="batchmean") for answers in (old, new))
    assert near < far / 4


def test_half_precision_comes_back_in_half_precision(place: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    source = Source(
        str(tmp_path / "model"), str(place / "train.jsonl"), "sst2", samples=64, device="cpu", dtype="bfloat16"
    )
    prune_source(source, Target(flops=0.6), Surgeon(), out=tmp_path / "pruned")
    again = Source(str(tmp_path / "pruned"), str(place / "train.jsonl"), "sst2", device="cpu")
    retrain_source(again, Recipe(epochs=1, batch_size=32), tmp_path / "out")
    assert shearling.load(tmp_path / "out").dtype == torch.bfloat16


def test_several_gpus_are_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `Trainer` sees two, it would wrap the model and take batches twice as large."""
    from functools import cached_property

    from transformers import TrainingArguments

    found = vars(TrainingArguments)["_setup_devices"].func

    def two(arguments: Any) -> torch.device:
        device: torch.device = found(arguments)
        arguments._n_gpu = 2
        return device

    devices: Any = cached_property(two)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", devices)
    facts = train(place, tmp_path / "out", replace(RECIPE, epochs=1), teacher=str(place / "model"))["retrained"]
    assert facts["steps"] == 160 / facts["batch_size"]


def test_several_processes_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="a launcher started 2 of them"):
        train(place, tmp_path / "out")
    with pytest.raises(InputError, match="without torchrun"):
        check_alone()
    monkeypatch.setenv("RANK", "0")
    assert run(["retrain", str(place / "pruned"), "--out", str(tmp_path / "out")]) == 2
    assert "one process" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_record_and_card_say_what_was_done(place: Path, tmp_path: Path) -> None:
    score = {"task": "sst2", "metric": "accuracy", "value": 70.0, "examples": 60, "rows": "abc"}
    folder = Path(shutil.copytree(place / "pruned", tmp_path / "pruned"))
    add_evaluation(folder, score | {"value": 70.001, "dense": 90.0})
    entry = {"out": "onnx/model.onnx", "format": "onnx", "precision": "float32", "runtime": "ONNX Runtime"}
    before = add_entry(folder, "exports", entry | {"bytes": 15, "agreement": 1.0}, key="out")
    (folder / "onnx").mkdir()
    for name in ("onnx/model.onnx", "model.gguf", "model.pt2"):
        (folder / name).write_bytes(b"the old weights")
    facts = {"epochs": 3.0, "examples": 1600, "task": "sst2", "teacher": None, "before": score}
    facts["after"] = score | {"value": 80.0}
    write_retrained(load_model(str(folder), device="cpu"), folder, tmp_path / "out", before, facts, force=False)
    record, card = read_record(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text()
    assert record["evaluations"] == [score | {"value": 80.0, "dense": 90.0}]
    assert not {"max_drop", "exports"} & record.keys()  # they were about other weights
    assert not any((tmp_path / "out" / name).exists() for name in ("onnx", "model.gguf", "model.pt2"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "| accuracy, sst2 | 90.00 | **80.00** | -10.00 | 60 examples" in card
    assert "- retraining: 3 epochs over 1,600 examples of sst2; accuracy 70.00 -> 80.00" in card
    assert "and then retrained" in card
    for wrong in ("without retraining", "label-free", "not measured"):
        assert wrong not in card
    said = words(facts_of(record))
    assert "pruned to 40% of its FLOPs and retrained" in said
    assert "accuracy 70.00 -> 80.00" in said


def test_an_unscored_retraining_keeps_no_score(place: Path, tmp_path: Path) -> None:
    old = {"task": "sst2", "metric": "accuracy", "value": 70.0, "examples": 60}
    before = read_record(place / "pruned") | {"evaluations": [old]}
    facts = {"epochs": 0.5, "examples": 20, "task": "sst2", "teacher": "dense", "before": None, "after": None}
    model = load_model(str(place / "pruned"), device="cpu")
    write_retrained(model, place / "pruned", tmp_path / "out", before, facts, force=False)
    assert "evaluations" not in read_record(tmp_path / "out")
    assert "0.5 epochs over 20 examples of sst2, with a teacher" in words(facts_of(read_record(tmp_path / "out")))


def outputs(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return tensors


def test_the_distillation_loss_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    expected = 4 * (p * (p / q).log()).sum(-1).mean()
    found = distillation_loss(outputs(logits=student), outputs(logits=teacher), {}, 2.0)
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert distillation_loss(outputs(logits=teacher), outputs(logits=teacher), {}, 2.0) == pytest.approx(0, abs=1e-6)


def test_the_distillation_loss_of_numbers_spans_and_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 5, 3, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 4)
    garbage = teacher.clone()
    garbage[:, 3:] = 1e3
    loss = [
        distillation_loss(outputs(logits=student), outputs(logits=t), {"attention_mask": mask}, 2.0)
        for t in (teacher, garbage)
    ]
    assert loss[0] == loss[1]  # padding teaches nothing
    decoded = {"attention_mask": torch.ones(4, 9), "decoder_attention_mask": mask}
    assert distillation_loss(outputs(logits=student), outputs(logits=garbage), decoded, 2.0) == loss[0]
    numbers = distillation_loss(outputs(logits=student[:, :1, 0]), outputs(logits=teacher[:, :1, 0]), {}, 2.0)
    assert numbers == pytest.approx(float(F.mse_loss(student[:, :1, 0], teacher[:, :1, 0])))
    spans = [outputs(start_logits=t[:, :, 0], end_logits=t[:, :, 1]) for t in (student, teacher)]
    halves = [
        distillation_loss(outputs(logits=student[:, :, i]), outputs(logits=teacher[:, :, i]), {}, 2.0) for i in (0, 1)
    ]
    assert distillation_loss(*spans, {}, 2.0) == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


def test_what_cannot_be_retrained(place: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model that shearling wrote"):
        retrain_source(Source(str(place / "model"), device="cpu"), RECIPE, tmp_path / "out")
    write_model(tmp_path / "other", labels=3)
    with pytest.raises(ModelError, match="num_labels 3"):
        train(place, tmp_path / "out", teacher=str(tmp_path / "other"))
    for name, value in (("epochs", 0), ("lr", 5.0), ("alpha", 2.0), ("epochs", float("nan"))):
        with pytest.raises(InputError):
            Recipe(**{name: value})
    assert not (tmp_path / "out").exists()


def test_without_accelerate_it_says_so(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(InputError, match="pip install shearling"):
        train(place, tmp_path / "out")


def test_the_command_prints_one_object(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run([
        "retrain", str(place / "pruned"), "--data", str(place / "train.jsonl"), "--task", "sst2", "--epochs", "0.5",
        "--eval", str(place / "dev.jsonl"), "--out", str(tmp_path / "out"), "--device", "cpu", "--json", "--quiet",
    ])  # fmt: skip
    told = SimpleNamespace(**json.loads(capsys.readouterr().out))
    assert code == 0
    assert told.retrained["before"]["metric"] == "accuracy"
    assert told.out == str(tmp_path / "out")


def test_a_wrong_task_leaves_no_trace(place: Path, tmp_path: Path) -> None:
    wrong = Source(str(place / "pruned"), str(place / "train.jsonl"), "mrpc", device="cpu")
    with pytest.raises(InputError):
        retrain_source(wrong, RECIPE, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    short = replace(RECIPE, epochs=1)
    assert train(place, tmp_path / "out", short)["retrained"]["steps"] == 10


def test_a_retraining_killed_before_its_first_checkpoint_is_forgotten(place: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.retrain"
    work.mkdir()
    (work / "settings.json").write_text("of another one")
    assert train(place, tmp_path / "out", replace(RECIPE, epochs=1))["retrained"]["steps"] == 10
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_before_the_first_checkpoint_leaves_no_trace(place: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path / "out", watcher=stop)
    assert list(tmp_path.iterdir()) == []
