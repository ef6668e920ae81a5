"""Profiling: which models are run, and that the right seconds come out of a clock that we make ourselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from families import tiny_model
from shearling.errors import InputError
from shearling.latency import profile as module
from shearling.latency.inputs import example_inputs
from shearling.latency.profile import profile
from shearling.latency.table import check_fits
from shearling.latency.timing import Timing
from shearling.latency.variants import counts_to_time, shapes_of, shortened, with_units
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from tiny import batches_of, inputs_of, model_of


def made_up(sizes: list[dict[str, int]], *, host: bool = False) -> float:
    """What a model with these units takes on our clock: overheads, a plateau of filters, and 5 for the rest."""
    total = 5.0
    for layer in sizes:
        total += 2.0 + 3.0 * layer["heads"] if layer["heads"] else 0.0
        total += 1.0 + 0.25 * max(8, layer["filters"]) if layer["filters"] else 0.0
    return (10 + 1.0 * sum(bool(n) for layer in sizes for n in layer.values())) if host else total


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run takes what `made_up` says, in milliseconds."""

    monkeypatch.setattr(module, "wall", lambda run, device: 1e-3 * made_up(structure_of(run.func).sizes))


def test_the_table_is_what_the_clock_says(clock: None) -> None:
    structure = structure_of(model_of("bert"))
    table = profile(structure.model, batch_size=2, seq_len=8, budget=0.1)
    check_fits(table, structure)
    assert table.whole == pytest.approx(1e-3 * made_up(structure.sizes))
    assert table.fixed == pytest.approx(5e-3)
    for counts in ([4, 48, 4, 48], [1, 8, 3, 16], [0, 0, 2, 48], [0, 1, 0, 0]):
        sizes = [{"heads": counts[0], "filters": counts[1]}, {"heads": counts[2], "filters": counts[3]}]
        assert table.predict(structure, counts) == pytest.approx(1e-3 * made_up(sizes))
    assert table.settings["depth"] is not None  # the clock said that all layers take too long


def test_host_and_device_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = itertools.cycle([1.0, 3.0, 0.5])  # of the host, which is not the same from one visit to the next

    def both_sides(run: Any, device: torch.device, reference: Any) -> Timing:
        assert structure_of(reference.func).sizes == [{"heads": 0, "filters": 0}] * 2
        sizes, now = structure_of(run.func).sizes, next(speeds)
        return Timing(1e-3 * made_up(sizes), now * 1e-3 * made_up(sizes, host=True), now * 10e-3)

    monkeypatch.setattr(module, "both_sides", both_sides)
    monkeypatch.setattr(module, "LEAST_RUNS", 1)
    monkeypatch.setattr(module, "VISIT", 0.0)
    monkeypatch.setattr(module._Bench, "two_sided", True)
    structure = structure_of(model_of("bert"))
    table = profile(structure.model, batch_size=2, seq_len=8, budget=0.1)
    assert table.whole_launch == pytest.approx(14e-3)
    assert table.fixed_launch == pytest.approx(10e-3)
    assert table.predict(structure, [1, 0, 0, 0]) == pytest.approx(11e-3)  # the host is the slower one here
    assert table.predict(structure, [4, 48, 4, 48]) == pytest.approx(1e-3 * made_up(structure.sizes))


def test_the_caller_sees_nothing_of_it(clock: None) -> None:
    model = model_of("bert").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    profile(model, batch_size=1, seq_len=8, budget=0.1)
    assert model.training
    assert len(model.bert.encoder.layer) == 2
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not hasattr(model.config, "quantization_config")


def test_layers_that_differ_share_their_times(clock: None) -> None:
    dense = model_of("bert")
    kept = [torch.arange(n) for n in (3, 20, 1, 48)]
    structure = structure_of(shrink(dense, kept))
    table = profile(structure.model, batch_size=2, seq_len=8, budget=0.1)
    assert table.layers == [{"heads": 3, "filters": 20}, {"heads": 1, "filters": 48}]
    assert table.predict(structure, [3, 20, 1, 48]) == pytest.approx(1e-3 * made_up(structure.sizes))
    assert table.predict(structure, [2, 16, 0, 16]) == pytest.approx(
        1e-3 * made_up([{"heads": 2, "filters": 16}, {"heads": 0, "filters": 16}])
    )


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(InputError, match="CUDA graphs need an NVIDIA GPU, and the model is on cpu"):
        profile(model_of("bert"), runtime="graphs")
    with pytest.raises(InputError, match="no runtime 'fast'; choose from eager, graphs"):
        profile(model_of("bert"), runtime="fast")


def test_for_real() -> None:
    model = model_of("distilbert")
    table = profile(model, batch_size=2, seq_len=8, threads=1, budget=0.2)
    assert table.threads == 1
    assert 0 < table.fixed <= table.whole < 10
    assert [entry.kind for entry in table.sublayers] == ["heads", "filters"]
    assert table.sublayers[0].units == [0, 1, 2, 3, 4]
    assert str(table).startswith("distilbert on ")


def test_variants_share_memory_and_leave_the_model_alone() -> None:
    structure = structure_of(model_of("bert"))
    heads, filters = shapes_of(structure)
    short = shortened(structure, 1)
    variant = with_units(short, filters, 16)
    assert structure_of(variant).sizes == [{"heads": 0, "filters": 16}]
    assert structure.sizes == [{"heads": 4, "filters": 48}] * 2
    own = structure.model.get_input_embeddings().weight
    assert variant.get_input_embeddings().weight.data_ptr() == own.data_ptr()
    assert structure_of(with_units(structure, heads, 3)).sizes == [{"heads": 3, "filters": 0}] * 2


@pytest.mark.parametrize("units", [1, 5, 48, 100, 1536, 3072, 11008])
def test_grid(units: int) -> None:
    counts = counts_to_time("filters", units)
    assert {0, 1, units} <= set(counts)
    assert counts == sorted(set(counts))
    assert len(counts) <= 70
    if 64 <= units <= 3072:
        assert set(range(0, units + 1, 64)) <= set(counts)
        assert {8, 16, 24} <= set(counts)
    assert counts_to_time("heads", 12) == list(range(13))


def test_inputs_without_a_mask_and_with_the_right_shape() -> None:
    inputs = example_inputs(model_of("roberta"), 3, 10)
    assert {k: tuple(v.shape) for k, v in inputs.items()} == {"input_ids": (3, 10)}
    with pytest.raises(InputError, match="40 positions"):
        example_inputs(model_of("bert"), 1, 41)
    with pytest.raises(InputError, match=r"\d+ positions"):  # RoBERTa's begin after the padding index
        example_inputs(model_of("roberta"), 1, model_of("roberta").config.max_position_embeddings)
    with pytest.raises(InputError, match="batch size of 0"):
        example_inputs(model_of("bert"), 0, 4)


@pytest.mark.parametrize("family", ["moonshine", "wav2vec2", "siglip2", "siglip2_vision_model"])
def test_sound_and_patches(family: str) -> None:
    model = tiny_model(family)
    with torch.inference_mode():
        model(**example_inputs(model, 2, 12))


def test_own_inputs() -> None:
    inputs = inputs_of(batches_of(1)[0])
    table = profile(model_of("bert"), budget=0.1, threads=1, inputs=inputs)
    assert (table.batch_size, table.seq_len) == tuple(inputs["input_ids"].shape)
