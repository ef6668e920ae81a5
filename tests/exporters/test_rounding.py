"""Rounding with error feedback: against plain rounding, a slow solution, and the trained outputs of a small model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shearling.exporters.rounding import BLOCK, DAMP, GRIDS, Grid, round_columns


def matrices(seed: int = 0, rows: int = 24, columns: int = 80) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(400, columns, generator=generator) @ (mix + 0.3)
    return weight, inputs.T @ inputs / len(inputs)


def plain(weight: Tensor, grid: Grid) -> Tensor:
    """Every weight to its nearest value, block by block."""
    rounded = []
    for block in weight.split(BLOCK, 1):
        scale = grid.scale(block, torch.ones(block.shape[1]))
        rounded.append(grid.codes(block, scale) * scale)
    return torch.cat(rounded, 1)


def cost(weight: Tensor, rounded: Tensor, A: Tensor) -> float:
    error = (weight - rounded).double()
    return float(((error @ A.double()) * error).sum())


@pytest.mark.parametrize("name", GRIDS)
def test_the_outputs_change_less_than_by_plain_rounding(name: str) -> None:
    for seed in range(3):
        weight, A = matrices(seed)
        rounded, _ = round_columns(weight, A, GRIDS[name])
        assert cost(weight, rounded, A) < 0.7 * cost(weight, plain(weight, GRIDS[name]), A)


@pytest.mark.parametrize("name", GRIDS)
def test_every_weight_is_a_code_times_the_scale_of_its_block(name: str) -> None:
    weight, A = matrices()
    grid = GRIDS[name]
    rounded, scales = round_columns(weight, A, grid)
    assert scales.shape == (24, 3)  # blocks of 32, 32 and 16 columns
    assert torch.equal(scales, scales.half().float())
    spread = scales.repeat_interleave(BLOCK, 1)[:, :80]
    codes = rounded / spread
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    assert codes.min() >= grid.low - 1e-4
    assert codes.max() <= grid.high + 1e-4
    torch.testing.assert_close(grid.codes(rounded, spread) * spread, rounded)


def test_feedback_is_the_best_answer_of_the_columns_that_are_left() -> None:
    """Against a slow solution: after each column, the others are solved for again by least squares."""
    weight, A = matrices(columns=BLOCK)
    grid = GRIDS["q4_0"]
    damped = A.double() + DAMP * A.double().diagonal().mean() * torch.eye(BLOCK, dtype=torch.float64)
    rounded, scales = round_columns(weight, A, grid)
    current = weight.double().clone()
    for j in range(BLOCK):
        fixed, left = slice(0, j + 1), slice(j + 1, BLOCK)
        current[:, j] = grid.codes(current[:, j], scales[:, 0].double()) * scales[:, 0]
        off = weight.double()[:, fixed] - current[:, fixed]
        # minimise tr(E A E^T) over the columns that are left, those before them being off by `off`
        answer = torch.linalg.solve(damped[left, left], damped[left, fixed] @ off.T).T
        current[:, left] = weight.double()[:, left] + answer
    torch.testing.assert_close(rounded.double(), current, atol=1e-5, rtol=0)


def test_without_correlation_it_is_plain_rounding() -> None:
    weight, _ = matrices()
    for A in (torch.eye(80), torch.zeros(80, 80)):
        torch.testing.assert_close(round_columns(weight, A, GRIDS["q4_0"])[0], plain(weight, GRIDS["q4_0"]))


def test_zeros_stay_zero() -> None:
    _, A = matrices()
    rounded, scales = round_columns(torch.zeros(3, 80), A, GRIDS["q4_0"])
    assert not rounded.any()
    assert not scales.any()
