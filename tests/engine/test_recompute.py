"""Gradients with layers that are computed again are those of layers that keep everything."""

from __future__ import annotations

import pytest
import torch

from families import tiny_batches, tiny_model
from shearling.engine import losses, precision, recompute
from shearling.engine.hooks import frozen
from shearling.engine.recompute import recomputed
from shearling.models.structure import structure_of
from shearling.surgeon.measure import measure
from tiny import as_run


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "gpt2"])
@pytest.mark.parametrize("half", [False, True])
def test_curvature_is_the_same_with_and_without(family: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: half)
    structure, batches = structure_of(tiny_model(family)), as_run(tiny_batches(family))
    kept = measure(structure, batches, precision="bfloat16")
    monkeypatch.setattr(recompute, "MOST", 0)
    again = measure(structure, batches, precision="bfloat16")
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one.A.matrix, other.A.matrix)
        torch.testing.assert_close(one.G.matrix, other.G.matrix)
        assert one.tokens == other.tokens


def test_layers_are_as_before_afterwards() -> None:
    model = tiny_model("llama")
    structure = structure_of(model)
    own = [vars(layer).get("forward") for layer in structure.stacks[0].layers]
    with frozen(model), recomputed(structure):
        assert all("forward" in vars(layer) for layer in structure.stacks[0].layers)
    assert [vars(layer).get("forward") for layer in structure.stacks[0].layers] == own


def test_a_drawn_loss_in_parts_is_that_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's own cross-entropy at the classes drawn, with gradients."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator).requires_grad_()
    draw = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 5, generator=generator)
    for chunk in (4, 40, 10**6):
        monkeypatch.setitem(losses.CHUNK, "cpu", chunk)
        found = losses._drawn_loss(logits, draw)
        sums = logits.detach().double().softmax(-1).cumsum(-1)
        target = (sums <= draw[..., None] * sums[..., -1:]).sum(-1).clamp(max=10)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(
            3, 5
        )
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad((one * weights).sum(), logits)[0] for one in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_a_drawn_loss_of_bfloat16_logits_is_that_of_float32_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 5, 11, generator=generator).bfloat16().requires_grad_()
    full = half.detach().float().requires_grad_()
    draw = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    losses_of = [losses._drawn_loss(logits, draw) for logits in (half, full)]
    torch.testing.assert_close(*losses_of, rtol=0, atol=0)
    gradients = [
        torch.autograd.grad(loss.sum(), logits)[0] for loss, logits in zip(losses_of, (half, full), strict=True)
    ]
    torch.testing.assert_close(gradients[0], gradients[1].bfloat16(), rtol=0, atol=0)
