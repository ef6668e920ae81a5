"""Sums of a^T a and a^T b over many rows, with float32 accuracy.

On a GPU at the speed of bfloat16: a float32 is split into two bfloat16, high + low, and only the product low x low is
dropped. This keeps 16 bits of mantissa; TF32 has 10, which makes Gram matrices indefinite. bfloat16 inputs have no low
part. On a CPU, only bfloat16 inputs use bfloat16 products.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.engine.precision import float32_products, has_bfloat16

EXACT_ROWS = 4096  # rows per bfloat16 GEMM; the chunks are summed in float32
SPLIT_ROWS = 8 * EXACT_ROWS  # rows per split into high and low parts
BLOCK = 512  # columns per block on a CPU
COLUMN_MULTIPLE = 8  # tensor cores are slow for other column counts


@dataclass(frozen=True)
class Gram:
    """A sum of a^T a, [n, n]. On a CPU, of a large one only the lower triangle is computed and kept."""

    columns: list[Tensor]  # adjacent blocks of columns, each from its diagonal block down

    @staticmethod
    def zeros(n: int, like: Tensor) -> Gram:
        """An empty sum in the dtype and on the device of `like`."""
        return Gram([like.new_zeros(n - start, stop - start) for start, stop in _blocks(n, like.device)])

    @staticmethod
    def entries(n: int, device: torch.device) -> int:
        """How many numbers a sum of this size keeps."""
        return sum((n - start) * (stop - start) for start, stop in _blocks(n, device))

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def device(self) -> torch.device:
        return self.columns[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.columns[0].dtype

    @property
    def matrix(self) -> Tensor:
        """[n, n], both triangles."""
        if len(self.columns) == 1:
            return self.columns[0]
        whole = self.columns[0].new_empty(len(self), len(self))
        self.copy_to(whole)
        return whole

    def copy_to(self, whole: Tensor) -> None:
        """Write both triangles into a tensor [n, n] of any dtype and device."""
        start = 0
        for column in self.columns:
            stop = start + column.shape[1]
            whole[start:, start:stop] = column
            whole[start:stop, stop:] = column[stop - start :].T
            start = stop

    def add_(self, a: Tensor) -> None:
        """Add a^T a, for a [rows, n]."""
        if not len(a):
            return
        if self.device != a.device:  # the sum is kept on the host
            product = Gram([torch.zeros(len(self), len(self), dtype=self.dtype, device=a.device)])
            product.add_(a)
            self._add_matrix_(product.matrix)
        elif _in_parts(self.dtype, a):
            for rows in a.split(SPLIT_ROWS):
                self._add_matrix_(_gram(_split(rows))[: len(self), : len(self)])
        else:
            with _exact_products(self.dtype, a):
                a, start = a.to(self.dtype), 0
                for column in self.columns:
                    stop = start + column.shape[1]
                    column.addmm_(a[:, start:].T, a[:, start:stop])
                    start = stop

    def divide_(self, by: Tensor) -> None:
        """Divide by a scalar."""
        for column in self.columns:
            column /= by

    def mix_(self, other: Gram, share: float) -> None:
        """Keep the rest of this sum, and add this share of the other."""
        for column, added in zip(self.columns, other.columns, strict=True):
            column.lerp_(added, share)

    def _add_matrix_(self, matrix: Tensor) -> None:
        start = 0
        for column in self.columns:
            stop = start + column.shape[1]
            column += matrix[start:, start:stop].to(column.device)
            start = stop


def _blocks(n: int, device: torch.device) -> list[tuple[int, int]]:
    """(start, stop) of the columns that are kept together."""
    size = BLOCK if device.type == "cpu" and n >= 2 * BLOCK else max(n, 1)
    return [(start, min(start + size, n)) for start in range(0, max(n, 1), size)]


def add_gram_and_cross_(gram: Gram, cross: Tensor, h: Tensor, y: Tensor) -> None:
    """gram += h^T h and cross += h^T y, for h [rows, n] and y [rows, m]; on a GPU, they share their products."""
    if not len(h):
        return
    if not _in_parts(cross.dtype, h):
        gram.add_(h)
        with _exact_products(cross.dtype, h, y):
            cross.addmm_(h.to(cross.dtype).T, y.to(cross.dtype))
        return
    n, m = cross.shape
    for h_rows, y_rows in zip(h.split(SPLIT_ROWS), y.split(SPLIT_ROWS), strict=True):
        left, right = _split(h_rows), _split(y_rows)
        wide = left.high.shape[-1]
        both = _products(left.high, torch.cat([left.high, right.high], -1))
        gram._add_matrix_(both[:n, :n])
        cross += both[:n, wide : wide + m]
        lows = [part for part in (left.low, right.low) if part is not None]
        if lows:
            mixed = _products(left.high, torch.cat(lows, -1))
            if right.low is not None:
                cross += mixed[:n, -right.low.shape[-1] :][:, :m]
            if left.low is not None:
                gram._add_matrix_(mixed[:n, :n] + mixed[:n, :n].T)
                cross += _products(left.low, right.high)[:n, :m]


def _exact_products(dtype: torch.dtype, *factors: Tensor) -> AbstractContextManager[None]:
    """Float32 products by a CPU's bfloat16 instructions, where the factors are bfloat16: exact, with float32 sums."""
    suits = dtype == torch.float32 and all(
        a.dtype == torch.bfloat16 and a.device.type == "cpu" and has_bfloat16(a.device) for a in factors
    )
    return float32_products("medium") if suits else nullcontext()


def _in_parts(dtype: torch.dtype, a: Tensor) -> bool:
    """Whether products are computed from bfloat16 parts, as on a GPU."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return not exact and dtype == torch.float32 and a.device.type == "cuda" and has_bfloat16(a.device)


class Parts(NamedTuple):
    """A matrix as high + low in bfloat16, [chunks, rows, columns]."""

    high: Tensor
    low: Tensor | None


def _split(a: Tensor) -> Parts:
    """Split into chunks of rows, zero-padded to whole chunks and to a multiple of columns for tensor cores."""
    missing = -len(a) % EXACT_ROWS if len(a) > EXACT_ROWS else 0
    if missing or a.shape[1] % COLUMN_MULTIPLE:
        a = F.pad(a, (0, -a.shape[1] % COLUMN_MULTIPLE, 0, missing))
    a = a.unflatten(0, (-1, min(len(a), EXACT_ROWS)))
    high = a.bfloat16()
    return Parts(high, None if a.dtype == torch.bfloat16 else (a - high).bfloat16())


def _gram(a: Parts) -> Tensor:
    total = _products(a.high, a.high)
    if a.low is not None:
        mixed = _products(a.high, a.low)
        total += mixed + mixed.T
    return total


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b in float32, [columns of a, columns of b].

    In chunks, because tensor cores truncate while accumulating, so long sums would drift.
    """
    if a.device.type == "cuda" and "dtype" in torch.ops.aten.bmm.overloads():  # from torch 2.8 on
        return torch.bmm(a.mT, b, out_dtype=torch.float32).sum(0)
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(a.mT.float(), b.float()).sum(0)  # TF32 represents bfloat16 exactly
