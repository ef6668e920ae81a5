"""Encoder-decoders: columns, prefixes, targets, scores, and the commands as users run them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import shearling
from data.tiny import build, evaluate, t5_config, t5_tokenizer
from shearling.cli import run
from shearling.data import Rows, encode, find_task, infer_task
from shearling.data.seq2seq import find_pair, flattened, prefix_of, reading_of
from shearling.errors import DataError, InputError

SOURCES = ["the film was good", "anna lives in paris", "who was in the city ?", "a bad river , not a walk ."]
TARGETS = ["good film", "paris", "anna .", "not bad and not good"]
ROWS = [{"source": f"{SOURCES[i % 4]} {i % 10}", "target": f"{TARGETS[i % 4]} {i % 7}"} for i in range(48)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build(transformers.T5ForConditionalGeneration, t5_config())


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5") / "dense"
    model.save_pretrained(path)
    t5_tokenizer().save_pretrained(path)
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("source", "target"), ("source", "target")),
        (("summary", "text"), ("text", "summary")),
        (("id", "article", "highlights"), ("article", "highlights")),
        (("answer", "question"), ("question", "answer")),
        (("en", "de"), ("en", "de")),
        (("sentence", "verse"), ("sentence", "verse")),
        (("verse",), ("verse", None)),
        (("text",), ("text", None)),
        (("domain", "topic", "en", "fr"), ("en", "fr")),
    ],
)
def test_columns_are_found_by_name_language_or_number(columns: tuple[str, ...], expected: tuple[str, ...]) -> None:
    rows = Rows({name: ["a text"] for name in columns})
    assert find_pair(rows) == expected


def test_columns_that_are_named_win_and_unclear_ones_are_refused() -> None:
    rows = Rows({name: ["a"] for name in ("source", "target", "first", "second")})
    assert find_pair(rows, ["first", "second"]) == ("first", "second")
    assert find_pair(rows, ["first"], "second") == ("first", "second")
    assert find_pair(rows, ["first"]) == ("first", None)
    assert find_pair(rows, None, "first") == ("source", "first")
    with pytest.raises(DataError, match="no column 'third'"):
        find_pair(rows, ["third"])
    with pytest.raises(DataError, match="3 columns were given"):
        find_pair(rows, ["first", "second", "source"])
    with pytest.raises(DataError, match="--text-columns SOURCE,TARGET"):
        find_pair(Rows({name: ["a"] for name in ("first", "second", "third")}))
    assert find_pair(Rows({"id": ["x1"], "text": ["a"]})) == ("text", None), "a key is no target"
    assert find_pair(Rows({"id": ["x1"], "en": ["a"], "de": ["ein"]})) == ("en", "de")
    assert find_pair(Rows({"en": ["a"], "id": ["satu"]})) == ("en", "id"), "Indonesian"
    nested = Rows({"translation": [{"en": "a", "de": "ein"}, {"en": "the", "de": "der"}]})
    assert flattened(nested).column("de") == ("ein", "der")


@pytest.mark.parametrize("value", [["a", "b"], None, {"en": "a"}])
def test_a_target_that_is_no_text_is_refused_and_not_generated(value: Any) -> None:
    with pytest.raises(DataError, match=r"row 1 of column 'summary' .*targets must be texts"):
        find_pair(Rows({"text": ["a"], "summary": [value]}))
    assert find_pair(Rows({"text": ["a"], "label": [1]})) == ("text", None)
    assert find_pair(Rows({"text": ["a"], "summary": [value]}), ["text"]) == ("text", None)


def test_the_report_says_what_was_read() -> None:
    config = t5_config(task_specific_params={"summarization": {"prefix": "summarize: "}})
    rows = Rows({"text": ["a"], "summary": ["b"]})
    said = "sources are the column 'text' with the prefix 'summarize: ', targets the column 'summary'"
    assert reading_of(rows, config, None, None) == said
    assert reading_of(rows, config, ["text"], None, prefix="") == "sources are the column 'text'"


def test_prefixes_come_from_the_configuration_where_the_columns_tell() -> None:
    told = {"summarization": {"prefix": "summarize: "}, "translation_en_to_de": {"prefix": "to German: "}}
    config = t5_config(task_specific_params=told)
    assert prefix_of(config, "text", "summary") == "summarize: "
    assert prefix_of(config, "en", "de") == "to German: "
    assert prefix_of(config, "source", "target") == ""
    assert prefix_of(t5_config(), "text", "summary") == ""
    assert prefix_of(t5_config(task_specific_params={"one": {"prefix": "go: "}}), "source", None) == "go: "


def encoded(model: Any, rows: list[dict[str, Any]], **options: Any) -> Any:
    return encode(Rows.from_records(rows), t5_tokenizer(), "seq2seq", model_config=model.config, model=model, **options)


def test_batches_hold_what_the_model_would_make_of_labels(model: Any) -> None:
    rows = [dict(row) for row in ROWS[:5]]
    (batch,) = encoded(model, rows, batch_size=8, prefix="go ")
    tokenizer = t5_tokenizer()
    assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True).startswith("go ")
    real = batch["labels"] != -100
    shifted = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    assert torch.equal(batch["decoder_input_ids"][real], shifted[real])
    assert torch.equal(batch["decoder_attention_mask"], (batch["labels"] != -100).long())
    again = encoded(model, [{**row, "source": f"go {row['source']}"} for row in rows], batch_size=8, prefix="go ")
    assert torch.equal(again[0]["input_ids"], batch["input_ids"]), "a prefix that is there is not put there twice"
    assert "labels" not in encoded(model, rows, labels="ignore")[0]
    with pytest.raises(DataError, match="no targets beside 'source'"):
        encoded(model, [{"source": "a film"}], labels="require")


def test_the_head_tells_the_task() -> None:
    for cls, config in (
        (transformers.T5ForConditionalGeneration, t5_config()),
        (transformers.MarianMTModel, transformers.MarianConfig(vocab_size=60, d_model=32, encoder_layers=1,
         decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
         decoder_ffn_dim=32, pad_token_id=0)),
    ):  # fmt: skip
        assert infer_task(cls(config)).name == "seq2seq"
    assert infer_task(transformers.T5EncoderModel(t5_config())).kind == "embedding"
    with pytest.raises(InputError, match="it has perplexity, agreement, rouge-l"):
        find_task("seq2seq").judged_by("accuracy")


def test_scores_are_those_of_brute_force(model: Any) -> None:
    rows, tokenizer = ROWS[:12], t5_tokenizer()
    other = build(transformers.T5ForConditionalGeneration, t5_config(), seed=1)
    result = evaluate(other, tokenizer, rows, teacher=model, batch_size=5)
    loss, tokens, equal = 0.0, 0, 0
    for row in rows:
        source = tokenizer(row["source"], return_tensors="pt")
        labels = tokenizer(row["target"], return_tensors="pt")["input_ids"]
        said = []
        for one in (model, other):
            with torch.no_grad():
                logits = one(**source, labels=labels).logits[0]
            said.append(logits.argmax(-1))
        loss += float(F.cross_entropy(logits, labels[0], reduction="sum"))
        tokens += labels.numel()
        equal += int((said[0] == said[1]).sum())
    assert result.metric == "perplexity"
    assert result.value == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert result.extra["agreement"] == pytest.approx(100 * equal / tokens)
    assert result.extra["tokens"] == tokens
    own = evaluate(model, tokenizer, rows, metric="agreement", teacher=model)
    assert own.value == 100
    with pytest.raises(DataError, match="which is not known"):
        evaluate(model, tokenizer, rows, metric="agreement")


def test_what_a_model_wrote_itself_has_a_rouge_of_100(model: Any) -> None:
    tokenizer = t5_tokenizer()
    written = []
    for row in ROWS[:6]:
        tokens = model.generate(**tokenizer(row["source"], return_tensors="pt"), max_new_tokens=6, do_sample=False)
        written.append({"source": row["source"], "target": tokenizer.decode(tokens[0], skip_special_tokens=True)})
    written = [row for row in written if row["target"]]
    result = evaluate(model, tokenizer, written, metric="rouge-l")
    assert result.metric == "rouge-l"
    assert result.value >= 60  # the last word may be cut: targets are tokenised anew
    assert evaluate(model, tokenizer, ROWS[:6], metric="rouge-l").value < result.value


def test_rows_without_targets_are_scored_on_what_the_dense_model_writes(model: Any) -> None:
    sources = [{"text": row["source"]} for row in ROWS[:8]]
    other = build(transformers.T5ForConditionalGeneration, t5_config(), seed=1)
    dense = evaluate(model, t5_tokenizer(), sources, teacher=model)
    assert dense.extra["agreement"] == 100
    assert evaluate(other, t5_tokenizer(), sources, teacher=model).value > dense.value


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command; gives the JSON object that it prints."""

    def run_it(*words: object) -> dict[str, Any]:
        capfd.readouterr()
        assert run([*map(str, words), "--json", "--quiet"]) == 0, capfd.readouterr().err
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    return run_it


def test_prune_evaluate_and_compare_on_the_command_line(folder: Path, tmp_path: Path, call: Any) -> None:
    pairs, texts, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "texts.txt", tmp_path / "small"
    texts.write_text("\n".join(row["source"] for row in ROWS))
    pruned = call("prune", folder, "--data", pairs, "--eval", pairs, "--flops", "0.7", "--no-timing", "-o", out)
    assert pruned["flops"]["ratio"] <= 0.7
    assert pruned["evaluation"]["metric"] == "perplexity"
    assert pruned["agreement"]["kind"] == "equal"
    assert all("cross_heads" in layer for layer in pruned["layers"][2:])
    written = call("prune", folder, "--data", texts, "--flops", "0.7", "--dry-run", "--prefix", "go ")
    assert any("generated them greedily" in warning for warning in written["warnings"])
    found = call("evaluate", out, "--data", pairs, "--metric", "agreement")
    assert found["metric"] == "agreement"
    assert 0 < found["value"] <= 100
    both = call("compare", folder, out, "--data", pairs, "--metric", "rouge-l")
    assert both["agreement"]["measure"] == "equal"
    assert both["agreement"]["value"] == pytest.approx(found["value"], abs=1e-3)
    assert both["agreement"]["count"] == found["extra"]["tokens"]


@pytest.mark.slow
def test_sweep_and_max_drop_on_the_command_line(folder: Path, tmp_path: Path, call: Any) -> None:
    pairs = write_rows(tmp_path / "rows.jsonl", ROWS)
    swept = call("sweep", folder, "--data", pairs, "--eval", pairs, "--flops", "0.8,0.6", "--metric", "agreement",
                 "-o", tmp_path / "sweep")  # fmt: skip
    assert swept["dense"]["value"] == 100
    assert len(swept["results"]) == 2
    dropped = call("prune", folder, "--data", pairs, "--eval", pairs, "--metric", "agreement", "--max-drop", "40",
                   "--no-timing", "--dry-run")  # fmt: skip
    assert dropped["max_drop"]["drop"] <= 40


def test_python_takes_texts_pairs_and_batches_with_labels_alone(model: Any) -> None:
    texts, tokenizer = [row["source"] for row in ROWS], t5_tokenizer()
    pairs = [(row["source"], row["target"]) for row in ROWS]
    by_kind = {}
    for kind, data in (("texts", texts), ("pairs", pairs)):
        by_kind[kind] = shearling.prune(model, data, tokenizer=tokenizer, flops=0.6, progress=False)
        assert by_kind[kind].report.flops.ratio <= 0.6
        assert by_kind[kind].report.examples == len(ROWS)
    made = [tokenizer([s], return_tensors="pt") | {"labels": tokenizer([t], return_tensors="pt")["input_ids"]}
            for s, t in pairs]  # fmt: skip
    from_batches = shearling.prune(model, made, flops=0.6, progress=False)
    assert from_batches.report.layers == by_kind["pairs"].report.layers


def test_a_bare_t5_is_told_what_to_give(model: Any) -> None:
    bare = transformers.T5Model(t5_config())
    with pytest.raises(DataError, match="no inputs for it"):
        shearling.prune(bare, ["a film"] * 8, tokenizer=t5_tokenizer(), flops=0.5, progress=False)
