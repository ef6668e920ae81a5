"""Mask tuning against a dense least-squares problem on the full matrix A."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.engine.moments import Moments
from shearling.paper.tune import apply, normal_equations, tune


def problem(units: int, width: int, out: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return draw(tokens, units * width), draw(out, units * width), draw(out), draw(tokens, out)


def moments_of(h: Tensor, y: Tensor, chunks: int = 3) -> Moments:
    moments = Moments.zeros(h.shape[1], y.shape[1], h)
    for rows, targets in zip(h.chunk(chunks), y.chunk(chunks), strict=True):
        moments.add(rows, targets)
    return moments


def matrix_of(h: Tensor, weight: Tensor, width: int) -> Tensor:
    """A of Eq. 27, [tokens x D, units]: column i is what unit i adds to the output."""
    columns = []
    for unit in range(weight.shape[1] // width):
        own = slice(unit * width, (unit + 1) * width)
        columns.append((h[:, own] @ weight[:, own].T).flatten())
    return torch.stack(columns, 1)


shapes = pytest.mark.parametrize(("units", "width"), [(6, 1), (4, 3), (1, 5)], ids=["filters", "heads", "one head"])


@shapes
@pytest.mark.parametrize("damp", [1.0, 0.1, 7.0])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_damped_lstsq(units: int, width: int, damp: float, has_bias: bool) -> None:
    h, weight, bias, y = problem(units, width, out=5, tokens=30, seed=units)
    A = matrix_of(h, weight, width).numpy()
    target = (y - bias if has_bias else y).flatten().numpy()
    rows = np.vstack([A, damp * np.eye(units)])  # the damping as rows of its own
    change = np.linalg.lstsq(rows, np.concatenate([target - A.sum(1), np.zeros(units)]), rcond=None)[0]
    result = tune(weight, bias if has_bias else None, moments_of(h, y), width, damp=damp)
    np.testing.assert_allclose(result.mask.numpy(), 1 + change, rtol=1e-9, atol=1e-10)
    error = ((A @ (1 + change) - target) ** 2).sum() / len(h)
    assert result.after == pytest.approx(error, rel=1e-9)


@shapes
def test_normal_equations_equal_those_of_the_full_matrix(units: int, width: int) -> None:
    h, weight, bias, y = problem(units, width, out=5, tokens=30, seed=1)
    A = matrix_of(h, weight, width)
    normal, target = normal_equations(weight, bias, moments_of(h, y), width)
    torch.testing.assert_close(normal, A.T @ A)
    torch.testing.assert_close(target, A.T @ (y - bias).flatten())


@settings(deadline=None, max_examples=40)
@given(units=st.integers(1, 6), width=st.integers(1, 4), tokens=st.integers(1, 20), seed=st.integers(0, 1000))
def test_never_reconstructs_worse_than_masks_of_one(units: int, width: int, tokens: int, seed: int) -> None:
    h, weight, bias, y = problem(units, width, out=3, tokens=tokens, seed=seed)
    result = tune(weight, bias, moments_of(h, y, chunks=1), width)
    assert result.after <= result.before * (1 + 1e-9)


def test_folding_the_mask_in_equals_masking_the_input() -> None:
    h, weight, _, _ = problem(4, 3, out=5, tokens=7, seed=0)
    mask = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(h @ apply(weight, mask, 3).T, (h * mask.repeat_interleave(3)) @ weight.T)


def test_a_perfect_student_keeps_masks_of_one() -> None:
    h, weight, bias, _ = problem(4, 2, out=6, tokens=40, seed=3)
    result = tune(weight, bias, moments_of(h, h @ weight.T + bias), 2)
    torch.testing.assert_close(result.mask, torch.ones(4, dtype=torch.float64))
    assert result.accepted


@pytest.mark.parametrize(("factor", "accepted"), [(9.0, True), (-9.0, True), (30.0, False), (-30.0, False)])
def test_masks_outside_the_range_are_not_accepted(factor: float, accepted: bool) -> None:
    h, weight, bias, _ = problem(4, 2, out=6, tokens=400, seed=3)
    wanted = torch.tensor([1.0, factor, 1.0, 1.0], dtype=torch.float64)
    result = tune(weight, bias, moments_of(h, h @ apply(weight, wanted, 2).T + bias), 2)
    assert result.accepted is accepted


def test_sums_that_rounding_left_indefinite_still_give_masks() -> None:
    """Large activations in single precision: rounding exceeds the damping of 1, and must not end the run.

    Which sums a processor rounds down is its own affair, so a few last places are taken off here.
    """
    h, weight, bias, y = problem(6, 1, out=5, tokens=60, seed=5)
    h[:, 3:] = h[:, :3]  # each filter has a twin, so A^T A is singular
    weight[:, 3:] = weight[:, :3]
    moments = moments_of((h * 1e5).float(), y.float())
    moments.gram.matrix.diagonal().mul_(1 - 1e-6)
    normal, _ = normal_equations(weight.float(), bias.float(), moments, 1)
    assert torch.linalg.eigvalsh(normal)[0] < -1  # the case at hand
    result = tune(weight.float(), bias.float(), moments, 1)
    assert result.mask.isfinite().all()
    assert result.accepted


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sums_that_are_not_finite_are_not_accepted(value: float) -> None:
    h, weight, bias, y = problem(4, 3, 5, 40, seed=0)
    h[0, 0] = value
    assert not tune(weight, bias, moments_of(h, y), 3).accepted
