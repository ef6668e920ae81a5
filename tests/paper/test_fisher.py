"""The Fisher information (Eq. 5) against one example at a time, and against masks that really exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shearling.engine.hooks import masked
from shearling.models.structure import structure_of
from shearling.paper.fisher import block, diagonal, mask_gradients
from shearling.paper.importance import importances
from tiny import as_run, batches_of, model_of

HEADS = {
    "classification": ("SequenceClassification", "class", {}),
    "regression": ("SequenceClassification", "number", {"num_labels": 1}),
    "question answering": ("QuestionAnswering", "span", {}),
    "token classification": ("TokenClassification", "tokens", {}),
}


def loop_over_examples(model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """d loss / d mask with a mask on every unit, the model's own loss, and a backward for each example."""
    structure = structure_of(model)
    rows: list[list[Tensor]] = [[] for _ in structure.sublayers]
    for batch in batches:
        for i in range(len(batch["input_ids"])):
            masks = [torch.ones(s.units, dtype=torch.float64, requires_grad=True) for s in structure.sublayers]
            with masked(structure.sublayers, masks):
                loss = model(**unpadded(batch, i)).loss
            for row, gradient in zip(rows, torch.autograd.grad(loss, masks), strict=True):
                row.append(gradient)
    return [torch.stack(row) for row in rows]


def unpadded(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """One example without its padding."""
    length = int(batch["attention_mask"][i].sum())
    return {k: v[i : i + 1, :length] if v.dim() == 2 else v[i : i + 1] for k, v in batch.items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_equals_a_loop_over_single_examples(head: str, family: str) -> None:
    kind, labels, changes = HEADS[head]
    model = model_of(family, kind, **changes).double()
    batches = batches_of(2, 3, labels=labels)
    found = mask_gradients(structure_of(model), as_run(batches))
    for ours, loop in zip(found, loop_over_examples(model, batches), strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-5, atol=1e-8)  # losses are worked out in single precision
        torch.testing.assert_close(diagonal(ours), loop.square().mean(0), rtol=1e-4, atol=1e-10)
        torch.testing.assert_close(block(ours), loop.T @ loop / len(loop), rtol=1e-4, atol=1e-10)


def test_equals_the_gradient_of_one_mask_an_example() -> None:
    """The design's own wording: every example its copy of the masks, the losses summed, one backward."""
    model = model_of("bert").double()
    batch = batches_of(1, 5)[0]
    structure = structure_of(model)
    masks = [torch.ones(5, s.units, dtype=torch.float64, requires_grad=True) for s in structure.sublayers]
    with masked(structure.sublayers, masks):
        loss = model(**batch).loss * 5  # the model's loss is the mean
    expected = torch.autograd.grad(loss, masks)
    for ours, theirs in zip(mask_gradients(structure, as_run([batch])), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("size", [1, 4, 12])
def test_does_not_depend_on_the_batch_size(size: int) -> None:
    model = model_of("bert").double()
    whole = {k: torch.cat([b[k] for b in batches_of(3, 4)]) for k in ("input_ids", "attention_mask", "labels")}
    batches = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 12, size)]
    for labels in (True, False):
        found = mask_gradients(structure_of(model), as_run(batches), labels=labels)
        expected = mask_gradients(structure_of(model), as_run([whole]), labels=labels)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_leaves_the_model_as_it_was() -> None:
    model = model_of("bert").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    mask_gradients(structure_of(model), as_run(batches_of(1)))
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_the_baselines() -> None:
    model = model_of("bert").double()
    structure = structure_of(model)
    gradients = mask_gradients(structure, as_run(batches_of(2, 4)))
    fisher = importances("fisher", structure.sublayers, gradients, 0)
    gradient = importances("gradient", structure.sublayers, gradients, 0)
    for f, g, rows in zip(fisher, gradient, gradients, strict=True):
        torch.testing.assert_close(f, rows.square().mean(0))
        torch.testing.assert_close(g, rows.abs().mean(0))
    magnitude = importances("magnitude", structure.sublayers, gradients, 0)
    layer = model.requires_grad_(False).bert.encoder.layer[1]
    own = slice(8, 16)  # head 1
    parts = [getattr(layer.attention.self, name).weight[own] for name in ("query", "key", "value")]
    total = sum(p.square().sum() for p in parts) + layer.attention.output.dense.weight[:, own].square().sum()
    assert float(magnitude[2][1]) == pytest.approx(float(total.sqrt()))
    unit = layer.intermediate.dense.weight[7].square().sum() + layer.output.dense.weight[:, 7].square().sum()
    assert float(magnitude[3][7]) == pytest.approx(float(unit.sqrt()))
    drawn = importances("random", structure.sublayers, gradients, 3)
    again = importances("random", structure.sublayers, gradients, 3)
    other = importances("random", structure.sublayers, gradients, 4)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(drawn, again, other, strict=True))
