"""Repairing layer by layer sees what full forward passes see."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shearling.engine.hooks
import shearling.engine.layerwise
from families import FAMILIES, RELATIVES, slow, tiny_batches, tiny_model
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision
from shearling.engine.progress import Stages
from shearling.engine.repair import damaged_sublayers
from shearling.engine.teacher_states import TeacherStates
from shearling.methods import Surgeon
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch
from tiny import as_run, batches_of, model_of


def probe(model: nn.Module, sublayer: Sublayer, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(x, h, o) of one sublayer in a forward pass of the whole model."""
    seen: dict[str, Tensor] = {}

    def at_residual(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["x"] = args[0] if args else kwargs["hidden_states"]

    def at_out(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["h"], seen["o"] = args[0], output

    handles = [
        sublayer.residual.register_forward_pre_hook(at_residual, with_kwargs=True),
        sublayer.out.register_forward_hook(at_out),
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return seen["x"], seen["h"], seen["o"]


def expected_moments(
    teacher: Structure, student: Structure, number: int, sample: list[Batch], power: float = 0.0
) -> tuple[Moments, Moments]:
    """From whole forward passes of both models, one example at a time, padding cut off."""
    dense, pruned = teacher.sublayers[number], student.sublayers[number]
    n, out = pruned.weight.shape[1], pruned.weight.shape[0]
    fit, held_out = (Moments.zeros(n, out, pruned.weight) for _ in range(2))
    for batch in sample:
        for i in range(len(batch)):
            example = batch.pick(torch.tensor([i]))
            length = int(example.inputs["attention_mask"].sum())
            x_t, _, o_t = probe(teacher.model, dense, example.inputs)
            x_s, h_s, _ = probe(student.model, pruned, example.inputs)
            moments = held_out if int(example.indices) % 8 == 7 else fit
            weights = torch.full((length,), float(length)) ** -power
            target = (o_t if dense.part.norm else o_t + x_t - x_s)[0, :length]
            if dense.part.norm:
                weights = weights / (target.square().sum(1) / out + 1e-6)
            moments.add(h_s[0, :length], target, weights if power or dense.part.norm else None)
    return fit, held_out


def close(found: Moments, expected: Moments) -> None:
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize(("attention", "power"), [("eager", 0.0), ("sdpa", 0.0), ("sdpa", 1.0)])
def test_moments_are_those_of_full_forward_passes(family: str, attention: str, power: float) -> None:
    model = model_of(family, attn_implementation=attention).double()
    teacher = structure_of(model)
    kept = [torch.arange(0, s.units, 2) for s in teacher.sublayers]
    student = structure_of(shrink(model, kept))
    sample = as_run(batches_of(2, 5))
    seen: list[str] = []
    with damaged_sublayers(teacher, student, sample, power=power) as places:
        for number, place in enumerate(places):
            seen.append(place.sublayer.name)
            fit, held_out = expected_moments(teacher, student, number, sample, power)
            close(place.fit, fit)
            close(place.held_out, held_out)
            # What follows must see the repaired sublayer.
            place.sublayer.write(place.sublayer.weight * 1.1, place.sublayer.bias)
    assert seen == [sublayer.name for sublayer in student.sublayers]


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_before_a_norm_errors_count_relative_to_the_size_of_the_output(power: float) -> None:
    model = tiny_model("gemma3_text").double()
    teacher = structure_of(model)
    student = structure_of(shrink(model, [torch.arange(0, s.units, 2) for s in teacher.sublayers]))
    sample = as_run(tiny_batches("gemma3_text", 10))
    with damaged_sublayers(teacher, student, sample, power=power) as places:
        for number, place in enumerate(places):
            for found, expected in zip(
                (place.fit, place.held_out), expected_moments(teacher, student, number, sample, power), strict=True
            ):
                close(found, expected)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "modernbert", "t5", "vit"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_is_finished_is_not_run_again(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that gives what it gave before leads to the same repairs as attention that runs again."""
    model = tiny_model(family, attention=attention).double()
    teacher = structure_of(model)
    kept = [torch.arange(0, s.units, 2) for s in teacher.sublayers]
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in tiny_batches(family)]
    sample = as_run(batches)

    def repaired() -> tuple[list[Tensor], int]:
        student = structure_of(shrink(model, kept))
        runs = 0

        def count(*args: Any) -> None:
            nonlocal runs
            runs += 1

        handle = teacher.stacks[0].sublayers[0][0].inputs[0].module.register_forward_hook(count)
        result = surgeon_repair(teacher, student, sample)
        handle.remove()
        assert not any("forward" in vars(m) for m in teacher.model.modules())
        return result, runs

    found, fewer = repaired()
    monkeypatch.setattr(shearling.engine.layerwise, "_is_one_tensor", lambda output: False)
    expected, runs = repaired()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert fewer < runs or attention == "eager" or family == "t5"


@pytest.mark.parametrize(
    "family", [n if n in ("bert", "llama", "t5", "deberta") else slow(n) for n in FAMILIES if n not in RELATIVES]
)
def test_half_precision_suits_the_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: products in bfloat16, the residual stream and the result in float32."""

    def half(module: nn.Module, precision: Precision) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")

    monkeypatch.setattr(shearling.engine.layerwise, "half_precision", half)
    monkeypatch.setattr(shearling.engine.hooks, "half_precision", half)
    pruned = shearling.prune(tiny_model(family), tiny_batches(family), flops=0.5)
    assert {p.dtype for p in pruned.model.parameters()} == {torch.float32}
    exact = shearling.prune(tiny_model(family), tiny_batches(family), flops=0.5, method=Surgeon(precision="float32"))
    found, expected = (sum(r.before for r in p.report.repairs) for p in (pruned, exact))
    assert found == pytest.approx(expected, rel=0.5)  # as far off as float32 is; noise would be far more


def surgeon_repair(teacher: Structure, student: Structure, sample: list[Batch]) -> list[Tensor]:
    Surgeon().repair(teacher, student, sample, stages=Stages())
    return [p.detach() for p in student.model.parameters()]


def test_a_module_gives_what_it_gave_before() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x + 1  # as accelerate does, to move what goes in
    own = module.forward
    with pytest.raises(ZeroDivisionError), shearling.engine.layerwise.returning(module, "before"):  # noqa: PT012
        assert module(torch.ones(2)) == "before"
        raise ZeroDivisionError
    assert module.forward is own


def test_sublayers_before_the_first_cut_are_passed_over() -> None:
    """They lost nothing and see no error; what follows is repaired as if they had been looked at."""
    model = model_of("bert").double()
    teacher = structure_of(model)
    kept = [torch.arange(s.units if number < 2 else s.units // 2) for number, s in enumerate(teacher.sublayers)]
    student, batches = structure_of(shrink(model, kept)), as_run(batches_of(2, 5))
    seen: list[str] = []
    with damaged_sublayers(teacher, student, batches) as places:
        for number, place in enumerate(places, start=2):
            seen.append(place.sublayer.name)
            fit, held_out = expected_moments(teacher, student, number, batches)
            close(place.fit, fit)
            close(place.held_out, held_out)
    assert seen == ["heads of layer 1", "filters of layer 1"]


@pytest.mark.parametrize(
    ("family", "room"),
    [
        *(("bert", room) for room in (0.0, 3e4)),
        *((family, 1e12) for family in ("bert", "llama", "t5", "vit", "albert")),
        *(slow(family, room) for family in ("llama", "t5", "vit", "albert") for room in (0.0, 3e4)),
    ],
)
def test_kept_states_of_the_teacher_change_nothing(family: str, room: float) -> None:
    """A second budget, cut elsewhere, is repaired as if the teacher had been run again; with room it is not."""
    model = tiny_model(family).double()
    teacher = structure_of(model)
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in tiny_batches(family)]
    first, second = (
        [
            torch.arange(max(s.units // (2 if number >= start else 1), s.floor))
            for number, s in enumerate(teacher.sublayers)
        ]
        for start in (2, 0)
    )
    states = TeacherStates(room)
    runs = 0

    def count(*args: Any) -> None:
        nonlocal runs
        runs += 1

    def repaired(kept: list[Tensor], states: TeacherStates | None) -> list[Tensor]:
        student = structure_of(shrink(model, kept))
        Surgeon().repair(teacher, student, as_run(batches), stages=Stages(), states=states)
        return [p.detach() for p in student.model.parameters()]

    repaired(first, states)
    handle = teacher.stacks[0].sublayers[-1][-1].out.register_forward_hook(count)
    found = repaired(second, states)
    with_states, runs = runs, 0
    expected = repaired(second, None)
    handle.remove()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert with_states < runs or room < 1e12 or family == "albert"


def test_an_undamaged_student_is_not_repaired() -> None:
    model = model_of("bert")
    student = structure_of(shrink(model, [torch.arange(s.units) for s in structure_of(model).sublayers]))
    with damaged_sublayers(structure_of(model), student, as_run(batches_of(2))) as places:
        assert not list(places)


@pytest.mark.parametrize("error", [None, RuntimeError("middle")])
def test_nothing_is_left_behind_by_a_repair_that_ends_early(error: Exception | None) -> None:
    model = model_of("bert")
    student = shrink(model, [torch.arange(2) for _ in range(4)])
    with (
        nullcontext() if error is None else pytest.raises(RuntimeError, match="middle"),
        damaged_sublayers(structure_of(model), structure_of(student), as_run(batches_of(1))) as places,
    ):
        for number, _ in enumerate(places):
            if number and error:
                raise error
            if number:
                break
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad for parameter in student.parameters())
    for m in (*model.modules(), *student.modules()):
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
