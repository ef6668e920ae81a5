"""Precision by device, attention on CPUs, and settings that are restored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shearling.engine import precision
from shearling.engine.precision import (
    as_multiplied,
    cpu_has_bfloat16,
    half_precision,
    has_bfloat16,
    kernels,
    used_precision,
)


def test_kernels_are_restored_after_an_error() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), kernels(nn.Linear(1, 1), "tf32"):  # noqa: PT012
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise ZeroDivisionError
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()) == before


def test_half_precision_is_for_devices_that_have_it() -> None:
    layer = nn.Linear(3, 3)
    with half_precision(layer, "bfloat16"):
        assert layer(torch.ones(1, 3)).dtype == torch.float32


def test_bfloat16_that_is_only_emulated_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 or V100 says that it supports bfloat16, if emulation counts."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bfloat16(torch.device("cuda"))


@pytest.fixture
def half_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has bfloat16 products; others compute the same, slowly."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)


def test_a_cpu_is_asked_for_its_instructions_and_for_what_pytorch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    for capability, expected in (("AVX512", True), ("AVX2", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert cpu_has_bfloat16() is expected
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):  # an older PyTorch knows of neither
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert cpu_has_bfloat16() is False


def test_products_on_such_a_cpu_are_bfloat16(half_cpu: None) -> None:
    layer = nn.Linear(3, 3)
    with half_precision(layer, "bfloat16"):
        assert layer(torch.ones(1, 3)).dtype == torch.bfloat16
    assert used_precision(layer, "bfloat16") == "bfloat16"
    assert used_precision(layer, "tf32") == "float32"
    assert used_precision(layer.bfloat16(), "float32") == "bfloat16"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_beside_them_is_float32(half_cpu: None, masked: bool, rotary: bool) -> None:
    """Rotary embeddings leave queries and keys in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator).bfloat16() for _ in range(3))
    q, k, v = (t.float().requires_grad_() if rotary and t is not v else t.requires_grad_() for t in (q, k, v))
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.arange(5) > 3, -1e4).bfloat16() if masked else None
    with kernels(nn.Linear(1, 1), "bfloat16"), torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    full = [t.detach().float().requires_grad_() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*full, attn_mask=None if mask is None else mask.float())
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)
    found.sum().backward()
    exact.sum().backward()
    for half, wide in zip((q, k, v), full, strict=True):
        torch.testing.assert_close(half.grad.float(), wide.grad, rtol=2**-7, atol=2**-7)


def test_only_float32_is_rounded_for_them(half_cpu: None) -> None:
    assert as_multiplied(torch.ones(2), "bfloat16").dtype == torch.bfloat16
    assert as_multiplied(torch.ones(2), "float32").dtype == torch.float32
    assert as_multiplied(torch.ones(2, dtype=torch.float64), "bfloat16").dtype == torch.float64
