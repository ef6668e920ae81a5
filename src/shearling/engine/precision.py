"""Precision of the passes over the sample: TF32, bfloat16, and Gram matrices with float32 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of matrix products in passes over the sample, if the hardware has it: TF32 on GPUs, bfloat16 also on some CPUs.
Precision = Literal["float32", "tf32", "bfloat16"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT_ROWS = 4096  # rows per bfloat16 GEMM; the chunks are summed in float32
SPLIT_ROWS = 8 * EXACT_ROWS  # rows per split into high and low parts
BLOCK = 512  # columns of a Gram matrix per block on a CPU
COLUMN_MULTIPLE = 8  # tensor cores are slow for other column counts


@contextmanager
def kernels(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Select the kernels of a model's forward and backward passes.

    GPU: TF32 for float32 products unless float32 is requested, and no cuDNN attention: it builds a plan for every new
    shape, which takes longer than the pass.
    CPU: float32 attention, even if all other products are bfloat16: for up to 128 tokens, the backward pass of bfloat16
    attention in PyTorch takes up to ten times as long.
    """
    planned, attention = torch.backends.cuda.cudnn_sdp_enabled(), F.scaled_dot_product_attention
    device = next(model.parameters()).device
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        if device.type == "cpu" and precision == "bfloat16" and has_bfloat16(device):
            F.scaled_dot_product_attention = partial(_float32_attention, attention)
        with _float32_products("highest" if precision == "float32" else "high"):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(planned)
        F.scaled_dot_product_attention = attention


@contextmanager
def _float32_products(how: str) -> Iterator[None]:
    """PyTorch's precision of float32 products: highest, high (TF32 on a GPU) or medium (bfloat16 on a CPU)."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(how)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _float32_attention(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's attention, in float32 for bfloat16 values; queries and keys may be float32 after rotary embeddings."""
    if value.dtype != torch.bfloat16:
        return attention(query, key, value, *args, **kwargs)
    args, kwargs = tuple(_wide(a) for a in args), {name: _wide(a) for name, a in kwargs.items()}  # the mask, if any
    with torch.autocast(query.device.type, enabled=False):
        return attention(query.float(), key.float(), value.float(), *args, **kwargs).bfloat16()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; others emulate it, slowly."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and cpu_has_bfloat16()


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products (AVX-512 BF16 or AMX), and PyTorch uses them."""
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # absent from older releases of PyTorch
    known = any(bool(getattr(torch.cpu, name, bool)()) for name in instructions)
    capability: str = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY may lower it
    return known and capability == "AVX512"


def used_precision(model: nn.Module, precision: Precision) -> str:
    """The precision actually used: the model's own if the device does not support the requested one."""
    parameter = next(model.parameters())
    if parameter.dtype == torch.float32:
        if precision == "bfloat16" and has_bfloat16(parameter.device):
            return precision
        if precision == "tf32" and parameter.device.type == "cuda":
            return precision
    return dtype_name(parameter.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in options and records: `float32`."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def half_precision(module: nn.Module, precision: Precision) -> Iterator[None]:
    """bfloat16 autocast of a float32 module, if requested and supported; norms and residuals stay float32."""
    parameter = next(module.parameters())
    suits = precision == "bfloat16" and parameter.dtype == torch.float32 and has_bfloat16(parameter.device)
    # Frozen weights are never cached. A cast of the first layer's input would be, with its gradient, batch after batch.
    with torch.autocast(parameter.device.type, torch.bfloat16, enabled=suits, cache_enabled=False):
        yield


def as_multiplied(values: Tensor, precision: Precision) -> Tensor:
    """What a CPU's products in bfloat16 see of float32 values; for sums over many tokens the rounding averages out.

    A GPU sums products of high and low parts instead (`add_gram_and_cross_`), which would gain a CPU nothing.
    """
    suits = precision == "bfloat16" and values.dtype == torch.float32 and values.device.type == "cpu"
    return values.bfloat16() if suits and has_bfloat16(values.device) else values


class HalfWeights:
    """bfloat16 copies of a model's float32 weights, used in their place for computing gradients.

    Unlike with autocast, hidden states and norms are bfloat16 too, which halves the memory traffic. The optimiser
    updates the float32 weights; `update` copies them.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Tensor]) -> None:
        self._parameters = [p for p in model.parameters() if p.dtype == torch.float32]
        self._full = [p.data for p in self._parameters]
        self._half = [p.data.bfloat16() for p in self._parameters]
        changing = {id(weight) for weight in weights}
        pairs = zip(self._parameters, self._half, self._full, strict=True)
        self._changing = [(half, full) for p, half, full in pairs if id(p) in changing]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Use the copies as the model's parameters."""
        try:
            self._put(self._half)
            yield
        finally:
            self._put(self._full)

    def update(self) -> None:
        """Update the copies from the float32 weights."""
        torch._foreach_copy_([half for half, _ in self._changing], [full for _, full in self._changing])

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor


def add_gram_(total: Tensor, a: Tensor) -> None:
    """total += a^T a, for a [rows, n]; see `add_gram_and_cross_`."""
    if total.device != a.device:  # the accumulator lives on the host
        product = torch.zeros_like(total, device=a.device)
        add_gram_(product, a)
        total += product.to(total.device)
    elif not _in_parts(total, a):
        with _exact_products(total, a):
            _add_symmetric_(total, a.to(total.dtype))
    else:
        for rows in a.split(SPLIT_ROWS):
            total += _gram(_split(rows))[: len(total), : len(total)]


def add_gram_and_cross_(gram: Tensor, cross: Tensor, h: Tensor, y: Tensor) -> None:
    """gram += h^T h and cross += h^T y, for h [rows, n] and y [rows, m].

    On a GPU, with nearly float32 accuracy at the speed of bfloat16: a float32 is split into two bfloat16, high + low,
    and only the product low x low is dropped. This keeps 16 bits of mantissa; TF32 has 10, which makes Gram matrices
    indefinite. bfloat16 inputs have no low part. On a CPU, only bfloat16 inputs use bfloat16 products.
    """
    if not _in_parts(gram, h):
        with _exact_products(gram, h):
            _add_symmetric_(gram, h.to(gram.dtype))
        with _exact_products(gram, h, y):
            cross.addmm_(h.to(gram.dtype).T, y.to(gram.dtype))
        return
    n, m = len(gram), cross.shape[1]
    for h_rows, y_rows in zip(h.split(SPLIT_ROWS), y.split(SPLIT_ROWS), strict=True):
        left, right = _split(h_rows), _split(y_rows)
        wide = left.high.shape[-1]
        both = _products(left.high, torch.cat([left.high, right.high], -1))
        gram += both[:n, :n]
        cross += both[:n, wide : wide + m]
        lows = [part for part in (left.low, right.low) if part is not None]
        if lows:
            mixed = _products(left.high, torch.cat(lows, -1))
            if right.low is not None:
                cross += mixed[:n, -right.low.shape[-1] :][:, :m]
            if left.low is not None:
                gram += mixed[:n, :n] + mixed[:n, :n].T
                cross += _products(left.low, right.high)[:n, :m]


def _add_symmetric_(total: Tensor, a: Tensor) -> None:
    """total += a^T a; for a large matrix on a CPU, only one half is computed."""
    n = len(total)
    if total.device.type != "cpu" or n < 2 * BLOCK:
        total.addmm_(a.T, a)
        return
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        total[start:, start:stop].addmm_(a[:, start:].T, a[:, start:stop])
        total[start:stop, stop:] = total[stop:, start:stop].T


def _exact_products(total: Tensor, *factors: Tensor) -> AbstractContextManager[None]:
    """Float32 products by a CPU's bfloat16 instructions, where the factors are bfloat16: exact, with float32 sums."""
    suits = total.dtype == torch.float32 and all(
        a.dtype == torch.bfloat16 and a.device.type == "cpu" and has_bfloat16(a.device) for a in factors
    )
    return _float32_products("medium") if suits else nullcontext()


def _in_parts(total: Tensor, a: Tensor) -> bool:
    """Whether products are computed from bfloat16 parts, as on a GPU."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return not exact and total.dtype == torch.float32 and a.device.type == "cuda" and has_bfloat16(a.device)


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
