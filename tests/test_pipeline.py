"""The pipeline: the caller's model untouched, every constraint held, the same result every time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shearling
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError, DataError, InputError, ModelError, UnsupportedArchitecture
from shearling.target import Target
from tiny import batches_of, model_of

methods = pytest.mark.parametrize("method", ["surgeon", "paper"])
STAGES = {
    "surgeon": ["measure", "order", "allocate", "shrink", "refit", "check"],
    "paper": ["gradients", "search", "rearrangement", "shrink", "tuning", "check"],
}


def state(model: Any) -> dict[str, bytes]:
    return {k: v.cpu().numpy().tobytes() for k, v in model.state_dict().items()}


def traces(model: Any) -> tuple[Any, ...]:
    """Everything a run might leave behind on the caller's model, and in torch."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    parameters = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    config = copy.deepcopy(model.config.to_dict())
    return hooks, parameters, config, model.config._attn_implementation, torch.get_float32_matmul_precision()


@methods
@pytest.mark.parametrize("training", [True, False])
def test_the_callers_model_is_untouched(method: str, training: bool) -> None:
    model = model_of("bert").train(training)
    model.classifier.weight.requires_grad_(False)
    before = state(model), traces(model)
    pruned = shearling.prune(model, batches_of(), flops=0.5, method=method)
    assert (state(model), traces(model)) == before
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in pruned.model.parameters() if p.numel()}
    assert not shared
    assert pruned.model.training is training


@pytest.mark.parametrize(("method", "stage"), [(m, s) for m, stages in STAGES.items() for s in stages])
@pytest.mark.parametrize("at", ["start", "middle"])
def test_untouched_after_an_error_in_any_stage(method: str, stage: str, at: str) -> None:
    model = model_of("bert").train()
    before = state(model), traces(model)

    def watcher(name: str, done: int, total: int) -> None:
        if name == stage and done == (0 if at == "start" else 1):
            raise RuntimeError(f"in {name}")

    with pytest.raises(RuntimeError, match=f"in {stage}"):
        shearling.prune(model, batches_of(), flops=0.5, method=method, progress=watcher)
    assert (state(model), traces(model)) == before


@methods
def test_the_same_seed_gives_the_same_bytes(method: str) -> None:
    first, second = (
        shearling.prune(model_of("bert"), batches_of(), flops=0.4, method=method, seed=5) for _ in range(2)
    )
    assert state(first.model) == state(second.model)
    assert first.report.fingerprint == second.report.fingerprint


def without_gradients(model: Any) -> Any:
    return torch.no_grad()


def in_inference(model: Any) -> Any:
    return torch.inference_mode()


def casting(model: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def checkpointing(model: Any) -> Any:
    model.train().gradient_checkpointing_enable()
    return nullcontext()


def compiled(model: Any) -> Any:
    model.compile()
    return nullcontext()


@methods
@pytest.mark.parametrize("setting", [without_gradients, in_inference, casting, checkpointing, compiled])
def test_what_the_caller_has_set_does_not_matter(method: str, setting: Callable[[Any], Any]) -> None:
    plain, model = model_of("bert"), model_of("bert")
    expected = shearling.prune(plain, batches_of(), flops=0.5, method=method).model
    with setting(model):
        found = shearling.prune(model, batches_of(), flops=0.5, method=method).model
    assert state(found) == state(expected)


def test_a_compiled_model_is_pruned_as_the_model_in_it() -> None:
    model = model_of("bert")
    found = shearling.prune(torch.compile(model), batches_of(), flops=0.5).model
    assert type(found) is type(model)
    assert state(found) == state(shearling.prune(model, batches_of(), flops=0.5).model)


@methods
def test_the_batch_size_does_not_matter(method: str) -> None:
    """In double precision: the same units kept, and the same weights to rounding."""
    whole = {k: torch.cat([b[k] for b in batches_of(4, 4)]) for k in ("input_ids", "attention_mask", "labels")}
    results = []
    for size in (1, 3, 16):
        batches = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 16, size)]
        results.append(shearling.prune(model_of("bert").double(), batches, flops=0.5, method=method))
    first = results[0]
    for other in results[1:]:
        assert [k.tolist() for k in other.kept] == [k.tolist() for k in first.kept]
        for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def plans() -> dict[str, shearling.Plan]:
    torch.set_num_threads(1)
    return {m: shearling.measure(model_of("bert"), batches_of(), method=m) for m in ("surgeon", "paper")}


@methods
@settings(deadline=None, max_examples=60)
@given(
    flops=st.none() | st.floats(0.001, 1.0),
    params=st.none() | st.floats(0.001, 1.0),
    multiple=st.sampled_from([1, 4, 7]),
)
def test_never_over_any_budget(
    plans: dict[str, shearling.Plan], method: str, flops: float | None, params: float | None, multiple: int
) -> None:
    plan = plans[method]
    if flops is None and params is None:
        return
    limits = Target(flops=flops, params=params).limits(plan.structure, plan.lengths)
    kept = plan.method.choose(plan.evidence, plan.structure, limits, multiple_of=multiple, stages=Stages())
    counts = [len(units) for units in kept]
    for limit in limits:
        assert limit.spent(counts) <= limit.ratio * limit.dense * (1 + 1e-9)
    assert all(count % multiple == 0 or count == 48 for count in counts[1::2])


@methods
def test_everything_stays_when_everything_may(plans: dict[str, shearling.Plan], method: str) -> None:
    pruned = plans[method].prune(flops=1.0)
    assert pruned.report.layers == pruned.report.dense_layers
    assert pruned.report.flops.ratio == 1.0


@methods
def test_one_measurement_serves_every_budget(plans: dict[str, shearling.Plan], method: str) -> None:
    """In any order, and the same as pruning at once."""
    first = {r: plans[method].prune(flops=r) for r in (0.7, 0.3)}
    again = plans[method].prune(flops=0.7)
    alone = shearling.prune(model_of("bert"), batches_of(), flops=0.3, method=method)
    assert state(first[0.7].model) == state(again.model)
    assert state(first[0.3].model) == state(alone.model)


def test_less_budget_keeps_nested_units(plans: dict[str, shearling.Plan]) -> None:
    """Surgeon follows one order per sublayer: of fewer units, all are among the more."""
    kept = {r: plans["surgeon"].prune(flops=r).kept for r in (0.8, 0.4)}
    for more, less in zip(kept[0.8], kept[0.4], strict=True):
        small, large = sorted((set(more.tolist()), set(less.tolist())), key=len)
        assert small <= large


@pytest.mark.parametrize("head", ["QuestionAnswering", "TokenClassification", "MaskedLM", ""])
@methods
def test_every_head_without_labels(head: str, method: str) -> None:
    pruned = shearling.prune(model_of("bert", head), batches_of(labels="none"), flops=0.5, method=method)
    assert pruned.report.flops.ratio <= 0.5


def test_bad_constraints_fail_before_the_work() -> None:
    def untouched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("work was done")

    for given_ratio in ({"flops": 0}, {"flops": 1.5}, {"params": -1}, {"flops": float("nan")}, {"flops": "half"}, {}):
        with pytest.raises(ConstraintError):
            shearling.prune(model_of("bert"), batches_of(1), progress=untouched, **given_ratio)  # type: ignore[arg-type]


def test_a_sample_of_one_is_told_in_the_singular() -> None:
    batch = {name: values[:1] for name, values in batches_of(1)[0].items()}
    warnings = shearling.prune(model_of("bert"), [batch], flops=0.5).report.warnings
    assert any("has only 1 example;" in warning for warning in warnings)


def test_bad_input_is_told() -> None:
    model, batches = model_of("bert"), batches_of(1)
    with pytest.raises(ConstraintError, match="not a single unit"):
        shearling.prune(model, batches, flops=1e-9)
    for bad in ({"multiple_of": 0}, {"multiple_of": "8"}, {"batch_size": 0}, {"seq_len": 1.5}):
        with pytest.raises(InputError, match=f"{next(iter(bad))}=.* makes no sense"):
            shearling.prune(model, batches, flops=0.5, **bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="No method 'magic'"):
        shearling.prune(model, batches, flops=0.5, method="magic")
    with pytest.raises(DataError, match="empty"):
        shearling.prune(model, [], flops=0.5)
    with pytest.raises(ModelError, match="Expected a transformers model"):
        shearling.prune(torch.nn.Linear(2, 2), batches, flops=0.5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Labels run from"):
        shearling.prune(model, [batches[0] | {"labels": torch.full((4,), 9)}], flops=0.5, method="paper")


def test_models_that_cannot_be_pruned() -> None:
    batches = batches_of(1)
    broken = model_of("bert")
    broken.bert.encoder.layer[0].output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layer\.0\.output\.dense\.weight' holds NaN"):
        shearling.prune(broken, batches, flops=0.5)
    with torch.device("meta"):
        empty = model_of("bert")
    with pytest.raises(ModelError, match="meta device"):
        shearling.prune(empty, batches, flops=0.5)
    strange = model_of("bert")
    strange.config.model_type = "berd"
    with pytest.raises(UnsupportedArchitecture, match="nearest that is supported is 'bert'"):
        shearling.prune(strange, batches, flops=0.5)


def test_adapters_are_to_be_merged_first() -> None:
    model = model_of("bert")
    model._hf_peft_config_loaded = True  # as `add_adapter` and `load_adapter` leave it
    with pytest.raises(ModelError, match="merge them first"):
        shearling.prune(model, batches_of(), flops=0.5)


def test_a_loss_that_overflows_is_told() -> None:
    model = model_of("bert")
    model.classifier.weight.data.fill_(3e38)
    with pytest.raises(ModelError, match="loss of example 0 is"):
        shearling.prune(model, batches_of(1), flops=0.5)


def test_a_small_sample_is_warned_about() -> None:
    report = shearling.prune(model_of("bert"), batches_of(1), flops=0.5).report
    assert "only 4 examples" in report.warnings[0]
    assert "only 4 examples" in str(report)
    assert shearling.measure(model_of("bert"), batches_of(16)).warnings == []


def test_flops_at_a_length_of_ones_own() -> None:
    """Attention's share grows with the length, and with it what a budget leaves."""
    model, batches = model_of("bert"), batches_of(2, 8)
    long = shearling.prune(model, batches, flops=0.5, length=30)
    assert long.report.mean_length == 30
    assert long.report.flops.dense > 15 * shearling.prune(model, batches, flops=0.5, length=2).report.flops.dense
    for length in (0, 41, float("nan"), float("inf")):
        with pytest.raises(InputError, match="makes no sense"):
            shearling.measure(model, batches, length=length)


@pytest.mark.parametrize("length", [6.0, 6.4, 6.6])
def test_the_whole_model_counts_no_less_than_its_layers(length: float) -> None:
    report = shearling.prune(model_of("bert"), batches_of(2, 8), flops=0.5, length=length).report
    rest = report.flops_model.dense - report.flops.dense
    assert rest > 0
    assert report.flops_model.pruned - report.flops.pruned == pytest.approx(rest)


def test_samples_limits_the_sample() -> None:
    assert shearling.measure(model_of("bert"), batches_of(4, 4), samples=6).sample.examples == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@methods
def test_half_precision(method: str, dtype: torch.dtype) -> None:
    pruned = shearling.prune(model_of("bert").to(dtype), batches_of(), flops=0.5, method=method)
    assert {p.dtype for p in pruned.model.parameters()} == {dtype}
    assert pruned.report.flops.ratio <= 0.5


def test_a_refit_helps_the_outputs() -> None:
    """What it is for: the pruned model's outputs come closer to the dense model's."""
    model = model_of("bert")
    batches = batches_of(16, 8)
    with torch.no_grad():
        dense = torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches])

    def distance(pruned: shearling.Pruned) -> float:
        with torch.no_grad():
            small = torch.cat([pruned.model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches])
        return float((small - dense).square().mean())

    plain, fitted = (
        shearling.prune(model, batches, flops=0.5, method=shearling.Surgeon(refit=r)) for r in (False, True)
    )
    assert [k.tolist() for k in plain.kept] == [k.tolist() for k in fitted.kept]
    assert distance(fitted) < 0.8 * distance(plain)
