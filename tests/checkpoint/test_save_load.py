"""Checkpoints: whole or not at all, loaded like any other model, refused when changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shearling
from data.tiny import VOCABULARY, bert_config, bert_tokenizer, build
from shearling.errors import CheckpointError, OutputError
from shearling.files import check_writable, whole_directory
from tiny import batches_of, inputs_of, model_of


@pytest.fixture(scope="module")
def pruned() -> shearling.Pruned:
    torch.set_num_threads(1)
    return shearling.prune(model_of("bert"), batches_of(), flops=0.4)


@pytest.fixture
def saved(pruned: shearling.Pruned, tmp_path: Path) -> Path:
    return pruned.save(tmp_path / "small")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().float()(**inputs_of(batches_of(1, seed=1)[0])).logits


def auto(folder: Path, **kwargs: Any) -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, **kwargs)


def test_a_folder_that_users_of_hugging_face_recognise(saved: Path, pruned: shearling.Pruned) -> None:
    names = {p.name for p in saved.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "shearling.json", "modeling_shearling.py"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pkl"))]
    record = json.loads((saved / "shearling.json").read_text())
    assert record["kept"] == [units.tolist() for units in pruned.kept]
    wanted = {"method", "constraint", "seed", "versions", "sample", "flops", "params", "seconds", "layers"}
    assert wanted <= record.keys()


def test_an_interrupted_save_leaves_nothing(
    pruned: shearling.Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (RuntimeError("middle"), KeyboardInterrupt()):

        def fail(*args: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("shearling.checkpoint.pruned.write_companions", fail)
        with pytest.raises(type(error)):
            pruned.save(tmp_path / "small", source=tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "shearling.json").write_text("old")

    def fill() -> None:
        with whole_directory(target, force=True) as folder:
            (folder / "new").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        fill()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "shearling.json").read_text() == "old"


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "shearling.json").write_text("old")
    rename = Path.rename

    def refusing(self: Path, to: Path) -> Path:
        if self.suffix == ".part":
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr("shearling.hidden._exchanged", lambda folder, target: False)  # the way with two renames

    def replace() -> None:
        with whole_directory(target, force=True) as folder:
            (folder / "new").write_text("new")
            monkeypatch.setattr(Path, "rename", refusing)

    with pytest.raises(OutputError, match="Input/output"):
        replace()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "shearling.json").read_text() == "old"


def test_what_is_there_is_replaced_only_with_force(pruned: shearling.Pruned, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    pruned.save(target)  # an empty folder is nobody's
    (target / "extra").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        pruned.save(target)
    assert (target / "extra").exists()
    pruned.save(target, force=True)
    assert not (target / "extra").exists()
    assert (target / "model.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_another_run_wrote_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write(force: bool = False) -> None:
        with whole_directory(target, force=force) as folder:
            (folder / "shearling.json").write_text("mine")
            with whole_directory(target, force=True) as other:
                (other / "shearling.json").write_text("theirs")

    for spare in (tmp_path / "out-2", tmp_path / "out-3"):
        with pytest.raises(OutputError, match=f"not empty.* is in {spare}"):
            write()
        assert (target / "shearling.json").read_text() == "theirs"
        assert (spare / "shearling.json").read_text() == "mine"
        (target / "shearling.json").unlink()
    write(force=True)
    assert (target / "shearling.json").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out-2", "out-3"]


def test_a_link_to_a_folder_stays_a_link(pruned: shearling.Pruned, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "real").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere" / "real")
    pruned.save(link)
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "real" / "config.json").is_file()
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith((".part", ".old"))]


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        check_writable(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="leads nowhere"):
        check_writable(tmp_path / "dangling")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        with pytest.raises(OutputError, match="No permission"):
            check_writable(closed / "a" / "b")


def test_checking_creates_nothing_and_saving_creates_parents(pruned: shearling.Pruned, tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    assert (pruned.save(tmp_path / "a" / "b" / "c") / "config.json").is_file()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(saved: Path, dtype: torch.dtype) -> None:
    loaded = shearling.load(saved, dtype=dtype)
    assert loaded.dtype == dtype
    halved = auto(saved).to(dtype)
    assert torch.equal(logits(loaded), logits(halved))
    assert auto(saved).half().dtype == torch.float16


def test_an_encoder_without_a_pooler_loads(tmp_path: Path) -> None:
    model = model_of("bert").bert
    model.pooler = None
    shearling.prune(model, batches_of(), flops=0.5).save(tmp_path / "bare")
    loaded = shearling.load(tmp_path / "bare")
    assert not loaded.pooler.dense.weight.any()


def test_saving_again_stays_loadable(saved: Path, pruned: shearling.Pruned, tmp_path: Path) -> None:
    for number, model in enumerate((pruned.model, auto(saved), shearling.load(saved))):
        again = tmp_path / f"again{number}"
        model.save_pretrained(again)
        assert torch.equal(logits(auto(again)), logits(pruned.model))


def test_one_training_step_saved_and_loaded(saved: Path, tmp_path: Path) -> None:
    model = auto(saved)
    rows = [{k: v[i] for k, v in batch.items()} for batch in batches_of(2) for i in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "runs"), max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        learning_rate=0.1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = logits(model)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    trained = logits(model)
    assert not torch.equal(trained, before)
    assert torch.equal(logits(auto(tmp_path / "trained")), trained)


def test_text_classification_pipeline_with_its_tokenizer(tmp_path: Path) -> None:
    model = build(transformers.BertForSequenceClassification, bert_config())
    tokenizer = bert_tokenizer()
    ids = torch.randint(5, len(VOCABULARY), (32, 9), generator=torch.Generator().manual_seed(0))
    small = shearling.prune(model, [{"input_ids": ids}], flops=0.5)
    small.save(tmp_path / "small", source=tokenizer)
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    small.save(tmp_path / "copied", source=tmp_path / "dense")  # tokenizer files from a folder
    text = "the film was not bad"
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = small.model(**encoded).logits.softmax(-1)[0]
    for folder in ("small", "copied"):
        pipe = transformers.pipeline("text-classification", model=str(tmp_path / folder), device="cpu")
        (found,) = pipe(text)
        assert found["score"] == pytest.approx(float(scores.max()), abs=1e-5)
        assert found["label"] == f"LABEL_{int(scores.argmax())}"


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


RECORD_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no method": lambda r: r.pop("method"),
    "layers gone": lambda r: r.update(layers="none"),
    "one layer less": lambda r: r["layers"].pop(),
    "negative heads": lambda r: r["layers"][0].update(heads=-1),
    "cost in words": lambda r: r["flops"].update(dense="much"),
    "no ratio": lambda r: r["params_model"].pop("ratio"),
    "no model type": lambda r: r.pop("model_type"),
    "odd repairs": lambda r: r.update(repairs=[1]),
    "odd seconds": lambda r: r.update(seconds={"total": "long"}),
}


@pytest.mark.parametrize("change", RECORD_CHANGES)
def test_a_changed_record_is_refused(saved: Path, change: str) -> None:
    edited(saved, "shearling.json", RECORD_CHANGES[change])
    with pytest.raises(CheckpointError, match="changed"):
        shearling.load(saved)


def test_a_record_of_other_layers_is_refused(saved: Path) -> None:
    edited(saved, "shearling.json", lambda r: r["layers"][0].update(filters=1))
    with pytest.raises(CheckpointError, match="other layers"):
        shearling.load(saved)


def edits(config: dict[str, Any]) -> dict[str, Any]:
    return config["shearling"]["edits"]


CONFIG_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no reshaping": lambda c: c.pop("shearling"),
    "another version": lambda c: c["shearling"].update(version="two"),
    "no edits": lambda c: c["shearling"].pop("edits"),
    "no linear": lambda c: edits(c).pop("linear"),
    "negative size": lambda c: edits(c)["linear"].update({"encoder.layer.0.output.dense": [32, -1]}),
    "huge size": lambda c: edits(c)["linear"].update({"encoder.layer.0.output.dense": [2**40, 2**40]}),
    "words": lambda c: edits(c)["linear"].update({"encoder.layer.0.output.dense": "all"}),
    "other size": lambda c: edits(c)["linear"].update({"encoder.layer.0.output.dense": [32, 47]}),
    "another module": lambda c: edits(c)["linear"].update(
        {"encoder.layer.9.output.dense": edits(c)["linear"].pop("encoder.layer.0.output.dense")}
    ),
    "code": lambda c: edits(c)["attributes"].update({"encoder.layer.0.forward": "print"}),
    "no class": lambda c: c.update(architectures=["os.system"]),
    "not a model": lambda c: c.update(architectures=["AutoTokenizer"]),
}


@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_a_changed_config_is_refused(saved: Path, change: str) -> None:
    edited(saved, "config.json", CONFIG_CHANGES[change])
    with pytest.raises(CheckpointError):
        shearling.load(saved)


def test_large_numbers_that_are_no_sizes_load(pruned: shearling.Pruned, tmp_path: Path) -> None:
    pruned.save(tmp_path / "small")
    edited(tmp_path / "small", "config.json", lambda c: c.update(rope_theta=2.8e8, rope_base=280_000_000))
    assert shearling.load(tmp_path / "small").config.rope_theta == 2.8e8


def test_force_never_replaces_the_model_it_was_made_from(pruned: shearling.Pruned, tmp_path: Path) -> None:
    saved = pruned.save(tmp_path / "small")
    again = shearling.prune(shearling.load(saved), batches_of(), flops=0.5)
    with pytest.raises(OutputError, match="the model itself"):
        again.save(saved, force=True)
    assert (saved / "model.safetensors").is_file()


def test_weights_that_are_missing_or_damaged_are_refused(saved: Path) -> None:
    """Transformers would fill a missing tensor with random numbers and only mention it."""
    path = saved / "model.safetensors"
    weights = load_file(path)
    gone = "bert.encoder.layer.1.intermediate.dense.weight"
    save_file({k: v for k, v in weights.items() if k != gone}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="intermediate"):
        shearling.load(saved)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        shearling.load(saved)
    path.unlink()
    with pytest.raises(CheckpointError):
        shearling.load(saved)


def test_what_is_no_checkpoint(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        shearling.load(tmp_path / "nothing")
    model_of("bert").save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"has no shearling\.json"):
        shearling.load(tmp_path / "dense")
    for text in ("{", "[1]", '"text"', "\x00", "[" * 100_000):
        (saved / "shearling.json").write_text(text)
        with pytest.raises(CheckpointError):
            shearling.load(saved)
