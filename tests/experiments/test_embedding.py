"""The harness for embedding models on a tiny random one: every study, and rows that are made only once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertModel

from data.tiny import WORDS, bert_config, bert_tokenizer, build

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import embedding
import tables

VOCABULARY = [word for word in WORDS.split() if word.isalpha()]


def sentences(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(VOCABULARY, rng.integers(3, 12))) for _ in range(count)]


def write(path: Path, **columns: list[Any]) -> None:
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script with these options; the rows it keeps."""
    build(BertModel, bert_config()).save_pretrained(tmp_path / "model")
    bert_tokenizer(model_max_length=32).save_pretrained(tmp_path / "model")
    answers = [{"text": ["a"], "answer_start": [0]}] * 40
    for seed, name in enumerate(("squad_v2.train", "squad_v2.dev", "xquad.dev")):
        context, question = sentences(40, seed), sentences(40, 10 + seed)
        write(tmp_path / f"{name}.jsonl", context=context, question=question, answers=answers)
    for seed, name in enumerate(("stsb.train", "stsb.dev")):
        one, other = sentences(40, 20 + seed), sentences(40, 30 + seed)
        write(tmp_path / f"{name}.jsonl", sentence1=one, sentence2=other, label=[i / 8 for i in range(40)])
    for name, value in {"SAMPLES": 48, "SIZES": (32,), "DRAWS": (2,), "DOMAINS": ("questions",)}.items():
        monkeypatch.setattr(embedding, name, value)
    monkeypatch.setattr(embedding, "RECIPES", {"no noise": embedding.RECIPES["no noise"]})

    def run(*options: str) -> list[dict[str, Any]]:
        out = tmp_path / "rows.json"
        given = ["--model", f"tiny={tmp_path / 'model'}", "--data", str(tmp_path), "--out", str(out), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["embedding.py", *given, "--flops", "0.5", *options])
        embedding.main()
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows

    return run


def test_budgets_and_their_table(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = run("--polish", "off,2,auto")
    assert [(row["flops"], row.get("polish"), row.get("passes", 0) > 0) for row in rows] == [
        (1.0, None, False), (0.5, "off", False), (0.5, "2", True), (0.5, "auto", False),
    ]  # fmt: skip
    exams = {"xquad", "xquad, dense index", "squad", "squad, dense index", "stsb"}
    assert all(exams <= row.keys() for row in rows)
    assert rows[0]["xquad"] == rows[0]["xquad, dense index"]
    assert "<svg" in (tmp_path / "embedding-tiny.svg").read_text()
    assert run("--polish", "off,2,auto") == rows  # seconds included: nothing was made again
    monkeypatch.setattr(tables, "EMBEDDING_ROWS", tmp_path / "rows.json")
    lines = tables.search().splitlines()
    assert len(lines) == 2 + 4
    assert lines[3].startswith("| tiny | 50% | off |")


def test_studies(run: Any) -> None:
    rows = run("--study", "texts,domain,draws,loss,recipe", "--polish", "1", "--exams", "xquad")
    assert [row["study"] for row in rows] == ["texts", "domain", "draws", "draws", "loss", "recipe"]
    assert all(row["passes"] == 1 and "stsb" not in row for row in rows)


def test_latency(run: Any) -> None:
    (row,) = run("--latency")
    assert row["ratio"] == pytest.approx(row["dense_ms"] / row["pruned_ms"], rel=0.05)
