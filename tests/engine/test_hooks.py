"""Running the model leaves no trace, whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shearling.engine.hooks import differentiable, flat, frozen, masked, run, split_call, watched
from shearling.models.structure import structure_of
from tiny import as_run, batches_of, inputs_of, model_of


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_frozen_puts_everything_back_even_after_an_error() -> None:
    model = model_of("bert").train()
    model.bert.embeddings.eval()
    model.classifier.weight.requires_grad_(False)
    model.config.use_cache = True
    modes = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="middle"), frozen(model):  # noqa: PT012
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        assert model.config.use_cache is False
        raise RuntimeError("middle")
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert model.config.use_cache is True


def test_masks_multiply_the_units_columns() -> None:
    model = model_of("bert")
    structure = structure_of(model)
    inputs = inputs_of(batches_of(1)[0])
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(s.units, generator=generator) for s in structure.sublayers]
    with torch.no_grad(), masked(structure.sublayers, masks):
        found = model(**inputs).logits
    with torch.no_grad():  # the same by scaling the projections' columns
        for sublayer, mask in zip(structure.sublayers, masks, strict=True):
            sublayer.weight.mul_(mask.repeat_interleave(sublayer.width))
        torch.testing.assert_close(found, model(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_one_mask_an_example() -> None:
    model = model_of("bert").double()
    structure = structure_of(model)
    inputs = inputs_of(batches_of(1, 3)[0])
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(3, s.units, generator=generator) for s in structure.sublayers]
    with torch.no_grad():
        with masked(structure.sublayers, masks):
            together = model(**inputs).logits
        for i in range(3):
            with masked(structure.sublayers, [m[i] for m in masks]):
                alone = model(**{k: v[i : i + 1] for k, v in inputs.items()}).logits
            torch.testing.assert_close(together[i], alone[0])


def test_hooks_are_gone_afterwards() -> None:
    model = model_of("bert")
    structure = structure_of(model)
    masks = [torch.ones(s.units) for s in structure.sublayers]
    seen: list[int] = []
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="middle"),
        masked(structure.sublayers, masks),
        watched(structure.sublayers, lambda i, h: seen.append(i), lambda i, o: seen.append(-i)),
        differentiable(structure),
    ):
        assert hooks_of(model) > 0
        model(**inputs_of(batches_of(1)[0]))
        raise RuntimeError("middle")
    assert sorted(seen) == [-3, -2, -1, 0, 0, 1, 2, 3]
    assert hooks_of(model) == 0


def test_the_gradient_starts_at_the_first_layer() -> None:
    model = model_of("bert")
    structure = structure_of(model)
    (batch,) = as_run(batches_of(1))
    with frozen(model), differentiable(structure) as leaves:
        run(model, batch).logits.sum().backward(inputs=leaves)
    assert [tuple(leaf.shape) for leaf in leaves] == [(4, 12, 32)]
    assert leaves[0].grad is not None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_embeddings_that_give_gradients_change_nothing(family: str) -> None:
    """As they do once gradient checkpointing is enabled; layers that share weights still start only one gradient."""
    (batch,) = as_run(batches_of(1))
    found = []
    for asked in (False, True):
        model = model_of(family)
        if asked:
            model.enable_input_require_grads()
        with frozen(model), differentiable(structure_of(model)) as leaves:
            run(model, batch).logits.square().sum().backward(inputs=leaves)
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[1], found[0])
    assert len(found[0]) == len(structure_of(model).stacks)


def test_flat_takes_the_real_tokens() -> None:
    h = torch.arange(12.0).view(2, 3, 2)
    real = torch.tensor([[True, True, False], [True, False, False]])
    assert flat(h, real.flatten().nonzero().flatten()).tolist() == [[0, 1], [2, 3], [6, 7]]
    assert flat(h, slice(None)).shape == (6, 2)
    assert flat(h, slice(2)).data_ptr() == h.data_ptr()


def test_a_layers_call_is_split_either_way() -> None:
    hidden, mask = torch.zeros(1), torch.ones(1)
    first: tuple[Tensor, object, object] = split_call((hidden, mask), {"a": 1})
    second = split_call((), {"hidden_states": hidden, "a": 1})
    assert first == (hidden, (mask,), {"a": 1})
    assert second == (hidden, (), {"a": 1})
