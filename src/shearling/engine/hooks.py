"""Hooks for running a model frozen, masked or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shearling.engine.precision import Precision, half_precision, suited
from shearling.errors import DataError, InputError
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter gradients, no KV cache; restored afterwards."""
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
def eager() -> Iterator[None]:
    """Enable gradients, disable autocast and compiled code, whatever the caller's settings; usable as a decorator.

    Compiled code does not call hooks reliably.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's inputs."""
    return next(model.parameters()).device


def run(model: nn.Module, batch: Batch, precision: Precision = "float32") -> Any:
    """One forward pass, without labels."""
    with half_precision(model, suited(model, precision)):
        return model(**batch.inputs, return_dict=True)


@contextmanager
def told_what_is_refused(model: nn.Module) -> Iterator[None]:
    """Turn a ValueError of the model's own code, which checks sizes of its inputs, into a DataError."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise DataError(f"{type(model).__name__} does not take these examples: {error}") from error


@contextmanager
def masked(sublayers: Sequence[Sublayer], masks: Sequence[Tensor]) -> Iterator[None]:
    """Multiply each unit's columns of `h` by its mask ([units], or [B, units] for a mask per example)."""
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
    """Call back with each sublayer's `h` (the input of its output projection) and its output."""
    with ExitStack() as stack:
        for number, sublayer in enumerate(sublayers):
            if on_input is not None:
                before = sublayer.out.register_forward_pre_hook(lambda _, args, n=number: on_input(n, args[0]))
                stack.callback(before.remove)
            if on_output is not None:
                after = sublayer.out.register_forward_hook(lambda _, args, output, n=number: on_output(n, output))
                stack.callback(after.remove)
        yield


@contextmanager
def differentiable(structure: Structure) -> Iterator[list[Tensor]]:
    """Let gradients start at the first layer of each stack; yields the list of these leaf tensors."""
    leaves: list[Tensor] = []

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, rest, named = split_call(args, kwargs)
        if not _reaches(hidden, leaves):  # with shared weights, the hook runs once per depth
            hidden = hidden.detach().requires_grad_()
            leaves.append(hidden)
        return (hidden, *rest), named

    with ExitStack() as stack:
        for one in structure.stacks:
            handle = one.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield leaves


def _reaches(values: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether gradients of `values` flow back to one of the leaves.

    `requires_grad` is not enough: with gradient checkpointing, embeddings require gradients too.
    """
    nodes, seen = [values.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if any(getattr(node, "variable", None) is leaf for leaf in leaves):
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Split a layer's arguments into (hidden states, other positional arguments, other keyword arguments)."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {k: v for k, v in kwargs.items() if k != "hidden_states"}


def by_example(values: Tensor, examples: int) -> Tensor:
    """[B x S, n] or [B x windows, tokens, n] -> [B, S, n], for layers that flatten the batch."""
    if values.dim() == 3 and len(values) == examples:
        return values
    return values.reshape(examples, -1, values.shape[-1])


def flat(h: Tensor, rows: Tensor | slice) -> Tensor:
    """[B, S, n] -> [tokens, n]: the given rows of [B x S]; slices are not copied."""
    h = h.detach()
    if h.dim() > 2:
        h = h.flatten(0, 1)
    return h[rows] if isinstance(rows, slice) else h.index_select(0, rows.to(h.device))
