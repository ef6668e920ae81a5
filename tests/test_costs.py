"""Costs by formula against what a run counts and what the modules hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from families import tiny_model
from shearling.costs import (
    Limit,
    count_macs,
    count_params,
    flops_limit,
    macs_per_unit,
    parameters,
    params_limit,
    ratio_of,
    sequence_lengths,
    whole_macs,
)
from shearling.errors import ConstraintError
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.sample.read import sample_of
from tiny import batches_of, model_of

KEPT = {
    "dense": [range(4), range(48), range(4), range(48)],
    "some": [[1, 3], range(17), [0], range(30)],
    "whole sublayers gone": [[], range(10), [2], []],
}
kept_units = pytest.mark.parametrize("units", KEPT.values(), ids=KEPT)


def shrunk(model: Any, units: list[Any]) -> Any:
    return shrink(model, [torch.tensor(list(u), dtype=torch.long) for u in units])


def full_length(size: int = 1, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run_macs(model: Any, inputs: dict[str, torch.Tensor], module: str = "Global") -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.requires_grad_(False)(**inputs)
    return sum(counter.flop_counts[module].values()) // 2


def test_the_formulas_of_the_paper() -> None:
    structure = structure_of(model_of("bert"))
    S, D, d = 10.5, 32, 8
    head, filter_ = structure.sublayers[:2]
    assert macs_per_unit(head, S) == 4 * S * D * d + 2 * S**2 * d
    assert macs_per_unit(filter_, S) == 2 * S * D
    assert head.params_per_unit == 4 * D * d + 3 * d
    assert filter_.params_per_unit == 2 * D + 1


@kept_units
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_macs_by_formula_are_those_a_run_counts(units: list[Any], family: str) -> None:
    model = shrunk(model_of(family, attn_implementation="eager"), units)
    structure = structure_of(model)
    encoder = {
        "bert": "BertForSequenceClassification.bert.encoder",
        "distilbert": "DistilBertForSequenceClassification.distilbert.transformer",
    }
    for size in (1, 3):
        counted = run_macs(model, full_length(size), encoder[family])
        assert count_macs(structure, [12.0] * 4) * size == counted


@kept_units
def test_macs_by_formula_are_those_of_the_modules(units: list[Any]) -> None:
    model = shrunk(model_of("bert"), units)
    S = 12
    linear = sum(m.weight.numel() for m in model.bert.encoder.modules() if isinstance(m, nn.Linear))
    products = sum(2 * S**2 * 8 * len(list(u)) for u in units[::2])
    assert count_macs(structure_of(model), [float(S)] * 4) == S * linear + products


@kept_units
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_parameters_that_go_are_those_that_are_counted(units: list[Any], family: str) -> None:
    dense = model_of(family)
    small = shrunk(dense, units)
    counted = count_params(structure_of(dense)) - count_params(structure_of(small))
    assert counted == parameters(dense) - parameters(small)


def test_lengths_are_the_mean_number_of_real_tokens() -> None:
    structure = structure_of(model_of("bert"))
    batches = batches_of(3, 4)
    mean = sum(int(b["attention_mask"].sum()) for b in batches) / 12
    assert sequence_lengths(structure, sample_of(batches)) == [pytest.approx(mean)] * 4
    bare = [{"input_ids": b["input_ids"]} for b in batches]
    assert sequence_lengths(structure, sample_of(bare)) == [12.0] * 4
    mixed = [*bare, {"input_ids": bare[0]["input_ids"][:, :4]}]
    assert sequence_lengths(structure, sample_of(mixed)) == [10.0] * 4


def test_the_whole_model_is_counted_by_running_it() -> None:
    model = model_of("bert", attn_implementation="sdpa")
    sample = sample_of([full_length(length=7)])
    for length in (5, 12):
        eager = model_of("bert", attn_implementation="eager")
        assert whole_macs(model, sample.some(1), {"input_ids": float(length)}) == run_macs(
            eager, full_length(length=length)
        )
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("length", [5, 12, 20])
def test_a_head_that_looks_for_the_end_token_finds_it_at_every_length(length: int) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
    model = transformers.T5ForSequenceClassification(transformers.T5Config(**sizes, **ends)).eval()
    batch = full_length()
    batch["input_ids"][:, -1] = 1
    assert whole_macs(model, sample_of([batch]).some(1), {"input_ids": float(length)}) > 0


@pytest.mark.parametrize("length", [18, 24, 40])
def test_the_places_of_an_image_are_kept_at_every_length(length: int) -> None:
    model = tiny_model("gemma3")
    ids = torch.cat([torch.randint(5, 50, (1, 10)), torch.full((1, 4), 59), torch.randint(5, 50, (1, 10))], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 16, 16)}
    counted = whole_macs(model, sample_of([batch]).some(1), {"input_ids": float(length)})
    assert counted - whole_macs(model, sample_of([batch]).some(1), {"input_ids": float(length - 1)}) > 0


def test_counting_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert", attn_implementation="sdpa").train()
    before = model.config.to_dict()
    monkeypatch.setattr(model, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole_macs(model, sample_of(batches_of(1)).some(1), {"input_ids": 12.0})
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_limits() -> None:
    structure = structure_of(model_of("bert"))
    flops = flops_limit(structure, [12.0] * 4, 0.5)
    params = params_limit(structure, 0.25)
    assert flops.dense == count_macs(structure, [12.0] * 4)
    assert params.dense == count_params(structure)
    assert flops.budget == 0.5 * flops.dense
    half = [2, 24, 2, 24]
    assert flops.spent(half) == pytest.approx(flops.budget)
    assert flops.holds(half)
    assert not flops.holds([3, 24, 2, 24])
    assert not params.holds(half)
    assert params.holds([1, 12, 1, 12])


def test_what_pruning_cannot_touch_counts_in_the_ratio() -> None:
    limit = Limit("latency", 0.5, (np.array([0.0, 3.0, 6.0]),), fixed=2.0)
    assert limit.dense == 8.0
    assert limit.budget == 2.0
    assert not limit.holds([1])


@pytest.mark.parametrize("value", [0, -0.5, 1.01, float("nan"), float("inf"), "half", None, [0.5]])
def test_ratios_outside_the_range(value: Any) -> None:
    with pytest.raises(ConstraintError, match="flops="):
        ratio_of("flops", value)


@pytest.mark.parametrize("value", [1, 1e-9, 0.5, "0.25"])
def test_ratios(value: Any) -> None:
    assert ratio_of("flops", value) == float(value)


def test_inputs_of_a_run_are_not_changed() -> None:
    batch = batches_of(1)[0]
    sample = sample_of([batch])
    before = sample.some(1)
    whole_macs(model_of("bert"), before, {"input_ids": 30.0})
    assert torch.equal(before.inputs["attention_mask"], sample.some(1).inputs["attention_mask"])
