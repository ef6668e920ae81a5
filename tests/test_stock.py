"""Stock shapes, end to end: dials by brute force, layers that go, what is refused, loading without shearling."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shearling
from families import outputs_of, tiny_batches, tiny_model
from latency.tables import table_of
from shearling import pipeline
from shearling.engine.bridges import divergences_without
from shearling.engine.distance import divergences
from shearling.errors import ConstraintError, InputError, UnsupportedArchitecture
from shearling.latency import meet
from shearling.methods import stock
from shearling.models.shrink import Cut
from shearling.models.stock import all_layers, less, removable_layers, without_layers
from shearling.models.structure import structure_of
from shearling.pipeline import measure
from shearling.sample.read import sample_of
from shearling.target import Target
from tiny import batches_of, inputs_of, model_of
from warm import python

ABROAD = """
import json, sys, torch, transformers
assert "shearling" not in sys.modules
sys.modules["shearling"] = None  # it cannot be imported
for name, cls in json.loads(sys.argv[1]).items():
    model, info = getattr(transformers, cls).from_pretrained(f"{sys.argv[2]}/{name}", output_loading_info=True)
    assert not any(info.values()), info
    inputs = torch.load(f"{sys.argv[2]}/{name}.inputs")
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    torch.save({k: v for k, v in outputs.items() if isinstance(v, torch.Tensor)}, f"{sys.argv[2]}/{name}.outputs")
"""
CLASSES = {
    "bert": "AutoModelForSequenceClassification",
    "mpnet": "AutoModel",
    "llama": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
}


def test_loads_where_shearling_cannot_be_imported(tmp_path: Path) -> None:
    wanted = {}
    for name in CLASSES:
        pruned = shearling.prune(tiny_model(name), tiny_batches(name), flops=0.45, shape="stock", progress=False)
        pruned.save(tmp_path / name)
        assert not list((tmp_path / name).glob("*.py"))
        inputs = inputs_of(tiny_batches(name)[0])
        torch.save(inputs, tmp_path / f"{name}.inputs")
        wanted[name] = outputs_of(pruned.model, inputs)
    done = python(ABROAD, json.dumps(CLASSES), str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = ("logits", "start_logits", "end_logits", "text_embeds", "image_embeds", "last_hidden_state")
    for name, expected in wanted.items():
        found = torch.load(tmp_path / f"{name}.outputs")
        found = torch.cat([found[n].flatten(1).float() for n in names if n in found], 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def divergence(dense: Any, pruned: Any, batches: Any) -> float:
    """The mean over all examples."""
    with torch.no_grad():
        each = [divergences(dense, dense(**b.inputs), pruned(**b.inputs), b) for b in batches]
    return float(torch.cat(each).mean())


def widths(model: Any) -> list[dict[str, int]]:
    return structure_of(model).sizes


@pytest.fixture(scope="module")
def deep() -> Any:
    return model_of("bert", num_hidden_layers=4)


def best_by_brute_force(plan: Any, asked: dict[str, float], groups: Sequence[int] = ()) -> list[list[int]]:
    """Per depth that can meet the budgets, the counts of the sublayers with the least loss by the curves."""
    limits = Target(**asked).limits(plan.structure, plan.lengths)
    losses = plan.method.losses(plan.evidence, plan.structure, plan.lengths)
    found = []
    for removal in plan._layer_order:
        totals = []
        for heads, width in itertools.product(groups or [0], range(1, 49)):
            counts = [
                0 if s.depth not in removal.layers[0] else width if s.kind == "filters" else heads or s.units
                for s in plan.structure.sublayers
            ]
            if all(limit.holds(counts) for limit in limits):
                units = zip(losses, counts, strict=True)
                totals.append((sum(loss[n] for loss, n in units if n), counts))
        if totals:
            found.append(min(totals)[1])
    return found


def check_depth(plan: Any, pruned: Any, shapes: list[list[int]]) -> None:
    """The shape is the best of its depth, and those of one layer more or less are no better than examples can tell."""
    chosen = shapes.index([len(units) for units in pruned.kept])

    def losses(counts: list[int]) -> torch.Tensor:
        stay = tuple(sorted({s.depth for s, n in zip(plan.structure.sublayers, counts, strict=True) if n}))
        found: torch.Tensor = plan._layer_order.losses_of(Cut(plan.method.kept(plan.evidence, counts), (stay,)))
        return found

    assert pruned.report.stock["loss"] == losses(shapes[chosen]).mean()
    for near in shapes[max(chosen - 1, 0) : chosen + 2]:
        excess = losses(shapes[chosen]) - losses(near)
        assert excess.mean() <= excess.std(correction=0) / len(excess) ** 0.5


@pytest.mark.parametrize("asked", [{"flops": 0.7}, {"flops": 0.45}, {"params": 0.3}, {"flops": 0.6, "params": 0.5}])
def test_the_dials_are_the_best_of_all(deep: Any, asked: dict[str, float]) -> None:
    plan = measure(deep, batches_of(), method="surgeon")
    pruned = plan.prune(**asked, shape="stock", multiple_of=1)
    check_depth(plan, pruned, best_by_brute_force(plan, asked))
    record = pruned.report.to_json()
    assert all(record[kind]["ratio"] <= ratio for kind, ratio in asked.items())
    assert len({tuple(sizes.items()) for sizes in widths(pruned.model)}) == 1


def test_key_value_groups_go_too() -> None:
    plan = measure(tiny_model("llama"), tiny_batches("llama"), method="surgeon")
    pruned = plan.prune(params=0.4, shape="stock", multiple_of=1)
    check_depth(plan, pruned, best_by_brute_force(plan, {"params": 0.4}, groups=(1, 2)))
    config = pruned.model.config
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.head_dim == 8


@pytest.mark.parametrize("start", range(5))
def test_trials_find_the_least_loss_from_any_depth(start: int) -> None:
    losses = [0.5, 0.3, 0.2, 0.4, 0.9]
    tried: set[int] = set()

    def loss(number: int) -> torch.Tensor:
        tried.add(number)
        return torch.full((8,), losses[number]) if 0 <= number < len(losses) else stock.NONE

    assert stock._fewest(start, loss) == 2
    assert tried <= {*range(min(start, 2) - 1, max(start, 2) + 2)}


def test_of_what_the_examples_cannot_tell_apart_the_fewest_layers_are_taken() -> None:
    noise = torch.tensor([0.3, -0.3] * 8)
    losses = [torch.full((16,), 0.20), 0.22 + noise, 0.26 + noise, 0.90 + noise]  # the standard error is 0.075
    assert stock._fewest(0, lambda i: losses[i] if 0 <= i < 4 else stock.NONE) == 2
    quiet = [one.mean().expand(16) for one in losses]
    assert stock._fewest(0, lambda i: quiet[i] if 0 <= i < 4 else stock.NONE) == 0


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_layer_that_does_nothing_goes_first_and_costs_nothing(idle: int) -> None:
    model = model_of("llama", head="CausalLM", num_hidden_layers=3, num_key_value_heads=2, pad_token_id=1)
    layer = model.model.layers[idle]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    plan = measure(model, batches_of(labels="none"), method="surgeon")
    pruned = plan.prune(flops=0.67, shape="stock")
    assert pruned.report.stock is not None
    assert pruned.report.stock["layers"] == [[n for n in range(3) if n != idle]]
    assert pruned.report.stock["loss"] == pytest.approx(0, abs=1e-4)
    assert pruned.report.layers[idle] == {"heads": 0, "filters": 0}
    assert pruned.model.config.num_hidden_layers == 2
    assert divergence(model, pruned.model, plan.sample.cut(10**6)) == pytest.approx(0, abs=1e-3)


def test_the_layer_after_a_gap_makes_up_for_it(deep: Any) -> None:
    """The repair must aim at the teacher's own layer: it brings the outputs nearer, on the examples it has seen."""
    batches = batches_of(24, labels="none")
    plan = measure(deep, batches, method="surgeon")
    found = plan.prune(flops=0.5, shape="stock")
    assert any(not len(units) for units in found.kept)  # a layer is gone
    raw = measure(deep, batches, method=shearling.Surgeon(refit=False)).prune(flops=0.5, shape="stock")
    there, here = (divergence(deep, one.model, plan.sample.cut(10**6)) for one in (raw, found))
    assert here < 0.5 * there


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "mpnet"])
def test_layers_are_judged_as_a_copy_without_them_is(family: str) -> None:
    """With maps that change nothing, the dense model without its layers is the model that lacks them."""
    dense = structure_of(tiny_model(family))
    options = [less(all_layers(dense), one) for one in removable_layers(dense)]
    batches = sample_of(tiny_batches(family)).cut(10**6)
    width = dense.model.config.hidden_size
    maps = [[(torch.eye(width), None)] * len(stack.layers) for stack in dense.stacks]
    found = divergences_without(dense, options, maps, batches, "float32")
    copies = [without_layers(dense, layers).model for layers in options]
    assert len(options) >= 2
    assert found == pytest.approx([divergence(dense.model, one, batches) for one in copies], rel=1e-3)


def test_the_least_that_can_be_reached_is_named_and_can_be_reached(deep: Any) -> None:
    refused = r"flops=0\.01 cannot be met by a stock shape.*fewer heads.*at least 0\.\d\d"
    with pytest.raises(ConstraintError, match=refused) as error:
        shearling.prune(deep, batches_of(), flops=0.01, shape="stock", progress=False)
    least = float(str(error.value).partition("at least ")[2][:4])
    pruned = shearling.prune(deep, batches_of(), flops=least, shape="stock", multiple_of=1, progress=False)
    assert pruned.report.flops.ratio <= least


def test_what_cannot_be_stock(deep: Any) -> None:
    with pytest.raises(InputError, match="shape='oval' is not known; there are uneven and stock"):
        shearling.prune(deep, batches_of(), flops=0.5, shape="oval", progress=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="losses that surgeon estimates; paper has none"):
        shearling.prune(deep, batches_of(), flops=0.5, shape="stock", method="paper", progress=False)
    with pytest.raises(UnsupportedArchitecture, match="swin has no stock shapes"):
        shearling.prune(tiny_model("swin"), tiny_batches("swin"), flops=0.5, shape="stock", progress=False)


def test_a_latency_is_met(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(structure_of(deep))

    def ratio(dense: Any, pruned: Any, table: Any, **_: bool) -> float:
        sizes = widths(pruned) + [{"heads": 0, "filters": 0}] * (4 - len(widths(pruned)))
        return table.predict(structure_of(dense), [n for one in sizes for n in one.values()]) / table.dense

    monkeypatch.setattr(meet, "measure_ratio", ratio)
    pruned = shearling.prune(
        deep, batches_of(), latency=0.4, flops=0.6, table=table, correct=False, shape="stock", progress=False
    )
    record = pruned.report.to_json()
    assert record["latency"]["measured"] <= 0.4
    assert record["flops"]["ratio"] <= 0.6
    assert record["shape"] == "stock"


def test_uneven_shapes_are_tried_once_however_often_the_table_is_corrected(
    deep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(meet, "device_name", lambda _: "here")
    monkeypatch.setattr(meet, "measure_ratio", lambda *_, **__: 0.9)
    monkeypatch.setattr(pipeline, "uneven_loss", lambda *given, **_: tried.append(given) or 0.5)
    table = table_of(structure_of(deep), device="here")
    pruned = shearling.prune(deep, batches_of(), latency=0.8, table=table, shape="stock", progress=False)
    assert pruned.report.to_json()["latency"]["corrections"] > 0
    assert len(tried) == 1
    assert pruned.report.to_json()["stock"]["uneven_loss"] == 0.5


def test_saved_loaded_and_pruned_again(deep: Any, tmp_path: Path) -> None:
    pruned = shearling.prune(deep, batches_of(), flops=0.6, shape="stock", progress=False)
    pruned.save(tmp_path / "a")
    record = json.loads((tmp_path / "a" / "shearling.json").read_text())
    assert record["shape"] == "stock"
    assert record["stock"]["dials"][0] == {"kind": "heads", "count": 4, "dense": 4}
    assert len(record["layers"]) == len(record["dense_layers"]) == 4
    assert "trust_remote_code" not in (tmp_path / "a" / "README.md").read_text()
    assert "measured loss" in str(pruned)
    again = shearling.load(tmp_path / "a")
    inputs = inputs_of(batches_of(1)[0])
    torch.testing.assert_close(outputs_of(again.eval(), inputs), outputs_of(pruned.model.eval(), inputs))
    twice = shearling.prune(again, batches_of(), flops=0.6, shape="stock", progress=False)
    assert twice.report.flops.ratio <= 0.6
    uneven = shearling.prune(again, batches_of(), flops=0.6, progress=False)
    uneven.save(tmp_path / "b")
    torch.testing.assert_close(
        outputs_of(shearling.load(tmp_path / "b").eval(), inputs), outputs_of(uneven.model.eval(), inputs)
    )
