"""The record for machines and the picture for people."""

from __future__ import annotations

import json

import pytest
import torch

import shearling
from shearling.report.record import Cost, describe, layer_bars, short
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
    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or torch.__version__


def test_costs_are_counted_from_the_pruned_model(pruned: shearling.Pruned) -> None:
    report = pruned.report
    assert report.params_model.pruned == sum(p.numel() for p in pruned.model.parameters())
    assert report.params_model.dense - report.params_model.pruned == report.params.dense - report.params.pruned
    assert [layer["heads"] for layer in report.layers] == [len(k) for k in pruned.kept[::2]]
    assert [layer["filters"] for layer in report.layers] == [len(k) for k in pruned.kept[1::2]]


def test_the_papers_stages_are_timed() -> None:
    seconds = shearling.prune(model_of("bert"), batches_of(1), flops=0.5, method="paper").report.seconds
    assert {"gradients", "search", "rearrangement", "shrink", "tuning"} <= seconds.keys()


def test_the_picture(pruned: shearling.Pruned) -> None:
    text = str(pruned)
    assert text == describe(pruned.report.to_json())
    first = pruned.report.layers[0]
    assert f"{first['heads']}/4" in text
    assert f"{first['filters']}/48" in text
    for word in ("flops 0.5", "params 0.6", "MACs, layers", "parameters, model", "seconds:", "measure"):
        assert word in text


def test_bars_are_full_empty_and_never_quite_either() -> None:
    dense = [{"heads": 100, "filters": 100}] * 3
    lines = layer_bars([{"heads": 100, "filters": 0}, {"heads": 1, "filters": 50}, {"heads": 0, "filters": 99}], dense)
    assert [line.count("█") for line in lines] == [24, 13, 24]


def test_numbers_in_short() -> None:
    assert [short(v) for v in (0, 12, 1234, 2.5e6, 3e9, 4e12)] == ["0", "12", "1.23K", "2.5M", "3G", "4T"]
    assert Cost(0, 0).ratio == 1.0
