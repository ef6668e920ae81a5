"""Precision of the passes over the sample: TF32, bfloat16, and sums of products that keep float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["float32", "tf32", "bfloat16"]  # of the products in passes over the sample, on a GPU
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT_ROWS = 4096  # rows per bfloat16 GEMM; the chunks are summed in float32
SPLIT_ROWS = 8 * EXACT_ROWS  # rows split into high and low parts at once
COLUMN_MULTIPLE = 8  # tensor cores are slow for other column counts


@contextmanager
def fast_matmul(precision: Precision) -> Iterator[None]:
    """TF32 for float32 products on GPUs that have it, unless float32 is asked for."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def half_precision(module: nn.Module, precision: Precision) -> Iterator[None]:
    """bfloat16, if asked for, for the products inside a float32 module on a GPU; norms and residuals stay float32."""
    parameter = next(module.parameters())
    suits = parameter.device.type == "cuda" and parameter.dtype == torch.float32 and torch.cuda.is_bf16_supported()
    with torch.autocast(parameter.device.type, torch.bfloat16, enabled=suits and precision == "bfloat16"):
        yield


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b in the precision of `total`, or nearly so and at the speed of bfloat16 on a GPU.

    There, a float32 is split into two bfloat16, high + low, and only low times low is left out. That keeps 16 bits of
    mantissa, where TF32 has 10 and leaves Gram matrices indefinite. What is bfloat16 already has no low part.
    """
    if total.device != a.device:  # which had no room for it
        product = torch.zeros_like(total, device=a.device)
        add_product_(product, a, b)
        total += product.to(total.device)
        return
    exact = torch.get_float32_matmul_precision() == "highest"
    if exact or a.device.type != "cuda" or total.dtype != torch.float32:
        total.addmm_(a.to(total.dtype).T, b.to(total.dtype))
        return
    for start in range(0, len(a), SPLIT_ROWS):
        part = a[start : start + SPLIT_ROWS]
        product = split_product(part, part if b is a else b[start : start + SPLIT_ROWS])
        total += product[: total.shape[0], : total.shape[1]]


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b from bfloat16 parts, in float32."""
    a_high, a_low = _split(a)
    b_high, b_low = (a_high, a_low) if b is a else _split(b)
    product = _product(a_high, b_high)
    if b_low is not None:
        mixed = _product(a_high, b_low)
        product += mixed
        if b is a:
            product += mixed.T
    if a_low is not None and b is not a:
        product += _product(a_low, b_high)
    return product


def _split(a: Tensor) -> tuple[Tensor, Tensor | None]:
    """a = high + low in bfloat16, with columns of zeros up to the next number that tensor cores are fast at."""
    if a.shape[1] % COLUMN_MULTIPLE:
        a = F.pad(a, (0, -a.shape[1] % COLUMN_MULTIPLE))
    high = a.bfloat16()
    return high, None if a.dtype == torch.bfloat16 else (a - high).bfloat16()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b in float32: short sums side by side, for tensor cores cut off what they add up, and long sums drift."""
    whole = len(a) // EXACT_ROWS * EXACT_ROWS
    parts = [_products(*(m[:whole].unflatten(0, (-1, EXACT_ROWS)) for m in (a, b))).sum(0)] if whole else []
    if whole < len(a) or not parts:
        parts.append(_products(a[None, whole:], b[None, whole:])[0])
    return sum(parts[1:], parts[0])


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of every chunk [., rows, columns]."""
    if a.device.type == "cuda" and "dtype" in torch.ops.aten.bmm.overloads():  # from torch 2.8 on
        return torch.bmm(a.mT, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(a.mT.float(), b.float())  # TF32 holds a bfloat16 exactly, too
