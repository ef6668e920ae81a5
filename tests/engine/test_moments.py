"""Sums over tokens against the tall matrices they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.engine.moments import Moments


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(h: Tensor, y: Tensor) -> Moments:
    moments = Moments.zeros(h.shape[1], y.shape[1], h)
    moments.add(h, y)
    return moments


@settings(deadline=None, max_examples=40)
@given(tokens=st.integers(0, 30), n=st.integers(0, 6), out=st.integers(1, 4), cut=st.integers(0, 30))
def test_sums_do_not_depend_on_how_the_tokens_come(tokens: int, n: int, out: int, cut: int) -> None:
    h, y = draw(tokens, n), draw(tokens, out, seed=1)
    added = moments_of(h[:cut], y[:cut])
    added.add(h[cut:], y[cut:])
    joined = moments_of(h[:cut], y[:cut]) + moments_of(h[cut:], y[cut:])
    for found in (added, joined):
        torch.testing.assert_close(found.gram.matrix, h.T @ h)
        torch.testing.assert_close(found.cross, h.T @ y)
        torch.testing.assert_close(found.h_sum, h.sum(0))
        torch.testing.assert_close(found.y_sum, y.sum(0))
        torch.testing.assert_close(found.y_squared, y.square().sum())
        assert int(found.count) == tokens


def test_weights_are_tokens_that_come_several_times() -> None:
    h, y, times = draw(6, 4), draw(6, 3, seed=1), torch.tensor([1, 4, 0, 9, 1, 4])
    found = Moments.zeros(4, 3, h)
    found.add(h, y, times.float())
    expected = moments_of(h.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other)


def test_with_bias_is_the_gram_matrix_with_a_column_of_ones() -> None:
    h, y = draw(20, 4), draw(20, 3, seed=1)
    wide = torch.cat([h, torch.ones(20, 1, dtype=h.dtype)], 1)
    gram, cross = moments_of(h, y).with_bias()
    torch.testing.assert_close(gram, wide.T @ wide)
    torch.testing.assert_close(cross, wide.T @ y)


@pytest.mark.parametrize("has_bias", [True, False])
def test_error_is_the_mean_over_tokens(has_bias: bool) -> None:
    h, y, weight, bias = draw(20, 4), draw(20, 3, seed=1), draw(3, 4, seed=2), draw(3, seed=3)
    expected = (h @ weight.T + (bias if has_bias else 0) - y).square().sum(1).mean()
    assert moments_of(h, y).error(weight, bias if has_bias else None) == pytest.approx(float(expected))
    assert Moments.zeros(4, 3, h).error(weight, bias) == 0


def test_a_perfect_fit_has_no_negative_error() -> None:
    h, weight = 1e4 * draw(50, 6), draw(3, 6, seed=2)
    assert moments_of(h, h @ weight.T).error(weight, None) >= 0


@pytest.mark.parametrize(
    ("model", "sums"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_precision_of_the_sums(model: torch.dtype, sums: torch.dtype) -> None:
    moments = moments_of(draw(5, 2).to(model), draw(5, 2).to(model))
    assert moments.gram.dtype == moments.cross.dtype == sums
    assert moments.y_squared.dtype == moments.count.dtype == torch.float64
