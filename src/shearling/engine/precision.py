"""Precision of the passes over the sample: TF32 and bfloat16, where the hardware has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.models.structure import check_supported

# Of matrix products in passes over the sample, if the hardware has it: TF32 on GPUs, bfloat16 also on some CPUs.
Precision = Literal["float32", "tf32", "bfloat16"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        with float32_products("highest" if precision == "float32" else "high"):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(planned)
        F.scaled_dot_product_attention = attention


@contextmanager
def float32_products(how: str) -> Iterator[None]:
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


def suited(model: nn.Module, precision: Precision) -> Precision:
    """The requested precision, or float32 where the family's code does not run under an autocast to bfloat16."""
    config = getattr(model, "config", None)
    return "float32" if precision == "bfloat16" and config and not check_supported(config).half else precision


def used_precision(model: nn.Module, precision: Precision) -> str:
    """The precision actually used: the model's own if the device or the family does not support the requested one."""
    parameter, precision = next(model.parameters()), suited(model, precision)
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

    A GPU sums products of high and low parts instead (`gram`), which would gain a CPU nothing.
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
