"""The ridge refit against a dense least-squares problem with the ridge as rows of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.engine.moments import Moments
from shearling.surgeon.refit import refit, solve_ridge


def problem(n: int, out: int, tokens: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, y, weight, bias): y follows other weights than the given ones, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    h = draw(tokens, n) + 0.5
    weight, bias = draw(out, n), draw(out)
    y = h @ (weight + 0.5 * draw(out, n)).T + bias + 1 + noise * draw(tokens, out)
    return h, y, weight, bias


def moments_of(h: Tensor, y: Tensor) -> Moments:
    moments = Moments.zeros(h.shape[1], y.shape[1], h)
    moments.add(h, y)
    return moments


def dense_ridge(h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, ridge: float) -> np.ndarray:
    """[n (+ 1), D]: by `lstsq` on [H; sqrt(lambda) I] against [y; sqrt(lambda) old]."""
    H = h.numpy() if bias is None else np.hstack([h.numpy(), np.ones((len(h), 1))])
    old = weight.T.numpy() if bias is None else np.vstack([weight.T.numpy(), bias.numpy()])
    root = np.sqrt(ridge * np.mean(np.sum(H**2, axis=0)))
    rows = np.vstack([H, root * np.eye(H.shape[1])])
    return np.linalg.lstsq(rows, np.vstack([y.numpy(), root * old]), rcond=None)[0]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("ridge", [1e-2, 1.0])
@pytest.mark.parametrize(("n", "tokens"), [(5, 40), (20, 7)], ids=["tall", "wide"])
def test_equals_dense_ridge(has_bias: bool, ridge: float, n: int, tokens: int) -> None:
    h, y, weight, bias = problem(n, 3, tokens, seed=n)
    old_bias = bias if has_bias else None
    new_weight, new_bias = solve_ridge(weight, old_bias, moments_of(h, y), ridge)
    expected = dense_ridge(h, y, weight, old_bias, ridge)
    np.testing.assert_allclose(new_weight.T.numpy(), expected[:n], rtol=1e-7, atol=1e-9)
    if new_bias is None:
        assert not has_bias
    else:
        np.testing.assert_allclose(new_bias.numpy(), expected[n], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_sums_are_left_as_they_were(has_bias: bool) -> None:
    h, y, weight, bias = problem(5, 3, 40, seed=2)
    moments = moments_of(h, y)
    solve_ridge(weight, bias if has_bias else None, moments, 1.0)
    for found, expected in zip(moments.tensors, moments_of(h, y).tensors, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_fit_leaves_the_examples_out_that_judge_it(has_bias: bool) -> None:
    h, y, weight, bias = problem(5, 3, 80, seed=1, noise=0.1)
    old_bias = bias if has_bias else None
    result = refit(weight, old_bias, moments_of(h[:60], y[:60]), moments_of(h[60:], y[60:]))
    assert result.kept
    assert result.after < result.before
    expected = dense_ridge(h[:60], y[:60], weight, old_bias, 1e-2)
    np.testing.assert_allclose(result.weight.T.numpy(), expected[:5], rtol=1e-7)
    assert (result.bias is None) is not has_bias


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 6),
    tokens=st.integers(1, 20),
    held=st.integers(0, 10),
    noise=st.floats(0, 5),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_never_reconstructs_worse_than_no_refit(
    n: int, tokens: int, held: int, noise: float, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    """Over all examples, and on the ones held out, whatever the sample and however coarse the weights' dtype."""
    h, y, weight, bias = (t.to(dtype) for t in problem(n, 3, tokens + held, seed, noise))
    old_bias = bias if has_bias else None
    fit, held_out = moments_of(h[:tokens], y[:tokens]), moments_of(h[tokens:], y[tokens:])
    result = refit(weight, old_bias, fit, held_out)
    everything = fit + held_out
    before = everything.error(weight, old_bias)
    assert everything.error(result.weight, result.bias) <= before * (1 + 1e-6) + 1e-9
    assert result.after <= result.before
    assert result.weight.shape == weight.shape
    assert result.weight.dtype == dtype


def test_a_fit_that_does_not_carry_over_is_dropped() -> None:
    """Two tokens to fit many weights by, and held-out tokens that the old weights reconstruct perfectly."""
    generator = torch.Generator().manual_seed(0)
    h, _, weight, bias = problem(20, 3, 60, seed=2)
    y = h @ weight.T + bias
    noisy = y[:2] + 50 * torch.randn(2, 3, generator=generator, dtype=torch.float64)
    result = refit(weight, bias, moments_of(h[:2], noisy), moments_of(h[2:], y[2:]))
    assert not result.kept
    assert result.weight is weight
    assert result.bias is bias
    assert result.after == result.before


def test_without_held_out_examples_the_fit_judges_itself() -> None:
    h, y, weight, bias = problem(5, 3, 40, seed=3)
    nothing = Moments.zeros(5, 3, h)
    result = refit(weight, bias, moments_of(h, y), nothing)
    assert result.kept
    assert result.after == pytest.approx(moments_of(h, y).error(result.weight, result.bias))


def test_an_empty_sublayer_still_fits_its_bias() -> None:
    h, y, weight, bias = problem(0, 3, 4000, seed=4)
    result = refit(weight, bias, moments_of(h, y), Moments.zeros(0, 3, h), ridge=1e-6)
    assert result.kept
    assert result.bias is not None
    torch.testing.assert_close(result.bias, y.mean(0), rtol=1e-4, atol=1e-4)
    gone = refit(weight, None, moments_of(h, y), Moments.zeros(0, 3, h))
    assert not gone.kept


def test_a_perfect_student_is_left_alone() -> None:
    h, _, weight, bias = problem(5, 3, 40, seed=3)
    y = h @ weight.T + bias
    result = refit(weight, bias, moments_of(h[:30], y[:30]), moments_of(h[30:], y[30:]))
    torch.testing.assert_close(result.weight, weight)


def test_columns_that_never_fired_do_not_break_the_solve() -> None:
    h, y, weight, bias = problem(5, 3, 40, seed=3)
    h[:, 2] = 0
    new_weight, _ = solve_ridge(weight, bias, moments_of(h, y), 1e-2)
    torch.testing.assert_close(new_weight[:, 2], weight[:, 2])
    silent = moments_of(torch.zeros_like(h), y)
    assert solve_ridge(weight, None, silent, 1e-2)[0].isfinite().all()


def test_without_a_ridge_singular_sums_end_too() -> None:
    h, y, weight, bias = problem(4, 3, 40, seed=0)
    h[:, 1] = h[:, 0]
    new_weight, new_bias = solve_ridge(weight, bias, moments_of(h, y), 0.0)
    assert new_bias is not None
    H = np.hstack([h.numpy(), np.ones((40, 1))])
    best = H @ np.linalg.lstsq(H, y.numpy(), rcond=None)[0]
    np.testing.assert_allclose((h @ new_weight.T + new_bias).numpy(), best, atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sums_that_are_not_finite_leave_the_weights(value: float) -> None:
    h, y, weight, bias = problem(4, 3, 40, seed=0)
    h[0, 0] = value
    fit = refit(weight, bias, moments_of(h, y), moments_of(h, y))
    assert not fit.kept
    assert fit.weight is weight
