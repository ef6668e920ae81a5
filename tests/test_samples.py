"""`samples="auto"`: on a CPU, for one constraint, the sample stops growing when the estimates have settled."""

from __future__ import annotations

import pytest
import torch

import shearling
from shearling.engine.progress import Stages
from shearling.errors import InputError
from shearling.methods import surgeon
from shearling.methods.surgeon import Surgeon
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.sample.read import accepted_by, sample_of
from shearling.target import Target
from tiny import batches_of, model_of


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first look at 16 examples."""
    monkeypatch.setattr(surgeon, "FEWEST", 16)
    monkeypatch.setattr(surgeon, "TOKENS_PER_COLUMN", 0)


def samples_of(pruned: shearling.Pruned) -> dict[str, object]:
    found: dict[str, object] = pruned.report.to_json()["samples"]
    return found


def test_a_small_estimated_loss_is_enough(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgeon, "SETTLED", float("inf"))
    pruned = shearling.prune(model_of("bert"), batches_of(16, 4), flops=0.5)
    told = samples_of(pruned)
    assert (told["used"], told["given"]) == (16, 64)
    assert "nats per example" in str(told["why"])
    assert pruned.report.examples == 16


def test_stock_shapes_take_all_examples(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is of uneven shapes, and says nothing of what one size for all layers loses."""
    monkeypatch.setattr(surgeon, "SETTLED", float("inf"))
    pruned = shearling.prune(model_of("bert"), batches_of(16, 4), flops=0.5, shape="stock")
    assert samples_of(pruned)["used"] == 64


def test_a_large_one_takes_all_examples_and_the_same_units(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks add up to one: the curvature is that of all examples."""
    monkeypatch.setattr(surgeon, "SETTLED", 0.0)
    model = model_of("bert").double()
    adaptive = shearling.prune(model, batches_of(16, 4), flops=0.4)
    whole = shearling.prune(model, batches_of(16, 4), flops=0.4, samples=64)
    assert samples_of(adaptive) == {"used": 64, "given": 64, "why": ""}
    assert [k.tolist() for k in adaptive.kept] == [k.tolist() for k in whole.kept]
    for a, b in zip(adaptive.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_less_is_settled_the_smaller_the_budget() -> None:
    model = model_of("bert")
    plan = shearling.measure(model, batches_of(8, 4))
    losses = []
    for flops in (0.9, 0.6, 0.3):
        limits = Target(flops=flops).limits(plan.structure, plan.lengths)
        kept = Surgeon().choose(plan.evidence, plan.structure, limits, multiple_of=1, stages=Stages())
        losses.append(Surgeon().expected_loss(plan.evidence, plan.structure, kept, plan.lengths))
    assert 0 < losses[0] < losses[1] < losses[2]


def test_the_estimated_loss_is_the_divergence_from_the_teacher() -> None:
    """Of one small change that the second order sees exactly: removing the cheapest filter of one sublayer."""
    model = model_of("bert", "SequenceClassification", num_labels=2).double()
    sample = sample_of(batches_of(64, 8, labels="none"), accepted=accepted_by(model))
    structure = structure_of(model)
    evidence = Surgeon(damp=1e-8).measure(structure, sample, seed=0, stages=Stages())
    counts = [s.units for s in structure.sublayers]
    counts[3] -= 1
    kept = Surgeon().kept(evidence, counts)
    estimate = Surgeon().expected_loss(evidence, structure, kept, [sample.mean_length or 0.0] * 4)
    pruned = shrink(model, kept)
    small = structure_of(pruned)
    Surgeon().repair(structure, small, sample.cut(10**6), stages=Stages())
    divergence = 0.0
    with torch.no_grad():
        for batch in sample.cut(10**6):
            before, after = (m(**batch.inputs).logits.log_softmax(-1) for m in (model, pruned))
            divergence += float((before.exp() * (before - after)).sum())
    divergence /= sample.examples
    assert divergence / 20 < estimate < 20 * divergence  # the same order of magnitude, by other means


def test_a_first_look_has_four_tokens_a_column() -> None:
    model = model_of("bert", intermediate_size=480)
    structure, sample = structure_of(model), sample_of(batches_of(4, 4, length=3))
    assert Surgeon().first_look(structure, sample) == 1024  # 480 columns, 3 tokens an example
    assert Surgeon().first_look(structure, sample_of(batches_of(1, 4, length=12))) == 512


def test_plans_paper_and_numbers_take_what_they_say(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgeon, "SETTLED", float("inf"))
    model, batches = model_of("bert"), batches_of(16, 4)
    assert shearling.measure(model, batches).sample.examples == 64
    assert samples_of(shearling.prune(model, batches, flops=0.5, method="paper"))["used"] == 64
    assert samples_of(shearling.prune(model, batches, flops=0.5, samples=40))["used"] == 40
    for wrong in (0, -1, True, "many", 2.5):
        with pytest.raises(InputError, match="samples="):
            shearling.prune(model, batches, flops=0.5, samples=wrong)  # type: ignore[arg-type]
