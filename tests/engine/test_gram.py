"""Sums of products against float64, from bfloat16 parts and in blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.engine import gram as sums
from shearling.engine import precision
from shearling.engine.gram import BLOCK, EXACT_ROWS, Gram, add_gram_and_cross_

FLOAT = torch.zeros(())


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has bfloat16."""
    monkeypatch.setattr(sums, "_in_parts", lambda dtype, a: True)


@pytest.fixture
def half_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has bfloat16 products; others compute the same, slowly."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)


@pytest.mark.parametrize("rows", [0, 7, EXACT_ROWS, 2 * EXACT_ROWS + 5])
@pytest.mark.parametrize("columns", [16, 13])
@pytest.mark.parametrize("half", [False, True])
def test_products_of_bfloat16_parts_are_nearly_exact(in_parts: None, rows: int, columns: int, half: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    h, y = (torch.randn(rows, n, generator=generator) for n in (columns, 5))
    h = h.bfloat16() if half else h
    gram, again, cross = Gram.zeros(columns, FLOAT), Gram.zeros(columns, FLOAT), torch.zeros(columns, 5)
    add_gram_and_cross_(gram, cross, h, y)
    again.add_(h)
    for found, right in ((gram.matrix, h), (again.matrix, h), (cross, y)):
        exact = h.double().T @ right.double()
        size = h.double().abs().T @ right.double().abs()
        assert ((found - exact).abs() <= 2**-15 * size).all()


def test_plain_bfloat16_would_lose_far_more() -> None:
    a = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0))
    rounded = a.bfloat16().float()
    assert ((rounded.T @ rounded - a.T @ a).abs() / (a.abs().T @ a.abs())).max() > 2**-15


def test_sums_keep_the_precision_of_the_total() -> None:
    h, y = torch.randn(50, 3), torch.randn(50, 2)
    cross = torch.zeros(3, 2, dtype=torch.float64)
    gram = Gram.zeros(3, cross)
    add_gram_and_cross_(gram, cross, h, y)
    torch.testing.assert_close(gram.matrix, h.double().T @ h.double(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cross, h.double().T @ y.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [16, 2 * BLOCK + 3])
def test_sums_of_bfloat16_products_keep_float32(half_cpu: None, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    h, y = torch.randn(600, n, generator=generator).bfloat16(), torch.randn(600, 7, generator=generator)
    before = torch.get_float32_matmul_precision()
    for right in (y, y.bfloat16()):
        gram, cross = Gram.zeros(n, FLOAT), torch.zeros(n, 7)
        add_gram_and_cross_(gram, cross, h, right)
        for found, factor in ((gram.matrix, h), (cross, right)):
            exact = h.double().T @ factor.double()
            size = h.double().abs().T @ factor.double().abs()
            assert ((found - exact).abs() / size).max() < 2**-18
    assert torch.get_float32_matmul_precision() == before


@settings(deadline=None, max_examples=30)
@given(n=st.integers(0, 20), parts=st.booleans())
def test_a_sum_in_blocks_is_that_in_one(n: int, parts: bool) -> None:
    """However the products are computed; what is kept is what `entries` counts."""
    rows = torch.randn(7, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    rows = rows.float() if parts else rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sums, "BLOCK", 4)
        patched.setattr(sums, "_in_parts", lambda dtype, a: parts)
        blocked = Gram.zeros(n, rows)
        assert sum(column.numel() for column in blocked.columns) == Gram.entries(n, rows.device)
        assert len(blocked.columns) == (-(-n // 4) if n >= 8 else 1)
        blocked.add_(rows)
        mixed = Gram.zeros(n, rows)
        mixed.mix_(blocked, 0.25)
        mixed.divide_(torch.tensor(0.25))
        blocked.add_(rows)
    blocked.divide_(torch.tensor(2.0))
    assert len(blocked) == n
    wide = torch.empty(n, n, dtype=torch.float64)
    blocked.copy_to(wide)
    assert torch.equal(wide, blocked.matrix.double())
    for found in (blocked.matrix, mixed.matrix):
        torch.testing.assert_close(found, rows.T @ rows, rtol=1e-4, atol=1e-4)
        assert torch.equal(found, found.T)
