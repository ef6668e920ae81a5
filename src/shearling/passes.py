"""Running the model: frozen, watched, and in batches that fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample import Batch, Sample

logger = logging.getLogger("shearling")
T = TypeVar("T")
EXACT_ROWS = 4096
MAX_TOKENS = {"cpu": 4096, "cuda": 24576}  # per batch, forward and backward
MAX_TOKENS_FORWARD = {"cpu": 4096, "cuda": 98304}
Progress = Callable[[int, int], None]  # (done, total)


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
def fast_matmul() -> Iterator[None]:
    """TF32 for the model's own float32 products on GPUs that have it; docs/performance.md has what it changes."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b with the precision of float32, which TF32 alone lacks: Gram matrices would turn indefinite.

    On a GPU, a float32 is split into a part that TF32 holds exactly and the rest; three fast products of the parts
    (two, if a is b) leave out only rest times rest.
    """
    if a.device.type != "cuda" or a.dtype != torch.float32:
        total.addmm_(a.T, b)
        return
    if len(a) > EXACT_ROWS:  # tensor cores cut off what they add up; short sums lose little, long ones drift
        for start in range(0, len(a), EXACT_ROWS):
            part = a[start : start + EXACT_ROWS]
            add_product_(total, part, part if b is a else b[start : start + EXACT_ROWS])
        return
    a_high, a_low = _split(a)
    if b is a:
        mixed = a_high.T @ a_low
        total.addmm_(a_high.T, a_high).add_(mixed).add_(mixed.T)
    else:
        b_high, b_low = _split(b)
        total.addmm_(a_high.T, b_high).addmm_(a_high.T, b_low).addmm_(a_low.T, b_high)


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """a = high + low, high with the 10 bits of mantissa that TF32 has."""
    high = (a.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high, a - high


def device_of(model: nn.Module) -> torch.device:
    """Where the model wants its inputs."""
    return next(model.parameters()).device


def run(model: nn.Module, batch: Batch) -> Any:
    """One forward pass; labels are never handed to the model."""
    return model(**batch.inputs, return_dict=True)


def bounded(sample: Sample, device: torch.device, *, backward: bool = True) -> Sample:
    """The sample in batches whose activations fit: large ones keep a GPU busy, small ones suit a CPU's caches."""
    most = MAX_TOKENS if backward else MAX_TOKENS_FORWARD
    return sample.capped(most.get(device.type, most["cpu"]))


def with_halving(stage: Callable[[Sample], T], sample: Sample) -> T:
    """Run a stage; when memory runs out, run it again with batches half as large, and say so."""
    while True:
        try:
            return stage(sample)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            largest = max(map(len, sample))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            sample = sample.halved()
            logger.warning("Out of memory with batches of %d; going on with %d.", largest, max(map(len, sample)))


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


def flat(h: Tensor, rows: Tensor | None) -> Tensor:
    """[B, S, n] -> [tokens, n]: the rows of [B x S] given, or all of them."""
    h = h.detach()
    if h.dim() > 2:
        h = h.flatten(0, 1)
    return h if rows is None else h.index_select(0, rows.to(h.device))
