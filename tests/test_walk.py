"""Walking layer by layer sees what full forward passes see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer
from shearling.moments import Moments
from shearling.sample import Sample, sample_of
from shearling.walk import walk
from tiny import batches_of, model_of


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


def expected_moments(teacher: Structure, student: Structure, number: int, sample: Sample) -> tuple[Moments, Moments]:
    """From whole forward passes of both models, one example at a time, padding cut off."""
    above, below = teacher.sublayers[number], student.sublayers[number]
    n, out = below.weight.shape[1], below.weight.shape[0]
    fit, held_out = (Moments.zeros(n, out, below.weight) for _ in range(2))
    for batch in sample:
        for i in range(len(batch)):
            example = batch.part(i, i + 1)
            length = int(example.inputs["attention_mask"].sum())
            x_t, _, o_t = probe(teacher.model, above, example.inputs)
            x_s, h_s, _ = probe(student.model, below, example.inputs)
            moments = held_out if int(example.indices) % 8 == 7 else fit
            moments.add(h_s[0, :length], (o_t + x_t - x_s)[0, :length])
    return fit, held_out


def close(found: Moments, expected: Moments) -> None:
    for name in ("gram", "cross", "h_sum", "y_sum", "y_squared", "count"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_moments_are_those_of_full_forward_passes(family: str, attention: str) -> None:
    model = model_of(family, attn_implementation=attention).double()
    teacher = structure_of(model)
    kept = [torch.arange(0, s.units, 2) for s in teacher.sublayers]
    student = structure_of(shrink(model, kept))
    sample = sample_of(batches_of(2, 5))
    numbers: list[int] = []

    def repair(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
        number = len(numbers)
        numbers.append(number)
        assert sublayer.name == student.sublayers[number].name
        for found, expected in zip((fit, held_out), expected_moments(teacher, student, number, sample), strict=True):
            close(found, expected)
        sublayer.write(sublayer.weight * 1.1, sublayer.bias)  # what follows must see the repaired sublayer
        return True

    walk(teacher, student, sample, repair)
    assert numbers == [0, 1, 2, 3]


def test_it_stops_when_a_repair_says_so() -> None:
    model = model_of("bert")
    student = structure_of(shrink(model, [torch.arange(2) for _ in range(4)]))
    seen: list[str] = []

    def repair(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
        seen.append(sublayer.name)
        return len(seen) < 2

    walk(structure_of(model), student, sample_of(batches_of(1)), repair)
    assert seen == ["heads of layer 0", "filters of layer 0"]


def test_an_unpruned_student_has_nothing_to_repair() -> None:
    """With teacher and student equal, y is the projection's own output: the error is zero at every sublayer."""
    model = model_of("bert").double()
    teacher, student = (
        structure_of(model),
        structure_of(shrink(model, [torch.arange(s.units) for s in structure_of(model).sublayers])),
    )
    errors: list[float] = []

    def repair(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
        errors.append((fit + held_out).error(sublayer.weight, sublayer.bias))
        return True

    walk(teacher, student, sample_of(batches_of(2)), repair)
    assert max(errors) < 1e-12


def test_hooks_are_gone_after_an_error() -> None:
    model = model_of("bert")
    student = shrink(model, [torch.arange(2) for _ in range(4)])

    def repair(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
        raise RuntimeError("middle")

    with pytest.raises(RuntimeError, match="middle"):
        walk(structure_of(model), structure_of(student), sample_of(batches_of(1)), repair)
    for m in (*model.modules(), *student.modules()):
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
