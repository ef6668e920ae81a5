from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shearling
from folders import TEXTS
from shearling.errors import ConstraintError, DataError, InputError, OutputError
from shearling.sample.read import accepted_by, sample_of
from tiny import model_of

pytest.importorskip("accelerate", reason="Trainer needs accelerate")


class Examples(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenised sentences with a label, and a column that no model takes."""

    def __init__(self) -> None:
        from data.tiny import bert_tokenizer

        encoded = bert_tokenizer()(TEXTS * 8, padding=True)
        self.rows = [
            {"idx": i, "labels": i % 2, **{name: values[i] for name, values in encoded.items()}}
            for i in range(len(TEXTS) * 8)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from data.tiny import bert_tokenizer

    arguments = TrainingArguments(
        str(folder / "runs"), max_steps=2, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Examples(), processing_class=bert_tokenizer())


def test_one_line_prunes_at_the_end_of_training(tmp_path: Path) -> None:
    trainer = trainer_of(model_of("bert"), tmp_path)
    callback = shearling.PruneOnTrainEnd(flops=0.5, out=tmp_path / "half", samples=16)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.error is None
    assert callback.pruned is not None
    assert callback.pruned.report.flops.ratio <= 0.5
    assert trainer.model.bert.encoder.layer[0].intermediate.dense.out_features == 48  # the trained model is untouched
    loaded = shearling.load(tmp_path / "half")
    inputs = {name: torch.tensor([Examples()[0][name]]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ours, theirs = loaded(**inputs).logits, callback.pruned.model.eval()(**inputs).logits
    torch.testing.assert_close(ours, theirs)
    assert (tmp_path / "half" / "tokenizer.json").is_file()


def test_the_sample_is_the_same_whatever_the_training_order(tmp_path: Path) -> None:
    prints = set()
    for seed in (1, 2):
        trainer = trainer_of(model_of("bert"), tmp_path, seed=seed)
        callback = shearling.PruneOnTrainEnd(flops=0.5, out=tmp_path / str(seed), samples=16)
        trainer.add_callback(callback)
        trainer.train()
        assert callback.pruned is not None
        prints.add(callback.pruned.report.fingerprint)
    assert len(prints) == 1


def test_a_trainers_own_batches_will_do(tmp_path: Path) -> None:
    trainer = trainer_of(model_of("bert"), tmp_path, remove_unused_columns=False)
    assert "idx" in next(iter(trainer.get_train_dataloader()))
    pruned = shearling.prune(trainer.model, trainer.get_train_dataloader(), flops=0.5, samples=16)
    assert pruned.report.flops.ratio <= 0.5


def test_wrong_use_fails_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError, match="Give a constraint"):
        shearling.PruneOnTrainEnd(out=tmp_path / "x")
    with pytest.raises(InputError, match="has no option flop;"):
        shearling.PruneOnTrainEnd(flop=0.5, out=tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    trainer = trainer_of(model_of("bert"), tmp_path)
    trainer.add_callback(shearling.PruneOnTrainEnd(flops=0.5, out=tmp_path / "full"))
    with pytest.raises(OutputError, match="not empty"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_failure_after_the_training_does_not_lose_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(model_of("bert"), tmp_path)
    callback = shearling.PruneOnTrainEnd(flops=1e-6, out=tmp_path / "none", samples=16)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 2
    assert isinstance(callback.error, ConstraintError)
    assert "trained, but not pruned" in caplog.text
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("error", [KeyError("logits"), RuntimeError("CUDA error"), IndexError("return_loss")])
def test_no_error_of_any_kind_loses_the_training(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise error

    trainer = trainer_of(model_of("bert"), tmp_path)
    callback = shearling.PruneOnTrainEnd(out=tmp_path / "none", flops=0.5)
    trainer.add_callback(callback)
    monkeypatch.setattr("shearling.integrations.trainer.measure", broken)
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.error is error
    assert callback.pruned is None
    assert f"trained, but not pruned: {type(error).__name__}" in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_every_process_saves(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving waits for all processes, of which one writes: a process that stays away would leave the others hanging."""
    saved: list[Path] = []
    monkeypatch.setattr(shearling.Pruned, "save", lambda pruned, out, **options: saved.append(out))
    trainer = trainer_of(model_of("bert"), tmp_path)
    callback = shearling.PruneOnTrainEnd(flops=0.5, out=tmp_path / "half", samples=16)
    state, loader = SimpleNamespace(is_world_process_zero=first), trainer.get_train_dataloader()
    callback.on_train_end(trainer.args, state, trainer.control, model=trainer.model, train_dataloader=loader)
    assert callback.error is None
    assert saved == [tmp_path / "half"]
    assert ("pruned model written" in caplog.text) == first


def test_adapters_are_merged_before_pruning(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = model_of("bert")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=2))
    trainer = trainer_of(adapted, tmp_path)
    callback = shearling.PruneOnTrainEnd(flops=0.5, out=tmp_path / "half", samples=16)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.error is None
    assert not [name for name, _ in shearling.load(tmp_path / "half").named_parameters() if "lora" in name]


def test_keys_that_the_forward_does_not_name_are_dropped() -> None:
    accepted = accepted_by(model_of("bert"))
    assert {"input_ids", "attention_mask", "token_type_ids"} <= accepted.names
    assert "kwargs" not in accepted.names
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": [0, 1], "idx": [7, 8], "text": ["a", "b"]}
    (kept,) = sample_of([batch], accepted=accepted).cut(100)
    assert kept.inputs.keys() == {"input_ids"}
    assert kept.labels.keys() == {"labels"}
    with pytest.raises(DataError, match="nothing the model can run on"):
        sample_of([{"text": ["a", "b"], "labels": [0, 1]}], accepted=accepted)
