"""Running the model leaves no trace, whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shearling.engine.hooks import differentiable, flat, frozen, masked, run, split_call, watched
from shearling.engine.memory import with_halving
from shearling.engine.precision import EXACT_ROWS, add_product_, fast_matmul, half_precision, split_product
from shearling.errors import ShearlingError
from shearling.models.structure import structure_of
from shearling.sample.sample import Sample, sample_of
from tiny import batches_of, inputs_of, model_of


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


def test_fast_matmul_puts_the_precision_back() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), fast_matmul("tf32"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("rows", [7, EXACT_ROWS, 2 * EXACT_ROWS + 5])
@pytest.mark.parametrize("columns", [16, 13])
def test_products_of_bfloat16_parts_are_nearly_those_of_float32(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, n, generator=generator) for n in (columns, 5))
    for left, right in ((a, b), (a, a), (a.bfloat16(), b)):
        found = split_product(left, right)[: left.shape[1], : right.shape[1]]
        exact = left.double().T @ right.double()
        size = left.double().abs().T @ right.double().abs()
        assert ((found - exact).abs() / size).max() < 2**-15
    half = a.bfloat16().float()  # what plain bfloat16 would lose is far more
    assert ((half.T @ half - a.T @ a).abs() / (a.abs().T @ a.abs())).max() > 2**-15


def test_sums_keep_the_precision_of_the_total() -> None:
    a = torch.randn(50, 3)
    total = torch.zeros(3, 3, dtype=torch.float64)
    add_product_(total, a, a)
    torch.testing.assert_close(total, a.double().T @ a.double(), rtol=1e-12, atol=1e-12)


def test_half_precision_is_for_float32_on_a_gpu() -> None:
    layer = nn.Linear(3, 3)
    with half_precision(layer, "bfloat16"):
        assert layer(torch.ones(1, 3)).dtype == torch.float32


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
    (batch,) = sample_of(batches_of(1))
    with frozen(model), differentiable(structure) as leaves:
        run(model, batch).logits.sum().backward(inputs=leaves)
    assert [tuple(leaf.shape) for leaf in leaves] == [(4, 12, 32)]
    assert leaves[0].grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_memory_that_runs_out_halves_the_batches() -> None:
    sizes: list[int] = []

    def stage(sample: Sample) -> int:
        sizes.append(max(map(len, sample)))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return sample.examples

    assert with_halving(stage, sample_of(batches_of(2, 8))) == 16
    assert sizes == [8, 4, 2]


def test_a_process_among_others_does_not_start_over_alone() -> None:
    def stage(sample: Sample) -> int:
        raise torch.OutOfMemoryError

    with pytest.raises(ShearlingError, match=r"batches of 8.*--batch-size"):
        with_halving(stage, sample_of(batches_of(2, 8)), alone=False)


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
