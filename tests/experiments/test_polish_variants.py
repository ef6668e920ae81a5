"""The research on polish: every variant trains a tiny model, and attention maps are compared head by head."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import polish
from common import Lab
from polish_maps import Maps, map_distance

from tiny import batches_of, model_of

pytestmark = pytest.mark.slow  # the research is not the product: its tests wait for the slow checks

VARIANTS = {**polish.variants(), **polish.few_passes()}


@pytest.fixture(scope="module")
def students() -> OrderedDict[Any, Any]:
    return OrderedDict()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(name: str, lab: Lab, students: OrderedDict[Any, Any]) -> None:
    variant = replace(VARIANTS[name], passes=1, samples=64)
    row = polish.point(lab, students, "sst2", 0.3, 0, name, variant)
    assert row["after"] <= row["before"]
    assert row["passes"] == 1


def test_maps_are_those_of_the_attention() -> None:
    model = model_of("bert", "SequenceClassification")
    before = model.config._attn_implementation
    batch = batches_of(1, 4)[0]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    maps = Maps(model)
    with maps.watched(), torch.no_grad():
        for _ in range(2):  # a pass forgets the one before
            model(**inputs)
        expected = model(**inputs, output_attentions=True).attentions
        found = list(maps.caught)
    assert model.config._attn_implementation == before
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_distance_of_maps_head_by_head() -> None:
    """Against a loop over kept heads and real tokens; a layer without heads does not count."""
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(2, 3, 5, 5, generator=generator).softmax(-1) for _ in range(3)]
    kept = [torch.tensor([0, 2]), torch.tensor([], dtype=torch.long), torch.tensor([1])]
    student = [torch.randn(2, len(heads), 5, 5, generator=generator).softmax(-1) for heads in kept if len(heads)]
    real = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    layers = []
    for maps, found, heads in zip([teacher[0], teacher[2]], student, [kept[0], kept[2]], strict=True):
        each = [
            F.kl_div(found[b, i, q].log(), maps[b, head, q], reduction="sum")
            for b in range(2) for q in range(5) if real[b, q] for i, head in enumerate(heads)
        ]  # fmt: skip
        layers.append(torch.stack(each).mean())
    torch.testing.assert_close(
        map_distance(student, teacher, kept, real), torch.stack(layers).mean(), rtol=1e-3, atol=1e-4
    )
    assert map_distance([teacher[0]], [teacher[0]], [torch.arange(3)], real).abs() < 1e-6
