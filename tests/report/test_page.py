from __future__ import annotations

import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shearling
from shearling.report.facts import facts_of
from shearling.report.page import compare_page, model_page, sweep_page, top
from shearling.report.points import command_of, grouped, pick
from tiny import batches_of, model_of

VOID = {"meta", "br", "img", "line", "rect", "link", "input"}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects text and what would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return shearling.prune(model_of("bert"), batches_of(4, 8), flops=0.5).report.to_json()


def point(method: str, flops: float, value: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "flops": flops, "params": flops, "metric": "accuracy", "value": value, "seconds": 2.0,
        "seed": seed, "constraint": {"flops": flops}, "dense": 90.0, "reached": {"flops": flops, "params": flops},
        "examples": 64, "stages": {"measure": 1.0, "refit": 1.0}, "layers": [{"heads": 2, "filters": 30}], "notes": [],
    } | more  # fmt: skip


TOLD = {
    "dense": {
        "task": "sst2", "metric": "accuracy", "value": 90.0, "examples": 100, "layers": [{"heads": 4, "filters": 60}],
        "architecture": "BertForSequenceClassification",
    },
    "settings": {"model": "a model", "data": "train.jsonl", "task": "sst2", "samples": 64},
}  # fmt: skip


FLIPPED = {
    "changed": 3, "examples": 10, "lost": 2, "won": 1,
    "shown": [{"text": "not <good>", "right": "bad", "dense": "bad", "pruned": "good"}],
}  # fmt: skip


def test_the_page_of_a_model_is_whole_and_fetches_nothing(record: dict[str, Any]) -> None:
    outline = Outline(model_page(record | {"warnings": ["<script>alert(1)</script>"]}, directory="my-model"))
    text = " ".join(outline.text)
    assert outline.fetched == []
    assert "<script>alert(1)</script>" in text  # as words, not as a tag
    for layer in record["layers"]:
        assert f"{layer['heads']:,} of" in text
    assert 'shearling.load("my-model")' in text
    assert f"{record['flops']['ratio']:.1%}" in text


def test_the_page_of_a_sweep_has_every_point() -> None:
    results = [point("surgeon", 0.5, 89.5), point("surgeon", 0.3, 85.0), point("paper", 0.5, 80.0, model="models/p")]
    results[0]["timing"] = {"predicted": 0.6, "measured": 0.5, "device": "a device"}
    results[1]["notes"] = ["a note & more"]
    outline = Outline(sweep_page(results, TOLD, title="tiny <model>"))
    text = " ".join(outline.text)
    assert outline.fetched == []
    for words in ("89.50", "85.00", "80.00", "-10.00", "a note & more", "2.00x faster", "tiny <model>", "recommended"):
        assert words in text
    assert text.count("shearling prune 'a model'") == 3  # the command that makes each of them
    assert "--flops 0.5 --method surgeon" in text
    assert 'shearling.load("models/p")' in text


def test_the_axis_is_switched_without_a_script() -> None:
    timed = {"timing": {"measured": 0.5, "device": "a device"}, "megabytes": 40.0}
    page = sweep_page([point("surgeon", 0.5, 89.5, **timed), point("surgeon", 0.3, 85.0, **timed)], TOLD, title="tiny")
    assert "<script" not in page
    assert page.count('type="radio"') == page.count('class="axis"') == page.count("<svg") == 3
    assert page.count(" checked") == 1
    assert "input:nth-of-type(3):checked~.axis:nth-of-type(3)" in page


def test_a_layers_share_of_the_time_is_shown_where_it_is_known(record: dict[str, Any]) -> None:
    assert "dense time" not in model_page(record)
    timing = {"predicted": 0.5, "measured": 0.5, "device": "a CPU", "layer_time": [0.4, 0.35]}
    text = model_page(record | {"latency": timing})
    assert "dense time" in text
    assert "40.0%" in text


def test_two_models_and_the_examples_they_disagree_on() -> None:
    side = {"model": "a", "value": 90.0, "em": None, "bytes": 1e6, "params": 250_000, "macs": 1e9, "milliseconds": 2.0}
    found = {"task": "sst2", "metric": "accuracy", "examples": 10, "agreement": None, "batch": [1, 8],
             "device": "a CPU", "models": [side, side | {"model": "b", "value": 80.0}],
             "flipped": FLIPPED}  # fmt: skip
    text = " ".join(Outline(compare_page(found)).text)
    for words in ("90.00 → 80.00", "-10.00", "not <good>", "1.00x faster", "a and b", "3 of 10 predictions changed"):
        assert words in text


def test_a_notebook_shows_the_top(record: dict[str, Any]) -> None:
    shown = top(facts_of(record))
    Outline(shown)
    assert "of its FLOPs" in shown
    assert "<html" not in shown
    assert ":root" not in shown  # the notebook keeps its own colours
    assert shown.count('class="card"') == 4  # agreement, FLOPs, parameters, time


def test_the_best_point_is_the_smallest_within_one_point_on_average() -> None:
    results = [
        point("surgeon", 0.5, 89.9), point("surgeon", 0.3, 89.5), point("surgeon", 0.3, 88.3, seed=1),
        point("surgeon", 0.2, 89.5), point("surgeon", 0.2, 87.0, seed=1),
    ]  # fmt: skip
    best = pick(results)
    assert best is not None
    assert best["flops"] == 0.5  # 0.3 loses 1.1 on average
    assert pick([point("paper", 0.5, 80.0)]) is None
    assert [len(group) for group in grouped(results)] == [1, 2, 2]


def test_a_perplexity_wins_by_falling() -> None:
    low, high = point("surgeon", 0.5, 20.4), point("surgeon", 0.3, 40.0)
    results = [row | {"metric": "perplexity", "dense": 20.0} for row in (low, high)]
    best = pick(results)
    assert best is not None
    assert best["flops"] == 0.5


def test_examples_that_flipped_are_shown_with_their_text(record: dict[str, Any]) -> None:
    assert "prediction changed" not in model_page(record)
    text = " ".join(Outline(model_page(record | {"flipped": FLIPPED})).text)
    assert "2 from right to wrong, 1 from wrong to right" in text
    assert "not <good>" in text
    unlabelled = {"changed": 1, "examples": 4, "lost": None, "won": None,
                  "shown": [{"text": "a text", "right": "", "dense": "0", "pruned": "1"}]}  # fmt: skip
    page = model_page(record | {"flipped": unlabelled})
    assert "1 of 4 predictions changed" in page
    assert "from right to wrong" not in page
    points = [point("surgeon", 0.5, 89.5, flipped=FLIPPED), point("surgeon", 0.3, 85.0)]
    assert "".join(Outline(sweep_page(points, TOLD, title="tiny")).text).count("not <good>") == 1


def test_budgets_that_were_tried_are_on_the_page(record: dict[str, Any]) -> None:
    tried = [
        {"budget": 0.2, "value": None, "drop": None, "allowed": False, "note": "cannot be met"},
        {"budget": 0.4, "value": 86.0, "drop": 4.0, "allowed": False, "note": ""},
        {"budget": 0.6, "value": 89.5, "drop": 0.5, "allowed": True, "note": ""},
    ]
    drop = {"allowed": 1.0, "by": "flops", "metric": "accuracy", "dense": 90.0, "value": 89.5, "drop": 0.5,
            "examples": 100, "tried": tried}  # fmt: skip
    page = model_page(record | {"max_drop": drop})
    text = " ".join(Outline(page).text)
    for words in ("to lose at most 1 point.", "cannot be met", "too much", "within the limit", "chosen"):
        assert words in text
    assert page.count("<svg") == 1


def test_the_command_that_makes_a_model(record: dict[str, Any]) -> None:
    told = {"model": "my model", "data": "(list)", "task": None, "samples": "auto", "max_length": 64,
            "methods": {"surgeon": {"refit": False, "damp": 0.01, "precision": "float32"}}}  # fmt: skip
    made = command_of(record, told, "out")
    assert made.split("\\")[0] == "shearling prune 'my model' "
    assert "--data FILE --samples auto" in made
    assert "--set refit=False --max-length 64" in made
    assert "damp" not in made  # its default
    assert "precision" not in made  # what the device had
    assert made in " ".join(Outline(model_page(record | {"command": made})).text)


def test_the_command_has_every_option_that_was_given(record: dict[str, Any]) -> None:
    asked = record | {"constraint": {"latency": 0.5}}
    told = {
        "model": "model", "data": "rows.csv", "task": "classification", "samples": 64, "length": 30.0, "seq_len": 40,
        "columns": [["my text", "other"], "answer"], "shape": "stock", "multiple_of": 16, "batch_size": 8,
        "prefix": "summarize: ", "dtype": "bfloat16", "table": True, "table_file": Path("my table.json"),
    }  # fmt: skip
    given = shlex.split(command_of(asked, told, "out").replace("\\\n", " "))
    for option, value in (
        ("--text-columns", "my text,other"), ("--label-column", "answer"), ("--flops-length", "30.0"),
        ("--shape", "stock"), ("--multiple-of", "16"), ("--batch-size", "8"), ("--seq-len", "40"),
        ("--prefix", "summarize: "), ("--dtype", "bfloat16"), ("--table", "my table.json"), ("--latency", "0.5"),
    ):  # fmt: skip
        assert given[given.index(option) + 1] == value
    of_sweep = command_of(asked, told | {"table": "its digest", "table_file": None}, "out")
    assert "--table TABLE" in of_sweep
    assert "--table" not in command_of(record, told, "out")  # of use with a latency only
