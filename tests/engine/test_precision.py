"""Products from bfloat16 parts against float64, and settings that are restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shearling.engine import precision
from shearling.engine.precision import EXACT_ROWS, add_gram_, add_gram_and_cross_, half_precision, has_bfloat16, kernels


def test_kernels_are_restored_after_an_error() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), kernels("tf32"):  # noqa: PT012
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise ZeroDivisionError
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()) == before


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has bfloat16."""
    monkeypatch.setattr(precision, "_in_parts", lambda total, a: True)


@pytest.mark.parametrize("rows", [7, EXACT_ROWS, 2 * EXACT_ROWS + 5])
@pytest.mark.parametrize("columns", [16, 13])
@pytest.mark.parametrize("half", [False, True])
def test_products_of_bfloat16_parts_are_nearly_exact(in_parts: None, rows: int, columns: int, half: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    h, y = (torch.randn(rows, n, generator=generator) for n in (columns, 5))
    h = h.bfloat16() if half else h
    gram, again, cross = torch.zeros(columns, columns), torch.zeros(columns, columns), torch.zeros(columns, 5)
    add_gram_and_cross_(gram, cross, h, y)
    add_gram_(again, h)
    for found, right in ((gram, h), (again, h), (cross, y)):
        exact = h.double().T @ right.double()
        size = h.double().abs().T @ right.double().abs()
        assert ((found - exact).abs() / size).max() < 2**-15


def test_plain_bfloat16_would_lose_far_more() -> None:
    a = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0))
    rounded = a.bfloat16().float()
    assert ((rounded.T @ rounded - a.T @ a).abs() / (a.abs().T @ a.abs())).max() > 2**-15


def test_sums_keep_the_precision_of_the_total() -> None:
    h, y = torch.randn(50, 3), torch.randn(50, 2)
    gram, cross = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    add_gram_and_cross_(gram, cross, h, y)
    torch.testing.assert_close(gram, h.double().T @ h.double(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cross, h.double().T @ y.double(), rtol=1e-12, atol=1e-12)


def test_half_precision_is_for_float32_on_a_gpu() -> None:
    layer = nn.Linear(3, 3)
    with half_precision(layer, "bfloat16"):
        assert layer(torch.ones(1, 3)).dtype == torch.float32


def test_bfloat16_that_is_only_emulated_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 or V100 says that it supports bfloat16, if emulation counts."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bfloat16(torch.device("cuda"))
