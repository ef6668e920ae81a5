"""The methods as the pipeline sees them: settings, baselines, and what their repairs report."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shearling
import shearling.methods.surgeon
from shearling.costs import count_macs, flops_limit
from shearling.engine.agreement import held_out
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError, InputError, ModelError
from shearling.methods import Paper, Repaired, Surgeon, configured, method_of
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.paper.rearrange import rearrange
from shearling.target import Target
from tiny import batches_of, model_of


def test_methods_by_name() -> None:
    assert method_of("surgeon") == Surgeon()
    assert method_of("paper") == Paper()
    given = Paper(tune=False)
    assert method_of(given) is given
    with pytest.raises(InputError, match=r"No method 'magic'; there are paper, surgeon"):
        method_of("magic")


def test_settings_of_the_other_method_are_refused() -> None:
    assert configured("paper", tune=False, labels=False, refit=True) == Paper(tune=False)
    assert configured("surgeon", refit=False, importance="fisher") == Surgeon(refit=False)
    with pytest.raises(InputError, match="'tune' is an option of method paper"):
        configured("surgeon", tune=False)
    with pytest.raises(InputError, match="'refit' is an option of method surgeon"):
        configured("paper", refit=False)
    with pytest.raises(InputError, match="importance='size' is not known"):
        configured("paper", importance="size")
    with pytest.raises(InputError, match="allocation='fair' is not known"):
        configured("paper", allocation="fair")


@pytest.mark.parametrize("importance", ["fisher", "magnitude", "gradient", "random"])
@pytest.mark.parametrize("allocation", ["searched", "uniform"])
def test_every_baseline_holds_its_budget(importance: str, allocation: str) -> None:
    method = configured("paper", importance=importance, allocation=allocation, rearrange=False, tune=False)
    pruned = shearling.prune(model_of("bert"), batches_of(), flops=0.5, method=method)
    assert pruned.report.flops.ratio <= 0.5
    assert pruned.report.repairs == []
    if allocation == "uniform":
        assert pruned.report.layers[0] == pruned.report.layers[1]


def test_uniform_counts_obey_multiples() -> None:
    method = Paper(allocation="uniform", tune=False)
    report = shearling.prune(model_of("bert"), batches_of(), flops=0.5, multiple_of=7, method=method).report
    assert [layer["filters"] % 7 for layer in report.layers] == [0, 0]


@pytest.mark.parametrize("model_type", ["albert", "gpt2"])
def test_uniform_counts_below_what_must_stay(model_type: str) -> None:
    """Some units must stay in these models: there is a budget that they alone exceed, and none is exceeded."""
    model = model_of(model_type, pad_token_id=0)
    plan = shearling.measure(model, batches_of(1), method=Paper(allocation="uniform", rearrange=False, tune=False))
    floors, dense = [s.floor for s in plan.structure.sublayers], count_macs(plan.structure, plan.lengths)
    least = flops_limit(plan.structure, plan.lengths, 1.0).spent(floors) / dense
    assert least > 0.02
    with pytest.raises(ConstraintError, match=rf"flops=0\.02 cannot be met.*take flops={least:.3g} of"):
        plan.prune(flops=0.02)
    kept = plan.prune(flops=1.0001 * least).kept
    assert [len(units) for units in kept] == floors


def test_random_importance_follows_the_runs_seed() -> None:
    def pruned(seed: int) -> shearling.Pruned:
        method = Paper(importance="random", rearrange=False, tune=False)
        return shearling.prune(model_of("bert"), batches_of(1), flops=0.5, method=method, seed=seed)

    def kept(seed: int) -> list[list[int]]:
        return [units.tolist() for units in pruned(seed).kept]

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)
    report = pruned(3).report.to_json()
    assert report["seed"] == 3
    assert "seed" not in report["settings"]  # there is one


def test_without_repairs_the_kept_weights_are_the_dense_ones() -> None:
    model = model_of("bert")
    for method in (Surgeon(refit=False), Paper(tune=False)):
        pruned = shearling.prune(model, batches_of(), flops=0.5, method=method)
        for dense, small, units in zip(
            structure_of(model).sublayers, structure_of(pruned.model).sublayers, pruned.kept, strict=True
        ):
            columns = (units[:, None] * dense.width + torch.arange(dense.width)).flatten()
            assert torch.equal(small.weight, dense.weight[:, columns])


def test_repairs_are_reported() -> None:
    for method in ("surgeon", "paper"):
        report = shearling.prune(model_of("bert"), batches_of(8, 8), flops=0.6, method=method).report
        names = [r.sublayer for r in report.repairs]
        expected = [s.name for s in structure_of(model_of("bert")).sublayers]
        assert names == [n for n in expected if n in names]
        assert all(r.after <= r.before for r in report.repairs)


def test_an_early_stop_of_tuning_is_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask out of range: that sublayer is left alone, so are all above it, and the report says so."""
    model = model_of("bert")
    plain = shearling.prune(model, batches_of(), flops=0.6, method=Paper(tune=False))
    calls: list[float] = []
    from shearling.paper import tune as module

    original = module.tune

    def third_goes_astray(*args: object, **kwargs: object) -> module.Tuned:
        result = original(*args, **kwargs)  # type: ignore[arg-type]
        calls.append(result.after)
        return module.Tuned(result.mask * 1000, result.before, result.after) if len(calls) == 3 else result

    monkeypatch.setattr("shearling.methods.paper.tune", third_goes_astray)
    tuned = shearling.prune(model, batches_of(), flops=0.6, method="paper")
    used = [r.used for r in tuned.report.repairs]
    assert used == [True, True, False]
    stopped = tuned.report.repairs[-1]
    assert stopped.sublayer == "heads of layer 1"
    assert "tuning stopped here" in stopped.note
    assert stopped.before == stopped.after
    assert "tuning stopped here" in str(tuned)
    pairs = list(zip(structure_of(plain.model).sublayers, structure_of(tuned.model).sublayers, strict=True))
    assert [torch.equal(a.weight, b.weight) for a, b in pairs] == [False, False, True, True]


def test_a_refit_that_is_dropped_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from shearling.surgeon import refit as module

    original = module.refit

    def dropped(weight: torch.Tensor, bias: torch.Tensor | None, *args: object, **kwargs: object) -> module.Fit:
        found = original(weight, bias, *args, **kwargs)  # type: ignore[arg-type]
        return module.Fit(weight, bias, found.before, found.before, kept=False)

    monkeypatch.setattr("shearling.methods.surgeon.refit", dropped)
    pruned = shearling.prune(model_of("bert"), batches_of(), flops=0.6)
    assert all(not r.used and "dropped" in r.note for r in pruned.report.repairs)
    plain = shearling.prune(model_of("bert"), batches_of(), flops=0.6, method=Surgeon(refit=False))
    assert all(torch.equal(a, b) for a, b in zip(pruned.model.parameters(), plain.model.parameters(), strict=True))


WRONG = {
    "damp": (-1e-9, float("nan"), float("inf"), "0.1", None, True),
    "ridge": (-1.0, float("nan"), 1e7),
    "refit": (1, "no", None),
    "precision": ("float16", 32, None),
}


@pytest.mark.parametrize("method", [Surgeon, Paper])
@pytest.mark.parametrize("option", WRONG)
def test_every_option_has_a_range(method: type, option: str) -> None:
    if option not in method.__dataclass_fields__:
        pytest.skip(f"{method.name} has no {option}")
    for value in WRONG[option]:
        with pytest.raises(InputError, match=option):
            method(**{option: value})


@pytest.mark.parametrize("method", [Surgeon(damp=0), Surgeon(ridge=0), Surgeon(damp=0, ridge=0), Paper(damp=0)])
def test_no_damping_ends_on_a_model_with_dead_units(method: Surgeon | Paper) -> None:
    model = model_of("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.weight[:20] = 0
        model.bert.encoder.layer[0].intermediate.dense.bias[:20] = -9  # GELU of it is zero
    pruned = shearling.prune(model, batches_of(), flops=0.5, method=method)
    assert pruned.report.flops.ratio <= 0.5


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_gradients_that_are_not_finite_end_with_an_error(method: str) -> None:
    model = model_of("bert")

    def overflow(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)  # the loss is a number, its gradient is not

    model.classifier.register_forward_hook(overflow)
    with pytest.raises(ModelError, match="not finite"):
        shearling.prune(model, batches_of(), flops=0.5, method=method)


def test_a_guarded_paper_rearranges_only_where_examples_kept_out_agree() -> None:
    """More filters than examples: the plain rearrangement finds sets that only cancel on the sample."""
    model, batches = model_of("bert", intermediate_size=96), batches_of(4, 8)
    careful, plain = shearling.Paper(guarded=True), shearling.Paper()
    plan = shearling.measure(model, batches, method=careful)
    limits = Target(flops=0.5).limits(plan.structure, plan.lengths)
    chosen, rearranged = (
        method.choose(plan.evidence, plan.structure, limits, multiple_of=1, stages=Stages())
        for method in (careful, plain)
    )
    settled = careful.settled(plan.evidence, plan.structure, chosen, plan.sample, stages=Stages())
    judges = held_out(plan.sample)
    assert judges is not None

    def apart(kept: list[Tensor]) -> float:
        """From the dense model's outputs, by a model that is really smaller."""
        (batch,) = (group.batch(torch.arange(len(group.indices)), 1) for group in judges.groups)
        smaller = shrink(model, kept)
        with torch.no_grad():
            wanted, found = (m(**batch.inputs).logits.log_softmax(-1) for m in (model, smaller))
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    fitted = plan.sample.without(judges)
    fit = careful.measure(plan.structure, fitted, seed=0, stages=Stages())  # the other examples alone
    assert not any(seen.held_out.any() for seen in fit)
    expected, least = list(chosen), apart(chosen)
    for i, units in enumerate(rearrange([seen.fisher for seen in fit], chosen)):
        trial = [*expected[:i], units, *expected[i + 1 :]]
        if apart(trial) < least:
            expected, least = trial, apart(trial)
    assert [set(units.tolist()) for units in settled] == [set(units.tolist()) for units in expected]
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(settled, rearranged, strict=True))
    pruned = plan.prune(flops=0.5)
    assert [set(units.tolist()) for units in pruned.kept] == [set(units.tolist()) for units in settled]
    assert all(repaired.after <= repaired.before for repaired in pruned.report.repairs)
    assert len(pruned.report.repairs) == sum(len(units) > 0 for units in pruned.kept)


def test_guarding_what_is_not_rearranged_changes_nothing() -> None:
    plan = shearling.measure(model_of("bert"), batches_of(), method=shearling.Paper(guarded=True, rearrange=False))
    kept = [torch.arange(s.units) for s in plan.structure.sublayers]
    assert plan.method.settled(plan.evidence, plan.structure, kept, plan.sample, stages=Stages()) is kept


def test_tuning_that_stops_early_is_a_warning() -> None:
    stopped = [Repaired("heads of layer 0", 1.0, 0.5, True), Repaired("filters of layer 0", 1.0, 1.0, False, "mask")]
    assert "stopped early, at the filters of layer 0" in shearling.Paper().concerns(stopped)[0]
    assert not shearling.Paper().concerns(stopped[:1])
    assert not shearling.Paper(guarded=True).concerns(stopped)
    assert not shearling.Surgeon().concerns(stopped)


@pytest.mark.parametrize(
    ("bare", "device", "expected"), [(True, "cuda", 8192), (True, "cpu", 2048), (False, "cuda", 2048)]
)
def test_auto_takes_more_texts_for_embedding_models_on_a_gpu(
    bare: bool, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shearling.methods.surgeon, "device_of", lambda model: torch.device(device))
    model = model_of("bert")
    model = model.base_model if bare else model
    assert Surgeon().most_examples(model) == expected
    assert Paper().most_examples(model) == 2048
