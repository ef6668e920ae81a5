"""Tokenizer files find their way into a checkpoint, or their absence is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

import shearling
from data.tiny import bert_tokenizer
from families import tiny_batches, tiny_model
from folders import batches
from shearling.errors import OutputError
from tiny import model_of

WORDS = "the film was good"


@pytest.fixture(scope="module")
def small() -> shearling.Pruned:
    return shearling.prune(model_of("bert"), batches(), flops=0.5)


def ids_of(folder: Path) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(folder)(WORDS)["input_ids"])


def told(folder: Path) -> bool:
    return bool(json.loads((folder / "shearling.json").read_text())["tokenizer"])


def test_the_tokenizer_comes_from_where_the_model_came_from(
    dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(dense)
    shearling.measure(model, batches()).prune(flops=0.5).save(tmp_path / "out")
    assert ids_of(tmp_path / "out") == bert_tokenizer()(WORDS)["input_ids"]
    assert told(tmp_path / "out")
    assert "No tokenizer" not in caplog.text


def test_no_tokenizer_is_told_loudly(small: shearling.Pruned, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.save(tmp_path / "out")
    assert "saved without one" in caplog.text
    assert not told(tmp_path / "out")
    caplog.clear()
    small.save(tmp_path / "given", source=bert_tokenizer())
    assert caplog.text == ""
    assert told(tmp_path / "given")


def test_a_model_of_images_lacks_a_processor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shearling.prune(tiny_model("vit"), tiny_batches("vit"), flops=0.5).save(tmp_path / "out")
    assert "No processor was found" in caplog.text
    assert "tokenizer" not in caplog.text


def test_a_hub_id_is_resolved_through_the_cache_or_refused(
    small: shearling.Pruned, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(OutputError, match="org/name"):
        small.save(tmp_path / "out", source="org/name")
    with pytest.raises(OutputError, match="nowhere"):
        small.save(tmp_path / "out", source=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
    repository = tmp_path / "hub" / "models--org--name"
    shutil.copytree(dense, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    small.save(tmp_path / "out", source="org/name")
    assert ids_of(tmp_path / "out") == bert_tokenizer()(WORDS)["input_ids"]
    assert json.loads((tmp_path / "out" / "shearling.json").read_text())["base"] is None  # not the cache's folder
