"""Directories of sentence-transformers: the transformer is pruned, the rest stays, and SentenceTransformer loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from data.tiny import bert_config, bert_tokenizer
from families import tiny_model
from shearling.checkpoint.companions import copy_companions
from shearling.checkpoint.pretrained import load_model
from shearling.checkpoint.sentence import read_pooling, transformer_in
from shearling.cli import run
from shearling.errors import InputError, ModelError
from shearling.models.pooling import Pooling, pooling_of


def sentence_directory(folder: Path, inside: str = "") -> Path:
    """A tiny directory as sentence-transformers lays them out, with a head in the file that sentences do not use."""
    model = tiny_model("bert").base_model
    (folder / inside).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / inside)
    config = json.loads((folder / inside / "config.json").read_text())
    (folder / inside / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    bert_tokenizer(model_max_length=32).save_pretrained(folder / inside)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"idx": 0, "name": "0", "path": inside, "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / inside / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 32, "do_lower_case": False})
    )
    return folder


def rows_file(path: Path) -> Path:
    words = ["a", "the", "film", "is", "good", "bad", "who", "not", "city", "river"]
    lines = [
        {"sentence1": f"{words[i % 10]} {words[i % 7]}", "sentence2": words[i % 9], "label": i % 5} for i in range(70)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_parts_that_a_model_has_saved_itself_stay(inside: str, tmp_path: Path) -> None:
    source, folder = sentence_directory(tmp_path / "dense", inside), tmp_path / "small"
    (folder / "1_Pooling").mkdir(parents=True)
    own = {"modules.json": "[]", "1_Pooling/config.json": "{}"}
    for name, text in own.items():
        (folder / name).write_text(text)
    copy_companions(source, folder)
    assert {name: (folder / name).read_text() for name in own} == own
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_prune_and_load(inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sentence_directory(tmp_path / "dense", inside)
    command = ["prune", str(source), "--data", str(rows_file(tmp_path / "rows.jsonl")), "--flops", "0.5"]
    assert run([*command, "--out", str(tmp_path / "half"), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"]["ratio"] <= 0.5
    half = tmp_path / "half"
    assert (half / "1_Pooling" / "config.json").is_file()
    assert not (half / "0_Transformer").exists()
    assert transformer_in(half) == half
    small = load_model(str(half), device="cpu")
    assert type(small) is transformers.BertModel
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in load_model(str(source)).parameters())
    assert run(["evaluate", str(half), "--data", str(tmp_path / "rows.jsonl"), "--task", "embedding", "--json"]) == 0

    library = pytest.importorskip("sentence_transformers")
    embedder: Any = library.SentenceTransformer(str(half), device="cpu")
    texts = ["a good film", "the film is not very good"]
    tokens = bert_tokenizer(model_max_length=32)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = small(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None]
    expected = (hidden * real).sum(1) / real.sum(1)
    torch.testing.assert_close(embedder.encode(texts, convert_to_tensor=True).cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"type": "x.Pooling", "path": "1_Pooling"}], "lists no transformer"),
        ([{"type": "x.Transformer", "path": "../elsewhere"}], "leads out of the directory"),
        ("nonsense", "not a list of modules"),
    ],
)
def test_a_list_of_modules_that_makes_no_sense(modules: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path))


def bare_directory(folder: Path) -> Path:
    """An encoder that was saved without a pooler, and no file that says how it pools."""
    torch.manual_seed(0)
    transformers.BertModel(bert_config(), add_pooling_layer=False).save_pretrained(folder)
    bert_tokenizer(model_max_length=32).save_pretrained(folder)
    return folder


def test_a_bare_encoder_without_a_pooler_can_be_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    source, rows = bare_directory(tmp_path / "dense"), rows_file(tmp_path / "rows.jsonl")
    model = load_model(str(source), device="cpu")
    assert "how its embeddings are pooled" in caplog.text
    assert "using the mean over real tokens" in caplog.text
    assert model.pooler is None or not any(p.any() for p in model.pooler.parameters())
    command = ["prune", str(source), "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "half")]
    assert run([*command, "--json", "--quiet"]) == 0
    assert load_model(str(tmp_path / "half"), device="cpu").num_parameters() < model.num_parameters()
    capsys.readouterr()


def test_a_pooling_is_given_where_nothing_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = str(bare_directory(tmp_path / "dense"))
    assert pooling_of(load_model(source, device="cpu", pooling="cls,normalize")) == Pooling(("cls",), normalize=True)
    assert not caplog.text
    with pytest.raises(InputError, match="No pooling 'average'"):
        load_model(source, device="cpu", pooling="average")


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["weightedmean", "mean"]}, ("weighted_mean", "mean")),
        ({"word_embedding_dimension": 32}, ("mean",)),
    ],
)
def test_old_and_new_ways_to_write_the_pooling(config: dict[str, Any], modes: Any, tmp_path: Path) -> None:
    folder = sentence_directory(tmp_path / "dense")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    found = read_pooling(str(folder))
    assert found is not None
    assert (found.modes, found.max_length, found.guessed) == (modes, 32, False)
    assert pooling_of(load_model(str(folder), device="cpu")).modes == modes


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    folder = sentence_directory(tmp_path / "dense")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "attention"}))
    with pytest.raises(ModelError, match="asks for the pooling 'attention'"):
        read_pooling(str(folder))
    (folder / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not an object"):
        read_pooling(str(folder))


def test_a_hub_id_brings_its_pooling_and_its_side_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a cache that was filled before, with no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--someone--embedder"
    sentence_directory(cached / "snapshots" / ("0" * 40))
    (cached / "snapshots" / ("0" * 40) / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    rows = rows_file(tmp_path / "rows.jsonl")
    words = ["prune", "someone/embedder", "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "half")]
    code, said = run(words), capsys.readouterr().err
    assert code == 0, said
    assert "how its embeddings are pooled" not in said
    assert pooling_of(load_model(str(tmp_path / "half"), device="cpu")).modes == ("cls",)
