"""Search and reranking, scored by a loop; pruned queries on the index of another model; the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertForSequenceClassification, BertModel

from data.tiny import bert_config, bert_tokenizer, build, evaluate
from shearling.cli import run as command
from shearling.data import Rows
from shearling.errors import DataError, InputError, ModelError
from shearling.models.pooling import Pooling, set_pooling

WORDS = ["the", "film", "was", "not", "good", "bad", "paris", "river", "anna", "lives"]
TEXTS = list(dict.fromkeys(" ".join(np.random.default_rng(i).choice(WORDS, size=2 + i % 7)) for i in range(90)))
QUERIES, PASSAGES = TEXTS[:20], TEXTS[20:70]
ROWS = Rows({"query": [QUERIES[i % 20] for i in range(50)], "passage": PASSAGES, "label": [i % 3 for i in range(50)]})


def encoder(seed: int = 0) -> Any:
    model = build(BertModel, bert_config(), seed)
    set_pooling(model, Pooling(("cls",), prompts={"query": "the ", "document": "a film "}))
    return model


@torch.no_grad()
def vectors(model: Any, texts: list[str], prompt: str) -> torch.Tensor:
    tokenizer = bert_tokenizer()
    hidden = [model(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state[0, 0] for text in texts]
    return F.normalize(torch.stack(hidden), dim=-1)


def by_hand(queries: torch.Tensor, passages: torch.Tensor) -> dict[str, float]:
    """The mean reciprocal rank and recall, with nothing shared but the definition."""
    found: dict[str, list[float]] = {"mrr@10": [], "r@1": [], "r@10": []}
    for i, text in enumerate(QUERIES):
        wanted = {p for p in range(50) if ROWS.column("query")[p] == text and ROWS.column("label")[p] > 0}
        order = sorted(range(50), key=lambda p: -float(queries[i] @ passages[p]))
        rank = min(order.index(p) for p in wanted) + 1
        found["mrr@10"].append(1 / rank if rank <= 10 else 0)
        found["r@1"].append(len(wanted & {order[0]}) / len(wanted))
        found["r@10"].append(len(wanted & set(order[:10])) / len(wanted))
    return {name: 100 * float(np.mean(values)) for name, values in found.items()}


def test_search_agrees_with_a_loop_and_uses_the_prompts() -> None:
    model = encoder()
    result = evaluate(model, bert_tokenizer(), ROWS, "retrieval", batch_size=8, device="cpu")
    expected = by_hand(vectors(model, QUERIES, "the "), vectors(model, PASSAGES, "a film "))
    assert (result.task, result.metric, result.examples) == ("retrieval", "ndcg@10", 20)
    assert dict(result.extra) == pytest.approx(expected, abs=1e-4)
    assert 0 < result.value < 100


@pytest.mark.parametrize("metric", ["mrr@10", "R@1", "r@10"])
def test_another_models_index_and_another_metric(metric: str) -> None:
    model, other = encoder(), encoder(seed=1)
    result = evaluate(model, bert_tokenizer(), ROWS, "retrieval", metric=metric, index=other, device="cpu")
    expected = by_hand(vectors(model, QUERIES, "the "), vectors(other, PASSAGES, "a film "))
    assert result.metric == metric.lower()
    assert result.value == pytest.approx(expected[metric.lower()], abs=1e-4)


def test_wrong_use() -> None:
    model, tokenizer = encoder(), bert_tokenizer()
    with pytest.raises(InputError, match="task retrieval has no metric 'auc'; it has ndcg@10"):
        evaluate(model, tokenizer, ROWS, "retrieval", metric="auc")
    with pytest.raises(InputError, match="an index is of use with the tasks retrieval and knn only"):
        evaluate(
            model, tokenizer, Rows({"text1": TEXTS, "text2": TEXTS, "label": [1] * len(TEXTS)}), "sts", index=model
        )
    with pytest.raises(ModelError, match="task rerank needs a model for regression"):
        evaluate(model, tokenizer, ROWS, "rerank")
    wide = build(BertModel, bert_config(hidden_size=64))
    with pytest.raises(DataError, match="32 dimensions, the index in 64"):
        evaluate(model, tokenizer, ROWS, "retrieval", index=wide)


def test_reranking_agrees_with_a_loop() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    model, tokenizer = build(BertForSequenceClassification, bert_config(num_labels=1)), bert_tokenizer()
    result = evaluate(model, tokenizer, ROWS, "rerank", batch_size=8, device="cpu")
    queries, gold = ROWS.column("query"), np.array(ROWS.column("label"))
    with torch.no_grad():
        pairs = zip(queries, PASSAGES, strict=True)
        guess = np.array([float(model(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs])
    groups = [[i for i in range(50) if queries[i] == text] for text in QUERIES]
    kept = [g for g in groups if gold[g].max() > 0]
    expected = np.mean([sklearn.ndcg_score([gold[g]], [guess[g]], k=10) for g in kept])
    assert result.value == pytest.approx(100 * expected, abs=1e-3)
    assert result.extra["auc"] == pytest.approx(100 * sklearn.roc_auc_score(gold > 0, guess), abs=1e-3)
    with pytest.raises(DataError, match="equally relevant"):
        evaluate(model, tokenizer, Rows({"query": ["a"], "passage": ["b"], "label": [1]}), "rerank", device="cpu")


def folders(tmp_path: Path) -> tuple[str, str]:
    """A directory of an embedding model, and one of a search."""
    build(BertModel, bert_config()).save_pretrained(tmp_path / "dense")
    bert_tokenizer(model_max_length=32).save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "1_Pooling").mkdir()
    (tmp_path / "dense" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    kinds = {"": "models.Transformer", "1_Pooling": "models.Pooling", "2_Normalize": "models.Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "set" / "qrels").mkdir(parents=True)
    entries = {"corpus": PASSAGES, "queries": QUERIES}
    for name, texts in entries.items():
        lines = [json.dumps({"_id": str(i), "text": text}) for i, text in enumerate(texts)]
        (tmp_path / "set" / f"{name}.jsonl").write_text("\n".join(lines))
    lines = [f"{i % 20}\t{i}\t1" for i in range(40)]
    (tmp_path / "set" / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return str(tmp_path / "dense"), str(tmp_path / "set")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, data = folders(tmp_path)
    half = str(tmp_path / "half")

    def ask(*words: str) -> dict[str, Any]:
        assert command([*words, "--task", "retrieval", "--device", "cpu", "--json", "--quiet"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    ask("prune", dense, "--data", data, "--flops", "0.5", "--out", half)
    own = ask("evaluate", half, "--data", data, "--metric", "r@10")
    mixed = ask("evaluate", half, "--data", data, "--metric", "r@10", "--index", "dense")
    assert mixed == ask("evaluate", half, "--data", data, "--metric", "r@10", "--index", dense)
    assert own["metric"] == mixed["metric"] == "r@10"
    assert own["examples"] == mixed["examples"] == 20
    both = ask("compare", dense, half, "--data", data, "--metric", "r@10", "--index", "dense")
    assert [side["value"] for side in both["models"]] == pytest.approx(
        [ask("evaluate", dense, "--data", data, "--metric", "r@10")["value"], mixed["value"]], abs=1e-3
    )
    swept = ask("sweep", dense, "--data", data, "--eval", data, "--flops", "0.5", "--metric", "r@10", "--index",
                "dense", "--out", str(tmp_path / "sweep"))  # fmt: skip
    assert swept["results"][0]["value"] == pytest.approx(mixed["value"], abs=1e-3)
    drop = ask("prune", dense, "--data", data, "--eval", data, "--max-drop", "100", "--metric", "mrr@10", "--dry-run")
    assert drop["max_drop"]["metric"] == "mrr@10"
    assert command(["evaluate", dense, "--data", data, "--task", "retrieval", "--index", "dense"]) == 2
    assert "--index DIRECTORY" in capsys.readouterr().err
