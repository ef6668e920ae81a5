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
from shearling.models.pooling import Pooling, set_pooling

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import embedding
import tables

pytestmark = pytest.mark.slow  # the harness is not the product: its tests wait for the slow checks

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
    lines = [" . ".join(sentences(4, 40 + seed)) for seed in range(20)]
    (tmp_path / "wikitext2.valid.txt").write_text("\n\n".join(lines))
    small = {
        "SAMPLES": 48,
        "SIZES": (32,),
        "DRAWS": (2,),
        "DOMAINS": ("questions", "wikitext"),
        "POWERS": ([2.0, 1.0],),
    }
    for name in ("LOSSES", "RECIPES"):
        small[name] = dict(list(getattr(embedding, name).items())[:1])
    for name, value in small.items():
        monkeypatch.setattr(embedding, name, value)

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
    assert run("--polish", "off,2,auto") == rows  # seconds included: nothing was made again
    monkeypatch.setattr(tables, "EMBEDDING_ROWS", tmp_path / "rows.json")
    lines = tables.search().splitlines()
    assert len(lines) == 2 + 4
    assert lines[3].startswith("| tiny | 50% | off |")
    picture = tables.search_pictures()["tiny"]
    assert all(word in picture for word in ("tiny", "dense index", f"dense {rows[0]['xquad']:.1f}"))


def test_studies_and_their_table(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = run("--polish", "1", "--exams", "xquad", "--study")
    assert [row["study"] for row in rows] == ["texts", "domain", "domain", "lengths", "draws", "draws", "loss"]
    assert all(row["passes"] == 1 and "stsb" not in row for row in rows)
    assert rows[2]["texts"] == 48
    assert [row["study"] for row in run("--polish", "1", "--study", "direction,recipe")[7:]] == ["direction", "recipe"]
    monkeypatch.setattr(tables, "EMBEDDING_ROWS", tmp_path / "rows.json")
    settings = [line.split(" | ")[1] for line in tables.studies().splitlines()[2:]]
    assert settings == [
        "32", "40 of questions", "48 of wikitext", "2 in measuring, 1 in refitting", "2, seed 0", "2, seed 1",
        "distance of the embeddings", "not normalised",
    ]  # fmt: skip


def test_questions_carry_the_prompt_of_queries(tmp_path: Path) -> None:
    model = build(BertModel, bert_config())
    set_pooling(model, Pooling(prompts={"query": "find: "}))
    write(tmp_path / "squad_v2.train.jsonl", context=["some text"], question=["what?"])
    write(tmp_path / "stsb.train.jsonl", sentence1=["one"], sentence2=["two"])
    bench = object.__new__(embedding.Bench)
    bench.model, bench.data = model, tmp_path
    assert bench.kinds() == {"paragraphs": ["some text"], "questions": ["find: what?"], "sentences": ["one", "two"]}


@pytest.mark.slow
def test_latency(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the ONNX tests need shearling[export]")
    (row,) = run("--latency")
    for name in ("", "onnx_"):
        assert row[f"{name}ratio"] == pytest.approx(row[f"{name}dense_ms"] / row[f"{name}pruned_ms"], rel=0.05)
    monkeypatch.setattr(tables, "EMBEDDING_ROWS", tmp_path / "rows.json")
    assert f"{row['onnx_ratio']:.2f}x" in tables.one_query()
