"""Running the model: frozen, watched, and in batches that fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.errors import ShearlingError
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample import Batch, Sample

logger = logging.getLogger("shearling")
T = TypeVar("T")
EXACT_ROWS = 4096  # that tensor cores add up with little loss
SPLIT_ROWS = 8 * EXACT_ROWS  # that are split at once
ALIGNED = 8  # columns
MAX_TOKENS = {"cpu": 1024, "cuda": 24576}  # per batch, forward and backward
MAX_TOKENS_FORWARD = {"cpu": 2048, "cuda": 49152}
Progress = Callable[[int, int], None]  # (done, total)
Precision = Literal["float32", "tf32", "bfloat16"]  # of the products in passes over the sample, on a GPU


def silent(done: int, total: int) -> None:
    """Progress nobody watches."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter gradients, no KV cache; everything as it was on the way out, come what may."""
    training = {module: module.training for module in model.modules()}
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    try:
        model.eval()
        model.requires_grad_(False)
        for config in caching.values():
            config.use_cache = False
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)
        for config in caching.values():
            config.use_cache = True


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
    if a.shape[1] % ALIGNED:
        a = F.pad(a, (0, -a.shape[1] % ALIGNED))
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


def device_of(model: nn.Module) -> torch.device:
    """Where the model wants its inputs."""
    return next(model.parameters()).device


def run(model: nn.Module, batch: Batch, precision: Precision = "float32") -> Any:
    """One forward pass; labels are never handed to the model."""
    with half_precision(model, precision):
        return model(**batch.inputs, return_dict=True)


def bounded(sample: Sample, device: torch.device, *, backward: bool = True) -> Sample:
    """The sample in batches whose activations fit: large ones keep a GPU busy, small ones suit a CPU's caches."""
    most = MAX_TOKENS if backward else MAX_TOKENS_FORWARD
    return sample.capped(most.get(device.type, most["cpu"]))


def with_halving(stage: Callable[[Sample], T], sample: Sample, *, alone: bool = True) -> T:
    """Run a stage; when memory runs out, run it again with batches half as large, and say so.

    A stage in which several processes wait for each other's sums cannot be run again by one of them.
    """
    while True:
        try:
            return stage(sample)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if not alone:
                raise ShearlingError(
                    f"Memory ran out with batches of {sample.largest}, and the other processes cannot start over with "
                    "this one; give a smaller --batch-size."
                ) from error
            largest = sample.largest
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            sample = sample.halved()
            logger.warning("Out of memory with batches of %d; going on with %d.", largest, sample.largest)


def _out_of_memory(error: Exception) -> bool:
    """A GPU has an error class of its own for this; on a CPU, torch only has words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


@contextmanager
def masked(sublayers: Sequence[Sublayer], masks: Sequence[Tensor]) -> Iterator[None]:
    """Multiply each unit's columns of `h` by its mask ([units], or [B, units] for one mask an example)."""
    with ExitStack() as stack:
        for sublayer, mask in zip(sublayers, masks, strict=True):
            handle = sublayer.out.register_forward_pre_hook(_masking(mask, sublayer.width))
            stack.callback(handle.remove)
        yield


def _masking(mask: Tensor, width: int) -> Callable[[nn.Module, Any], Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h = args[0]
        columns = mask.to(h).repeat_interleave(width, dim=-1)  # [n] or [B, n]
        if columns.dim() == 2:
            return ((by_example(h, len(columns)) * columns[:, None]).view_as(h), *args[1:])
        return (h * columns, *args[1:])

    return hook


@contextmanager
def watched(
    sublayers: Sequence[Sublayer],
    on_input: Callable[[int, Tensor], None] | None = None,
    on_output: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Show each sublayer's `h` (the input of its output projection) and output as they pass by."""
    with ExitStack() as stack:
        for number, sublayer in enumerate(sublayers):
            if on_input is not None:
                handle = sublayer.out.register_forward_pre_hook(_seeing(on_input, number))
                stack.callback(handle.remove)
            if on_output is not None:
                after = sublayer.out.register_forward_hook(_seeing_output(on_output, number))
                stack.callback(after.remove)
        yield


def _seeing(see: Callable[[int, Tensor], None], number: int) -> Callable[[nn.Module, Any], None]:
    return lambda module, args: see(number, args[0])


def _seeing_output(see: Callable[[int, Tensor], None], number: int) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda module, args, output: see(number, output)


@contextmanager
def differentiable(structure: Structure) -> Iterator[list[Tensor]]:
    """Start the gradient at the first layer of each stack; yields the list those inputs are added to."""
    leaves: list[Tensor] = []

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, rest, named = split_call(args, kwargs)
        if not hidden.requires_grad:  # layers that share weights come by here once per depth
            hidden = hidden.detach().requires_grad_()
            leaves.append(hidden)
        return (hidden, *rest), named

    with ExitStack() as stack:
        for pile in structure.stacks:
            handle = pile.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield leaves


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """A layer's call as (hidden states, other positional arguments, other named ones)."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {k: v for k, v in kwargs.items() if k != "hidden_states"}


def by_example(values: Tensor, examples: int) -> Tensor:
    """[B x S, n] -> [B, S, n], for layers that lay the tokens of a batch end to end."""
    return values.unflatten(0, (examples, -1)) if values.dim() == 2 else values


def flat(h: Tensor, rows: Tensor | slice) -> Tensor:
    """[B, S, n] -> [tokens, n]: some rows of [B x S]. A slice of them is not copied."""
    h = h.detach()
    if h.dim() > 2:
        h = h.flatten(0, 1)
    return h[rows] if isinstance(rows, slice) else h.index_select(0, rows.to(h.device))
