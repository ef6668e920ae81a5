"""The record for machines, and its text for people."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import shearling
from shearling.report.facts import facts_of, facts_of_comparison
from shearling.report.page import model_page
from shearling.report.record import Cost
from shearling.report.text import BAR, brief, show, words
from tiny import batches_of, model_of


@pytest.fixture(scope="module")
def pruned() -> shearling.Pruned:
    torch.set_num_threads(1)
    return shearling.prune(model_of("bert"), batches_of(), flops=0.5, params=0.6, seed=4)


def test_the_record_has_the_fields_of_the_design(pruned: shearling.Pruned) -> None:
    record = json.loads(json.dumps(pruned.report.to_json(), allow_nan=False))
    assert record["method"] == "surgeon"
    assert record["constraint"] == {"flops": 0.5, "params": 0.6}
    for name in ("flops", "params", "flops_model", "params_model"):
        cost = record[name]
        assert cost["ratio"] == pytest.approx(cost["pruned"] / cost["dense"])
        assert 0 < cost["ratio"] < 1
    assert record["flops"]["ratio"] <= 0.5
    assert record["params"]["ratio"] <= 0.6
    assert [set(layer) for layer in record["layers"]] == [{"heads", "filters"}] * 2
    assert record["dense_layers"] == [{"heads": 4, "filters": 48}] * 2
    stages = {k: v for k, v in record["seconds"].items() if k != "total"}
    assert {"measure", "order", "allocate", "shrink", "refit", "check"} <= stages.keys()
    assert record["seconds"]["total"] == pytest.approx(sum(stages.values()))
    assert record["seed"] == 4
    assert record["sample"]["examples"] == 16
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert record["samples"] == {"used": 16, "given": 16, "why": ""}
    assert record["polish"].keys() >= {"passes", "seconds", "examples", "why"}
    assert not record.keys() & {"evaluation", "latency", "timing"}


def test_costs_are_counted_from_the_pruned_model(pruned: shearling.Pruned) -> None:
    report = pruned.report
    assert report.params_model.pruned == sum(p.numel() for p in pruned.model.parameters())
    assert report.params_model.dense - report.params_model.pruned == report.params.dense - report.params.pruned
    assert [layer["heads"] for layer in report.layers] == [len(k) for k in pruned.kept[::2]]
    assert [layer["filters"] for layer in report.layers] == [len(k) for k in pruned.kept[1::2]]


def test_the_papers_stages_are_timed() -> None:
    seconds = shearling.prune(model_of("bert"), batches_of(1), flops=0.5, method="paper").report.seconds
    assert {"gradients", "search", "rearrangement", "shrink", "tuning"} <= seconds.keys()


OPTIONAL: dict[str, Any] = {
    "evaluation": {"task": "sst2", "metric": "accuracy", "dense": 92.5, "pruned": 91.25, "examples": 872},
    "agreement": {"kind": "equal", "value": 97.5, "examples": 200},
    "timing": {"device": "a CPU", "measured": 0.5, "dense_ms": 20.0, "pruned_ms": 10.0, "threads": 1},
    "polish": {"before": 0.5, "after": 0.25, "passes": 1, "seconds": 2.0, "examples": 64},
    "samples": {"used": 512, "given": 4096, "why": "more would not change the result"},
}


def test_what_was_measured_is_in_the_record_and_nothing_else(pruned: shearling.Pruned) -> None:
    report = replace(pruned.report, **dict.fromkeys(OPTIONAL))
    bare, full = report.to_json(), replace(report, **OPTIONAL).to_json()
    assert not OPTIONAL.keys() & bare.keys()
    assert full == json.loads(json.dumps(full)) == bare | OPTIONAL


def test_what_was_measured_is_shown_where_it_is_there(pruned: shearling.Pruned) -> None:
    text = words(facts_of(pruned.report.to_json() | OPTIONAL))
    for expected in (
        "accuracy, sst2", "92.50", "91.25", "-1.25", "872 examples", "agreement with dense", "97.50%",
        "predictions that are equal, 200 examples", "20.0 ms", "10.0 ms", "2.00x faster", "1 thread",
        "1 pass, over 64 examples, judge 0.5 -> 0.25, 2.0 s", "512 of 4,096: more would not change",
    ):  # fmt: skip
        assert expected in text
    assert "1 threads" not in text


@pytest.mark.parametrize(("spread", "told"), [(0.4, True), (0.05, False)])
def test_times_of_a_busy_machine_are_called_that(spread: float, told: bool, pruned: shearling.Pruned) -> None:
    timing = OPTIONAL["timing"] | {"spread": spread}
    record = pruned.report.to_json() | {"timing": timing}
    side = {"model": "a", "value": None, "bytes": 1, "params": 1, "macs": 1, "milliseconds": 10.0}
    compared = {
        "models": [side | {"spread": 0.1}, side | {"spread": 10 * spread}], "agreement": None, "batch": [1, 8],
        "device": "a CPU", "task": "sst2", "metric": "accuracy", "examples": 1,
    }  # fmt: skip
    for text in (words(facts_of(record)), words(facts_of_comparison(compared)), model_page(record)):
        assert (f"the machine is busy (± {spread:.0%})" in text) == told


def test_the_text(pruned: shearling.Pruned) -> None:
    text = str(pruned.report)
    assert text == str(pruned) == words(facts_of(pruned.report.to_json()))
    first = pruned.report.layers[0]
    assert f"{first['heads']}/4" in text
    assert f"{first['filters']}/48" in text
    for word in ("50% of its FLOPs and 60% of its parameters", "FLOPs, layers", "parameters, whole model", "measure"):
        assert word in text
    assert text.count("MACs") == 1


def test_a_terminal_has_the_same_words_in_colour(pruned: shearling.Pruned) -> None:
    record = pruned.report.to_json() | {"warnings": ["mind [the] gap"]}
    files = [io.StringIO(), io.StringIO()]
    show(facts_of(record), Console(file=files[0], force_terminal=True, width=120, color_system="standard"))
    show(facts_of(record), Console(file=files[1]))
    assert "\x1b[" in files[0].getvalue()
    told = [line.rstrip() for line in files[1].getvalue().splitlines()]
    assert told == words(facts_of(record)).splitlines()
    assert "  note: mind [the] gap" in told


def test_the_repr_is_short(pruned: shearling.Pruned) -> None:
    assert repr(pruned) == repr(pruned.report) == brief(pruned.report.to_json())
    for record in (pruned.report.to_json(), pruned.report.to_json() | OPTIONAL):
        lines = brief(record).splitlines()
        assert len(lines) <= 5
        assert all(len(line) < 160 for line in lines)
        assert "50% of its FLOPs" in lines[0]


def test_bars_are_full_empty_and_never_quite_either(pruned: shearling.Pruned) -> None:
    layers = [{"heads": 100, "filters": 0}, {"heads": 1, "filters": 50}, {"heads": 0, "filters": 99}]
    dense = [{"heads": 100, "filters": 100}] * 3
    record = pruned.report.to_json() | {"layers": layers, "dense_layers": dense}
    lines = words(facts_of(record)).splitlines()[2:5]
    assert [line.count("█") for line in lines] == [BAR, 1 + BAR // 2, BAR]


def test_nothing_of_nothing_is_all_of_it() -> None:
    assert Cost(0, 0).ratio == 1.0
