"""Against the real library: in and out, saved and loaded again, with and without shearling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, BertModel

import shearling
from data.tiny import bert_config, bert_tokenizer, build
from shearling.checkpoint.pretrained import load_model
from shearling.checkpoint.sentence import read_pooling
from shearling.data.batches import Batches
from shearling.evaluation.exam import predict
from shearling.integrations.sentence_transformers import (
    give_back,
    is_sentence_model,
    pooling_from,
    transformer_of,
)
from shearling.models.pooling import pooling_of
from shearling.sample.batch import HELD_OUT
from warm import python

library: Any = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")

WORDS = ["the", "film", "was", "not", "good", "bad", "paris", "river", "anna", "lives"]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, size=1 + i % 9)) for i in range(80)]
MODES = ["mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens", ("cls", "mean")]


def folder_of(kind: type[Any], folder: Path, **options: Any) -> Path:
    build(kind, bert_config(**options)).save_pretrained(folder)
    bert_tokenizer(model_max_length=32).save_pretrained(folder)
    return folder


def embedder(folder: Path, mode: Any = "mean", *, dense: bool = False, normalize: bool = True) -> Any:
    """A SentenceTransformer over a tiny BERT, with everything that must survive."""
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    first = Transformer(str(folder_of(BertModel, folder)))
    parts = [first, Pooling(32, pooling_mode=mode)]
    if dense:
        torch.manual_seed(3)
        parts.append(Dense(parts[-1].get_embedding_dimension(), 12))
    if normalize:
        parts.append(Normalize())
    model = library.SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "the ", "document": "a film "}, default_prompt_name="query",
        similarity_fn_name="dot",
    )  # fmt: skip
    model.max_seq_length = 8
    return model


def read_by(model: Any, texts: Any) -> Batches:
    """The texts as the model itself reads them, with its default prompt."""
    prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None))
    parts = [texts[start : start + 16] for start in range(0, len(texts), 16)]
    read = [model.preprocess(part, prompt=prompt) for part in parts]
    tensors = [{name: value for name, value in one.items() if isinstance(value, torch.Tensor)} for one in read]
    return Batches(tensors, np.arange(len(texts)))


def pruned_of(model: Any, texts: Any) -> Any:
    return shearling.prune(transformer_of(model), read_by(model, texts), flops=0.5)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_our_embeddings_are_those_of_encode(mode: Any, dense: bool, tmp_path: Path) -> None:
    model = embedder(tmp_path, mode, dense=dense)
    ours = predict(transformer_of(model), read_by(model, TEXTS), device="cpu")
    torch.testing.assert_close(ours, model.encode(TEXTS, convert_to_tensor=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_pooling_is_read_from_the_files(mode: Any, tmp_path: Path) -> None:
    model = embedder(tmp_path / "in", mode, dense=True, normalize=False)
    model.save_pretrained(str(tmp_path / "out"), create_model_card=False)
    found, known = read_pooling(str(tmp_path / "out")), pooling_from(model)
    assert found is not None
    assert known is not None
    assert (found.modes, found.normalize, found.similarity) == (known.modes, False, "dot")
    assert (found.prompts, found.default) == (known.prompts, "query")
    for ours, theirs in zip(found.dense, known.dense, strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight)
        assert ours.activation == theirs.activation == "Tanh"
    loaded = load_model(str(tmp_path / "out"), device="cpu")
    torch.testing.assert_close(
        predict(loaded, read_by(model, TEXTS), device="cpu"),
        model.encode(TEXTS, convert_to_tensor=True),
        rtol=1e-4,
        atol=1e-5,
    )


def test_prune_save_and_load(tmp_path: Path) -> None:
    model = embedder(tmp_path / "in", "cls", dense=True)
    before = model.encode(TEXTS)
    result = pruned_of(model, TEXTS)
    whole = give_back(result, model)
    small = whole.model
    assert transformer_of(small) is result.model
    np.testing.assert_array_equal(model.encode(TEXTS), before)
    expected = small.encode(TEXTS)
    assert not np.allclose(expected, before)
    whole.save(tmp_path / "half")

    again = library.SentenceTransformer(str(tmp_path / "half"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), expected, rtol=1e-5, atol=1e-6)
    assert (again.prompts, again.default_prompt_name) == (model.prompts, "query")
    assert (again.max_seq_length, again.similarity_fn_name) == (8, "dot")
    assert [type(module).__name__ for module in again] == ["Transformer", "Pooling", "Dense", "Normalize"]
    loaded = load_model(str(tmp_path / "half"), device="cpu")
    assert pooling_of(loaded).modes == ("cls",)
    assert shearling.load(tmp_path / "half").num_parameters() == result.model.num_parameters()
    assert alone(tmp_path / "half", "SentenceTransformer", "encode", TEXTS[:4]) == pytest.approx(
        expected[:4].ravel().tolist(), rel=1e-4, abs=1e-5
    )


def test_parts_in_memory_count_not_those_where_the_transformer_came_from(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    embedder(tmp_path / "in", "mean").save_pretrained(str(tmp_path / "mean"), create_model_card=False)
    parts = [Transformer(str(tmp_path / "mean")), Pooling(32, pooling_mode="cls")]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    whole = give_back(pruned_of(model, TEXTS), model)
    whole.save(tmp_path / "half")
    again = library.SentenceTransformer(str(tmp_path / "half"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), whole.model.encode(TEXTS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_polish_judges_by_the_embeddings_that_encode_gives(mode: str, tmp_path: Path) -> None:
    """Its own pooling, Dense and Normalize modules, its prompt and its longest text."""
    model = embedder(tmp_path, mode, dense=True)
    result = shearling.prune(model, TEXTS, flops=0.5, method=shearling.Surgeon(polish=2), progress=False)
    judge = result.report.polish
    assert judge["passes"] == 2
    assert judge["after"] <= judge["before"]
    dense, small = (m.encode(TEXTS, convert_to_tensor=True) for m in (model, result.model))
    held_out = torch.arange(len(TEXTS)) % HELD_OUT == HELD_OUT - 1
    distances = (dense - small).square().sum(-1)[held_out]
    # The similarities add a little to the distance, and depend on which texts share a batch.
    similar = (small @ small.T - dense @ dense.T).square()[held_out][:, held_out]
    assert float(distances.mean()) <= judge["after"] <= float(distances.mean() + similar.max())


def test_a_cross_encoder(tmp_path: Path) -> None:
    folder = folder_of(BertForSequenceClassification, tmp_path / "in", num_labels=1)
    model = library.CrossEncoder(str(folder), device="cpu", max_length=16)
    pairs = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
    assert pooling_from(model) is None
    result = pruned_of(model, pairs)
    whole = give_back(result, model)
    small = whole.model
    expected = small.predict(pairs)
    whole.save(tmp_path / "half")
    again = library.CrossEncoder(str(tmp_path / "half"), device="cpu")
    np.testing.assert_allclose(again.predict(pairs), expected, rtol=1e-5, atol=1e-6)
    assert again.max_seq_length == 16
    assert type(load_model(str(tmp_path / "half"), device="cpu")) is BertForSequenceClassification
    assert alone(tmp_path / "half", "CrossEncoder", "predict", pairs[:4]) == pytest.approx(
        expected[:4].tolist(), rel=1e-4, abs=1e-5
    )


def alone(folder: Path, kind: str, verb: str, texts: Any) -> list[float]:
    """The outputs of a process that has no shearling, with trust_remote_code."""
    code = (
        "import sys, json; assert 'shearling' not in sys.modules; sys.modules['shearling'] = None\n"
        f"from sentence_transformers import {kind}\n"
        f"model = {kind}({str(folder)!r}, device='cpu', trust_remote_code=True)\n"
        f"print(json.dumps(model.{verb}({texts!r}).ravel().tolist()))"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_is_one_and_what_is_not(tmp_path: Path) -> None:
    assert is_sentence_model(embedder(tmp_path))
    assert not is_sentence_model(build(BertModel, bert_config()))
    assert not is_sentence_model("all-MiniLM-L6-v2")
