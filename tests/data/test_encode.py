import ast
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertForSequenceClassification, DistilBertConfig, RobertaConfig

import shearling.data
from shearling.data import Rows, encode
from shearling.errors import DataError, InputError, ModelError
from shearling.sample.read import sample_of

from .tiny import SPECIAL, VOCABULARY, bert_config, bert_tokenizer, build, gpt_config, gpt_tokenizer

TEXTS = ["good film", "the film was not bad", "", "anna lives in paris and paris is good", "bad"]
SST2 = Rows({"sentence": TEXTS, "label": [1, 1, 0, 1, 0]})
PAIRS = Rows({"sentence1": TEXTS, "sentence2": TEXTS[::-1], "label": [0.0, 1.5, 2.0, 3.0, 5.0]})


def encoded(rows, task, **options):
    return encode(rows, bert_tokenizer(), task, model_config=options.pop("model_config", bert_config()), **options)


def test_single_texts():
    batches = encoded(SST2, "sst2", batch_size=2)
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    assert set(batches[0]) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    lengths = [int(length) for batch in batches for length in batch["attention_mask"].sum(dim=1)]
    assert lengths == sorted(lengths, reverse=True)  # bucketed
    assert all(batch["attention_mask"].any(dim=0).all() for batch in batches)  # padded to the longest, no further
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [SST2.column("label")[index] for index in batches.order]


def test_pairs_and_scores_without_bucketing():
    (batch,) = encoded(PAIRS, "stsb", bucket=False, model_config=bert_config(num_labels=1))
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [0.0, 1.5, 2.0, 3.0, 5.0]
    assert batch["token_type_ids"].max() == 1
    first = batch["input_ids"][0, batch["attention_mask"][0].bool()].tolist()
    assert bert_tokenizer().decode(first) == "[CLS] good film [SEP] bad [SEP]"


def test_batches_go_straight_into_the_model():
    model = build(BertForSequenceClassification, bert_config())
    for batch in encoded(SST2, "sst2", batch_size=2):
        assert torch.isfinite(model(**batch).loss)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_samples_are_drawn_without_replacement(samples, batch_size, seed):
    rows = Rows({"text": [f"{i // 10} {i % 10}" for i in range(30)], "label": [i % 2 for i in range(30)]})
    options = {"samples": samples, "batch_size": batch_size, "seed": seed}
    batches = encoded(rows, "classification", **options)
    drawn = [tuple(ids) for batch in batches for ids in batch["input_ids"].tolist()]
    assert len(drawn) == len(set(drawn)) == min(samples, 30)
    assert sample_of(batches).fingerprint == sample_of(encoded(rows, "classification", **options)).fingerprint


def test_the_sample_knows_of_how_many_rows_it_was_drawn():
    rows = Rows({"text": [f"{i // 10} {i % 10}" for i in range(30)]})
    assert sample_of(encoded(rows, "classification", samples=8, labels="ignore")).given == 30
    assert sample_of(encoded(rows, "classification", samples=8, labels="ignore"), limit=4).given == 30
    assert sample_of(encoded(rows, "classification", labels="ignore")).given == 30


def test_the_seed_matters_and_the_fingerprint_shows_it():
    prints = {sample_of(encoded(SST2, "sst2", samples=2, seed=seed)).fingerprint for seed in range(8)}
    assert len(prints) > 1


def test_labels_can_be_required_optional_or_ignored():
    bare = Rows({"sentence": TEXTS})
    with pytest.raises(DataError, match=r"looks for its labels in a column label.*--label-column"):
        encoded(bare, "sst2")
    assert "labels" not in encoded(bare, "sst2", labels="optional")[0]
    assert "labels" in encoded(SST2, "sst2", labels="optional")[0]
    assert "labels" not in encoded(SST2, "sst2", labels="ignore")[0]


def test_several_labels_an_example_are_left_out_or_refused():
    rows = Rows({"text": ["good", "bad"], "labels": [[1.0, 0.0], [0.0, 1.0]]})
    config = bert_config(problem_type="multi_label_classification")
    assert "labels" not in encoded(rows, "classification", model_config=config, labels="optional")[0]
    with pytest.raises(ModelError, match="several labels per example"):
        encoded(rows, "classification", model_config=config, labels="require")


def test_columns_by_name():
    rows = Rows({"a": TEXTS, "b": TEXTS, "y": [0] * 5})
    (batch,) = encoded(rows, "classification", text_columns=["b", "a"], label_column="y")
    assert batch["labels"].tolist() == [0] * 5
    with pytest.raises(DataError, match="texts must be strings"):
        encoded(rows, "classification", text_columns=["y"], label_column="y")


def test_very_long_texts_are_cut_and_counted(caplog):
    rows = Rows({"text": ["good " * 100_000, "bad"], "label": [0, 1]})
    with caplog.at_level(logging.WARNING, logger="shearling"):
        (batch,) = encoded(rows, "classification")
    assert batch["input_ids"].shape == (2, 64)  # the model has 64 positions
    assert "1 of 2 texts were cut to 64 tokens" in caplog.text


def test_a_text_of_exactly_the_limit_is_not_reported(caplog):
    rows = Rows({"text": ["good " * 62], "label": [0]})
    encoded(rows, "classification")
    assert "cut" not in caplog.text


@pytest.mark.parametrize("length", [0, 3, 65])
def test_lengths_the_model_cannot_take(length):
    with pytest.raises(InputError, match=rf"max_length {length} .* 4 to 64"):
        encoded(SST2, "sst2", max_length=length)


@pytest.mark.parametrize("option", [{"samples": 0}, {"batch_size": 0}])
def test_nonsense_sizes(option):
    with pytest.raises(InputError, match="at least 1"):
        encoded(SST2, "sst2", **option)


def test_positions_of_roberta_start_after_the_padding():
    config = RobertaConfig(max_position_embeddings=40, pad_token_id=1)
    rows = Rows({"text": ["good " * 99], "label": [0]})
    assert encoded(rows, "classification", model_config=config)[0]["input_ids"].shape[1] == 38


def test_token_types_only_for_models_that_embed_them():
    assert "token_type_ids" not in encoded(PAIRS, "regression", model_config=DistilBertConfig(num_labels=1))[0]


def test_an_empty_text_still_has_a_token():
    rows = Rows({"text": ["", ""], "label": [0, 1]})
    (batch,) = encode(rows, gpt_tokenizer(), "classification", model_config=gpt_config())
    assert batch["attention_mask"].tolist() == [[1], [1]]


def test_embeddings_take_every_text_on_its_own():
    (batch,) = encoded(PAIRS, "embedding", bucket=False)
    assert len(batch["input_ids"]) == 10
    assert "labels" not in batch
    assert sum(len(batch["input_ids"]) for batch in encoded(PAIRS, "embedding", samples=3)) == 3


def test_tags_sit_on_the_first_token_of_a_word():
    names = {"O": 0, "B-PER": 1}
    config = bert_config(label2id=names, id2label={0: "O", 1: "B-PER"})
    rows = Rows({"tokens": [["anna", "walking"], []], "ner_tags": [["B-PER", "O"], []]})
    (batch,) = encoded(rows, "token-classification", model_config=config, bucket=False)
    assert batch["labels"].tolist() == [[-100, 1, 0, -100, -100], [-100] * 5]  # [CLS] anna walk ##ing [SEP]


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [(["anna"], [0, 0], "1 words, but 2 tags"), ("anna", [0], "list of words"), (["anna", 3], [0, 0], "list of words")],
)
def test_bad_words(words, tags, message):
    with pytest.raises(DataError, match=message):
        encoded(Rows({"tokens": [words], "tags": [tags]}), "token-classification")


def test_running_text_is_packed():
    rows = Rows({"text": ["the city is good"] * 7})
    batches = encode(rows, gpt_tokenizer(), "lm", model_config=gpt_config(), max_length=8, batch_size=2)
    real = [
        ids for batch in batches for ids in map(torch.masked_select, batch["input_ids"], batch["attention_mask"] > 0)
    ]
    assert [len(ids) for ids in real] == [8, 8, 8, 8, 3]  # 7 texts of 4 tokens and an end each
    assert torch.cat(real).tolist()[:5] == [*gpt_tokenizer()("the city is good")["input_ids"], VOCABULARY["[SEP]"]]
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"].where(batch["attention_mask"].bool(), -100))


def test_running_text_can_be_sampled():
    rows = Rows({"text": [f"the city is {i % 10}" for i in range(50)]})
    batches = encode(rows, gpt_tokenizer(), "lm", model_config=gpt_config(), max_length=8, samples=3)
    assert sum(len(batch["input_ids"]) for batch in batches) == 3


def test_running_text_without_tokens():
    tokenizer = gpt_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no two tokens"):
        encode(Rows({"text": ["", " "]}), tokenizer, "lm", model_config=gpt_config())


def test_blanks_are_masked_and_only_they_are_labelled():
    rows = Rows({"text": ["the city is good and the river was bad"] * 20})
    (batch,) = encoded(rows, "lm")
    hidden = batch["labels"] != -100
    assert (batch["input_ids"][hidden] == VOCABULARY["[MASK]"]).all()
    assert not np.isin(batch["labels"][hidden].numpy(), range(len(SPECIAL))).any()
    assert 0.1 < hidden.float().sum() / (batch["input_ids"] >= len(SPECIAL)).float().sum() < 0.25


def imported(tree):
    """The roots of what a module imports when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_the_package_imports_with_torch_and_numpy_alone():
    folder = Path(shearling.data.__file__).parent
    for path in (*folder.glob("*.py"), *(folder.parent / "evaluation").glob("*.py")):
        roots = set(imported(ast.parse(path.read_text()))) - sys.stdlib_module_names
        assert roots <= {"numpy", "torch", "shearling"}, path.name
