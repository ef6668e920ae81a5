import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.data import Rows, encode
from shearling.data.squad import Answer, best_spans, decode, make_windows, read_answers, span_labels
from shearling.errors import DataError, ModelError

from .tiny import bert_config, bert_tokenizer

SHORT = "anna lives in paris"
LONG = " ".join(f"{i % 10}" for i in range(40)) + " anna lives in paris . the river is in the city ."


def windows_of(*pairs, max_length=24, stride=8):
    questions, contexts = zip(*pairs, strict=True)
    return make_windows(questions, contexts, bert_tokenizer(), max_length=max_length, stride=stride)


def spoken(windows, index, first, last):
    return bert_tokenizer().decode(windows.inputs.tokens["input_ids"][index][first : last + 1])


def test_windows_cover_the_context_and_overlap():
    windows = windows_of(("where is anna ?", SHORT), ("who is good ?", LONG))
    assert windows.example.tolist() == [0] + [1] * (len(windows) - 1)
    assert all(len(ids) <= 24 for ids in windows.inputs.tokens["input_ids"])
    spans = [(offsets[0, 0], offsets[-1, 1]) for offsets in windows.offsets[1:]]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(LONG)
    assert all(after[0] < before[1] for before, after in itertools.pairwise(spans))
    for offsets, (first, last) in zip(windows.offsets, windows.context, strict=True):
        assert len(offsets) == last - first
    assert windows.null.tolist() == [0] * len(windows)


def test_gold_spans_are_found_in_the_windows_that_hold_them():
    start = LONG.index("anna")
    answers = [[Answer("anna lives", start)], []]
    windows = windows_of(("who ?", LONG), ("when ?", LONG))
    labels = span_labels(windows, answers)
    held = 0
    for index, (first, last) in enumerate(zip(labels["start_positions"], labels["end_positions"], strict=True)):
        offsets = windows.offsets[index]
        whole = offsets[0, 0] <= start and offsets[-1, 1] >= start + len("anna lives")
        if windows.example[index] == 0 and whole:
            assert spoken(windows, index, first, last) == "anna lives"
            held += 1
        else:
            assert (first, last) == (0, 0)
    assert held


@pytest.mark.parametrize(
    ("question", "context"),
    [("", ""), ("who ?", ""), ("", LONG), ("who is good ? " * 200, LONG), ("who ?", "good " * 20_000)],
)
def test_extreme_questions_and_contexts(question, context):
    windows = windows_of((question, context), max_length=32)
    assert all(len(ids) <= 32 for ids in windows.inputs.tokens["input_ids"])
    logits = torch.randn(len(windows), 32, 2)
    (text,) = decode(logits, windows, [context], may_be_null=False)
    assert text in context
    assert bool(text) == bool(context)


def test_slow_tokenizers_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="fast tokenizer"):
        make_windows(["q"], ["c"], Slow(), max_length=24, stride=8)
    with pytest.raises(DataError, match="no room"):
        windows_of(("q", "c"), max_length=5)


@st.composite
def scored_windows(draw):
    tokens, longest = draw(st.integers(1, 14)), draw(st.integers(1, 6))
    logit = st.integers(-5, 5).map(float)
    start, end = (draw(st.lists(logit, min_size=tokens, max_size=tokens)) for _ in range(2))
    first = draw(st.integers(0, tokens))
    return start, end, (first, draw(st.integers(first, tokens))), longest


@given(scored_windows())
@settings(deadline=None)
def test_best_spans_agree_with_brute_force(case):
    start, end, (low, high), longest = case
    score, first, last = (
        part.item()
        for part in best_spans(torch.tensor([start]), torch.tensor([end]), torch.tensor([[low, high]]), longest)
    )
    spans = [(i, j) for i in range(low, high) for j in range(i, min(high, i + longest))]
    if not spans:
        assert score == -np.inf
        return
    assert score == max(start[i] + end[j] for i, j in spans)
    assert (first, last) in spans
    assert start[first] + end[last] == score


def loud(windows, *spans):
    """Logits that shout (window, first, last, height)."""
    longest = max(len(ids) for ids in windows.inputs.tokens["input_ids"])
    logits = torch.zeros(len(windows), longest, 2)
    for index, first, last, height in spans:
        logits[index, first, 0] += height
        logits[index, last, 1] += height
    return logits


def test_the_best_window_answers():
    windows = windows_of(("who ?", LONG), ("where ?", SHORT))
    low, high = windows.context[1]
    logits = loud(windows, (0, 5, 5, 1.0), (1, low, low + 1, 2.0))
    expected = LONG[windows.offsets[1][0, 0] : windows.offsets[1][1, 1]]
    assert high > low + 1
    assert decode(logits, windows, [LONG, SHORT], may_be_null=False)[0] == expected


def test_no_answer_wins_only_where_it_may_and_only_if_every_window_says_so():
    windows = windows_of(("who ?", LONG))
    last = len(windows) - 1
    first = windows.context[last, 0]
    silent = loud(windows, *((index, 0, 0, 9.0) for index in range(len(windows))), (last, first, first, 5.0))
    assert decode(silent, windows, [LONG], may_be_null=True) == [""]
    assert decode(silent, windows, [LONG], may_be_null=False) != [""]
    split = loud(windows, (0, 0, 0, 9.0), (last, first, first, 5.0))  # one window has no answer, another has
    assert decode(split, windows, [LONG], may_be_null=True) != [""]


@pytest.mark.parametrize(
    "value",
    [
        [{"text": "anna", "answer_start": 0}],
        {"text": ["anna"], "answer_start": [0]},
        json.dumps({"text": ["anna"], "answer_start": [0]}),
    ],
)
def test_answers_in_every_format(value):
    assert read_answers(Rows({"answers": [value]}), "answers") == [[Answer("anna", 0)]]


@pytest.mark.parametrize("value", [None, [], {"text": [], "answer_start": []}, "[]"])
def test_no_answers_in_every_format(value):
    assert read_answers(Rows({"answers": [value]}), "answers") == [[]]


@pytest.mark.parametrize("value", ["anna", [{"text": "anna"}], {"text": ["a"], "answer_start": []}, 3, ["anna"]])
def test_answers_that_are_none(value):
    with pytest.raises(DataError, match=r"row 1 .*holds no answers"):
        read_answers(Rows({"answers": [value]}), "answers")


def test_encode_gives_span_labels():
    answers = [[{"text": "paris", "answer_start": SHORT.index("paris")}], []]
    rows = Rows({"question": ["where ?", "who ?"], "context": [SHORT, LONG], "answers": answers})
    batches = encode(rows, bert_tokenizer(), "squad_v2", model_config=bert_config(), max_length=24)
    assert set(batches[0]) == {"input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions"}
    (found,) = [i for i in range(len(batches[0]["input_ids"])) if batches[0]["start_positions"][i] > 0]
    at = batches[0]["start_positions"][found]
    assert bert_tokenizer().decode(batches[0]["input_ids"][found, at]) == "paris"
    few = encode(rows, bert_tokenizer(), "squad_v2", model_config=bert_config(), max_length=24, samples=2)
    assert sum(len(batch["input_ids"]) for batch in few) == 2
