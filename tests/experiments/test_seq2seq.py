"""The encoder-decoder experiment at toy size, from training to its rows."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import seq2seq

from data.tiny import WORDS, bert_tokenizer

pytestmark = pytest.mark.slow

SMALL = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


def test_from_training_to_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert_tokenizer(model_max_length=32).save_pretrained(tmp_path)
    rng = random.Random(0)
    words = [word for word in WORDS.split() if word.isalpha()]
    lines = [" ".join(rng.choices(words, k=8)) + " ." for _ in range(80)]
    (tmp_path / "wikitext2.valid.txt").write_text("\n\n".join(lines))
    monkeypatch.setattr(seq2seq, "SHAPES", SMALL)
    monkeypatch.setattr(seq2seq, "LENGTH", 32)
    out = tmp_path / "seq2seq.json"
    options = ["--tokenizer", tmp_path, "--data", tmp_path, "--device", "cpu", "--minutes", 0.05, "--samples", 16]
    monkeypatch.setattr(sys, "argv", [str(word) for word in ["seq2seq", *options, "--budgets", 0.5, "--out", out]])
    seq2seq.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert 0 <= row["agreement"] <= 100
    assert row["samples"] == 16


def test_sources_are_spoilt_and_targets_are_not() -> None:
    texts = [f"a{i} b{i} c{i} d{i} e{i} f{i}" for i in range(50)]
    rows = seq2seq.pairs(texts, seed=0)
    assert [row["target"] for row in rows] == texts
    assert sum(row["source"] != row["target"] for row in rows) > 25
    assert rows == seq2seq.pairs(texts, seed=0)
