"""A and G against one example at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from families import tiny_batches, tiny_model
from shearling.engine import precision
from shearling.engine.hooks import eager, run
from shearling.engine.losses import label_losses, sampled_losses
from shearling.errors import DataError
from shearling.models.structure import structure_of
from shearling.sample.batch import Batch
from shearling.surgeon.measure import measure
from tiny import as_run, batches_of, model_of

HEADS = {
    "classification": ("SequenceClassification", "class", {}),
    "regression": ("SequenceClassification", "number", {"num_labels": 1}),
    "question answering": ("QuestionAnswering", "span", {}),
    "token classification": ("TokenClassification", "tokens", {}),
    "masked LM": ("MaskedLM", "tokens", {}),
    "embedding": ("", "none", {}),
}


def reference(model: Any, sample: list[Batch], *, labels: bool, power: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Every example on its own, without its padding; gradients of every output by autograd.grad."""
    structure = structure_of(model)
    sums: list[list[Tensor]] = [[torch.zeros(()), torch.zeros(())] for _ in structure.sublayers]
    tokens, weights = 0, 0.0
    for batch in sample:
        for i in range(len(batch)):
            example = batch.pick(torch.tensor([i]))
            length = int(example.inputs["attention_mask"].sum())
            tokens += length
            weights += length * length**-power
            inputs, outputs, handles = [], [], []
            for sublayer in structure.sublayers:
                handles.append(
                    sublayer.out.register_forward_hook(
                        lambda m, args, out, i=inputs, o=outputs: (i.append(args[0]), o.append(out))[:0] or None
                    )
                )
            found = run(model, example)
            for handle in handles:
                handle.remove()
            loss = label_losses(model, found, example) if labels else sampled_losses(model, found, example, 7)
            gradients = torch.autograd.grad(loss.sum(), outputs)
            for s, total, h, o, g in zip(structure.sublayers, sums, inputs, outputs, gradients, strict=True):
                sizes = (o.square().sum(-1, keepdim=True) / o.shape[-1] + 1e-6).sqrt() if s.part.norm else 1.0
                h, g = (h / sizes)[0, :length], (g * sizes)[0, :length]
                total[0] = total[0] + length**-power * h.T @ h
                total[1] = total[1] + g.T @ g
    return [(a / weights, g / tokens) for a, g in sums]


def test_before_a_norm_the_size_of_the_output_does_not_count() -> None:
    model = tiny_model("olmo2").double()
    sample = as_run(tiny_batches("olmo2", 6))
    for c, (A, G) in zip(
        measure(structure_of(model), sample, seed=7), reference(model, sample, labels=False), strict=True
    ):
        torch.testing.assert_close(c.A.matrix, A.detach(), rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(c.G.matrix, G, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("head", HEADS)
def test_equals_a_loop_over_single_examples(head: str) -> None:
    kind, label, changes = HEADS[head]
    model = model_of("bert", kind, **changes).double()
    sample = as_run(batches_of(2, 3, labels=label))
    for labels in (False, True) if label != "none" else (False,):
        found = measure(structure_of(model), sample, seed=7, labels=labels)
        for c, (A, G) in zip(found, reference(model, sample, labels=labels), strict=True):
            torch.testing.assert_close(c.A.matrix, A.detach(), rtol=1e-6, atol=1e-10)
            torch.testing.assert_close(c.G.matrix, G, rtol=1e-4, atol=1e-9)  # losses are worked out in single precision


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_tokens_of_long_texts_count_less(power: float) -> None:
    model = model_of("bert", "").double()
    sample = as_run(batches_of(2, 3, labels="none"))
    found = measure(structure_of(model), sample, seed=7, power=power)
    for c, (A, G) in zip(found, reference(model, sample, labels=False, power=power), strict=True):
        torch.testing.assert_close(c.A.matrix, A.detach(), rtol=1e-5, atol=1e-8)  # weights in single precision
        torch.testing.assert_close(c.G.matrix, G, rtol=1e-4, atol=1e-9)


def test_labels_that_are_not_there_are_asked_for() -> None:
    with pytest.raises(DataError, match="needs labels"):
        measure(structure_of(model_of("bert")), as_run(batches_of(1, labels="none")), labels=True)


def test_the_sum_is_of_the_models_own_precision_or_better() -> None:
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        found = measure(structure_of(model_of("bert").to(dtype)), as_run(batches_of(1)))
        assert {c.A.dtype for c in found} == {c.G.dtype for c in found} == {expected}


@pytest.mark.parametrize("head", HEADS)
def test_bfloat16_on_a_cpu_is_near_float32(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, label, changes = HEADS[head]
    structure, sample = structure_of(model_of("bert", kind, **changes)), as_run(batches_of(labels=label))
    exact = measure(structure, sample, precision="bfloat16")  # this CPU is said to have none
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    for rounded, full in zip(measure(structure, sample, precision="bfloat16"), exact, strict=True):
        for one, other, most in (
            (rounded.A.matrix, full.A.matrix, 0.05),
            (rounded.G.matrix, full.G.matrix, 0.3),
        ):  # a drawn label may be another
            assert one.dtype == torch.float32
            assert 0 < (one - other).norm() < most * other.norm()


def test_inputs_of_the_first_layer_are_freed_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `eager`, which disables the caller's autocast, casts must not be cached until the end."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    structure, sample = structure_of(model_of("bert")), as_run(batches_of(4))
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def note(module: Any, args: tuple[Tensor, ...]) -> None:
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(args[0]))

    query = structure.stacks[0].sublayers[0][0].inputs[0].module
    query.register_forward_pre_hook(note)
    gc.disable()
    try:
        with eager():
            measure(structure, sample, precision="bfloat16")
    finally:
        gc.enable()
    assert len(seen) == 4
    assert max(alive) <= 1
