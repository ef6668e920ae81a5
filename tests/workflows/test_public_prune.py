"""`shearling.prune` and `shearling.measure`: whatever people hold as a model and as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
)

import shearling
from bench import write_model, write_rows
from data.tiny import bert_config, bert_tokenizer, build, gpt_config
from warm import python


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prune")
    write_model(root / "model")
    write_model(root / "pairs", labels=1)
    write_rows(root / "train.jsonl", 96)
    write_rows(root / "dev.jsonl", 40, seed=1)
    return root


@pytest.fixture(scope="module")
def texts(place: Path) -> list[str]:
    return [json.loads(line)["sentence"] for line in (place / "train.jsonl").read_text().splitlines()]


def dense(place: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(place / "model")


def kinds(place: Path, texts: list[str]) -> dict[str, Any]:
    """The same examples in every form that data may have."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    rows = [{name: values[i] for name, values in encoded.items()} for i in range(len(texts))]
    return {
        "texts": texts,
        "file name": str(place / "train.jsonl"),
        "path": place / "train.jsonl",
        "rows": [{"sentence": text} for text in texts],
        "batches": [dict(encoded)],
        "loader": DataLoader(rows, batch_size=7),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("kind", ["texts", "file name", "path", "rows", "batches", "loader"])
def test_every_form_of_the_data_gives_the_same_model(place: Path, texts: list[str], kind: str) -> None:
    first = shearling.prune(dense(place), texts, flops=0.5, progress=False)
    again = shearling.prune(dense(place), kinds(place, texts)[kind], flops=0.5, progress=False)
    assert again.report.layers == first.report.layers
    assert again.report.examples == 96
    for one, two in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


def test_data_sets_raw_and_tokenised(place: Path, texts: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    raw = datasets.Dataset.from_dict({"sentence": texts})
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenised = raw.map(lambda row: tokenizer(row["sentence"]))
    results = [shearling.prune(dense(place), data, flops=0.5, progress=False) for data in (raw, tokenised)]
    assert results[0].report.layers == results[1].report.layers


@pytest.mark.parametrize("by_name", [True, False])
def test_a_result_saves_its_tokenizer(place: Path, texts: list[str], tmp_path: Path, by_name: bool) -> None:
    model = str(place / "model") if by_name else dense(place)
    pruned = shearling.prune(model, texts, flops=0.5, progress=False, device="cpu")
    pruned.save(tmp_path / "small")
    assert AutoTokenizer.from_pretrained(tmp_path / "small").get_vocab() == bert_tokenizer().get_vocab()
    assert shearling.load(tmp_path / "small") is not None


def test_pairs(place: Path, texts: list[str]) -> None:
    pairs = list(zip(texts, reversed(texts), strict=True))
    pruned = shearling.prune(str(place / "pairs"), pairs, flops=0.5, task="stsb", device="cpu", progress=False)
    alone = shearling.prune(str(place / "pairs"), texts, flops=0.5, device="cpu", progress=False, task="regression")
    assert pruned.report.mean_length > 1.5 * alone.report.mean_length
    assert pruned.report.agreement is not None
    assert pruned.report.agreement["kind"] == "spearman"
    with pytest.raises(shearling.DataError, match="mixes texts"):
        shearling.prune(str(place / "pairs"), [*texts, pairs[0]], flops=0.5, device="cpu", progress=False)


def test_a_model_without_an_origin_needs_a_tokenizer(texts: list[str]) -> None:
    model = build(BertForSequenceClassification, bert_config())
    with pytest.raises(shearling.InputError, match="Give one: tokenizer="):
        shearling.prune(model, texts, flops=0.5, progress=False)
    model.name_or_path = "nowhere/at-all"
    with pytest.raises(shearling.ModelError, match="Give the tokenizer itself: tokenizer="):
        shearling.prune(model, texts, flops=0.5, progress=False)
    pruned = shearling.prune(model, texts, tokenizer=bert_tokenizer(), flops=0.5, progress=False)
    assert pruned.report.flops.ratio <= 0.5 + 1e-9


def test_a_tokenizer_by_name_is_told(place: Path, texts: list[str]) -> None:
    with pytest.raises(shearling.InputError, match="is a name; pass the tokenizer itself"):
        shearling.prune(dense(place), texts, tokenizer=place / "model", flops=0.5, progress=False)


def test_several_data_sets_at_once_are_told(place: Path) -> None:
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": ["good"]}) for name in ("train", "test")})
    with pytest.raises(shearling.DataError, match="give one of them: train, test"):
        shearling.prune(dense(place), both, flops=0.5, progress=False)


def test_a_head_without_a_padding_token_takes_texts_one_by_one(texts: list[str]) -> None:
    model = build(GPT2ForSequenceClassification, gpt_config(num_labels=2))
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(texts[:40])]
    pruned = shearling.prune(
        model, texts[:40], tokenizer=bert_tokenizer(), flops=0.5, eval=rows, timing=False, progress=False
    )
    assert pruned.report.evaluation is not None
    assert pruned.report.evaluation["examples"] == 40


def test_what_is_no_model_is_told(texts: list[str]) -> None:
    with pytest.raises(shearling.ModelError, match="A Linear is not a model"):
        shearling.prune(torch.nn.Linear(2, 2), texts, flops=0.5, progress=False)


def test_a_result_is_taken_as_a_model(place: Path, texts: list[str]) -> None:
    half = shearling.prune(dense(place), texts, flops=0.5, progress=False)
    rows = str(place / "dev.jsonl")
    assert (
        shearling.evaluate(half, rows, progress=False).value
        == shearling.evaluate(half.model, rows, progress=False).value
    )
    again = shearling.prune(half, texts, flops=0.5, progress=False)
    assert again.report.dense_layers == half.report.layers


def test_eval_scores_both_and_times_them(place: Path, texts: list[str]) -> None:
    rows = str(place / "dev.jsonl")
    pruned = shearling.prune(dense(place), texts, flops=0.5, eval=rows, progress=False, seq_len=9, batch_size=2)
    found = pruned.report.evaluation
    assert found is not None
    assert found.keys() == {"task", "metric", "dense", "pruned", "examples"}
    assert found["examples"] == 40
    assert found["dense"] == shearling.evaluate(dense(place), rows, progress=False, device="cpu").to_json()["value"]
    assert found["pruned"] == pytest.approx(
        shearling.evaluate(pruned.model, rows, tokenizer=bert_tokenizer(), progress=False).to_json()["value"]
    )
    timing = pruned.report.timing
    assert timing is not None
    assert (timing["batch_size"], timing["seq_len"]) == (2, 9)
    assert timing["measured"] == pytest.approx(timing["pruned_ms"] / timing["dense_ms"])
    assert timing["spread"] >= 0
    bare = shearling.prune(dense(place), texts, flops=0.5, eval=rows, timing=False, limit=8, progress=False)
    assert bare.report.timing is None
    assert bare.report.evaluation is not None
    assert bare.report.evaluation["examples"] == 8


def test_eval_goes_with_batches_too(place: Path, texts: list[str]) -> None:
    batches = kinds(place, texts)["batches"]
    pruned = shearling.prune(
        dense(place), batches, flops=0.5, eval=str(place / "dev.jsonl"), timing=False, progress=False
    )
    assert pruned.report.evaluation is not None


def test_max_drop_from_python(place: Path, texts: list[str]) -> None:
    rows = str(place / "dev.jsonl")
    pruned = shearling.prune(dense(place), texts, max_drop=5, eval=rows, timing=False, progress=False)
    found = pruned.report.evaluation
    assert found is not None
    assert found["dense"] - found["pruned"] <= 5
    assert pruned.report.to_json()["max_drop"]["allowed"] == 5


def test_a_plan_from_texts(place: Path, texts: list[str]) -> None:
    plan = shearling.measure(dense(place), texts, progress=False)
    assert plan.prune(flops=0.3).report.flops.ratio <= 0.3 + 1e-9
    assert plan.prune(flops=0.6).report.agreement is not None


def test_watcher_still_works(place: Path, texts: list[str]) -> None:
    seen: set[str] = set()
    with pytest.warns(DeprecationWarning, match="progress="):
        shearling.prune(dense(place), texts, flops=0.5, watcher=lambda stage, done, total: seen.add(stage))
    assert {"load", "read", "tokenise", "measure", "refit", "agreement"} <= seen


def test_batches_go_straight_through() -> None:
    """Nothing that reads texts is imported for batches."""
    code = """
import sys
assert "shearling" not in sys.modules
import shearling
from tiny import batches_of, model_of
shearling.prune(model_of("bert"), batches_of(), flops=0.5, progress=False)
shearling.measure(model_of("bert"), batches_of(), progress=False)
heavy = [name for name in sys.modules if name.startswith(("shearling.data", "shearling.evaluation", "rich"))]
assert not heavy, heavy
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_sentence_transformers_in_and_out(tmp_path: Path, texts: list[str]) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertModel

    build(BertModel, bert_config()).save_pretrained(tmp_path / "dense")
    bert_tokenizer(model_max_length=32).save_pretrained(tmp_path / "dense")
    parts = [Transformer(str(tmp_path / "dense")), Pooling(32, pooling_mode="mean")]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    before = model.encode(texts[:4])
    pruned = shearling.prune(model, texts, flops=0.5, progress=False)
    assert isinstance(pruned.model, library.SentenceTransformer)
    assert (model.encode(texts[:4]) == before).all()
    assert pruned.report.agreement is not None
    assert pruned.report.agreement["kind"] == "cosine"
    pruned.save(tmp_path / "small")
    again = library.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert abs(again.encode(texts[:4]) - pruned.model.encode(texts[:4])).max() < 1e-5
    planned = shearling.measure(model, texts, progress=False).prune(flops=0.5)
    assert isinstance(planned.model, library.SentenceTransformer)
    assert abs(planned.model.encode(texts[:4]) - pruned.model.encode(texts[:4])).max() < 1e-4


def test_cross_encoders_in_and_out(place: Path, tmp_path: Path, texts: list[str]) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(str(place / "pairs"), device="cpu")
    pairs = list(zip(texts, reversed(texts), strict=True))
    pruned = shearling.prune(model, pairs, flops=0.5, progress=False)
    assert isinstance(pruned.model, library.CrossEncoder)
    pruned.save(tmp_path / "small")
    again = library.CrossEncoder(str(tmp_path / "small"), device="cpu")
    assert abs(again.predict(pairs[:4]) - pruned.model.predict(pairs[:4])).max() < 1e-5
