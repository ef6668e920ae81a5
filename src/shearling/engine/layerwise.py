"""One model's way through a stack of layers: what enters each layer, how it is called, and what passes by inside.

At every moment only one layer's inputs are held. A layer can be run again up to a point of interest; of what happens
inside only the output of its attention is kept, so that it need not run again for the sublayers that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shearling.engine.hooks import by_example, run, split_call
from shearling.engine.precision import Precision, half_precision
from shearling.models.structure import Stack
from shearling.sample.sample import Batch

Point = Literal["in", "h", "out", "end"]  # how far a layer is run: into the units, to h, through the output, all of it


class _Stop(BaseException):
    """Ends a forward pass at the module of interest. Not an Exception, so that no model code catches it."""


@dataclass
class _Call:
    """How one batch enters one layer, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def same_as(self, other: _Call) -> bool:
        mine = [*self.args, *sorted(self.kwargs.items(), key=lambda kv: kv[0])]
        theirs = [*other.args, *sorted(other.kwargs.items(), key=lambda kv: kv[0])]
        return len(mine) == len(theirs) and all(_same(a, b) for a, b in zip(mine, theirs, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, (str, int, float)) and isinstance(b, (str, int, float)) and a == b)


class Shelf:
    """One [B, S, D] a batch; on the host where the device has no room for all of them."""

    def __init__(self, tensors: Iterable[Tensor] = (), *, spilled: bool = False) -> None:
        self.spilled = spilled
        self._tensors: list[Tensor] = []
        self._devices: list[torch.device] = []
        for tensor in tensors:
            self.append(tensor)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index].to(self._devices[index], non_blocking=True)

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._tensors[index], self._devices[index] = self._kept(tensor), tensor.device

    def append(self, tensor: Tensor) -> None:
        self._tensors.append(self._kept(tensor))
        self._devices.append(tensor.device)

    def copy(self) -> Shelf:
        """The same tensors on a shelf of their own."""
        return Shelf((self[i] for i in range(len(self))), spilled=self.spilled)

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.spilled else tensor


def _no_room(batches: Sequence[Batch], hidden: Tensor) -> bool:
    """Whether two lanes of hidden states, and as much inside a layer, would fill more than half of what is free."""
    if hidden.device.type != "cuda":
        return False
    rows = sum(len(batch) for batch in batches) / hidden.shape[0]
    return 4 * rows * hidden.numel() * hidden.element_size() > torch.cuda.mem_get_info(hidden.device)[0] / 2


@dataclass
class Lane:
    """One model's way through one stack: the hidden states before the current layer, and how to call each layer."""

    hidden: Shelf
    calls: list[list[_Call]]  # [batch][layer]; a single entry serves all layers
    precision: Precision
    finished: dict[tuple[int, int], Any] = field(default_factory=dict)  # [part, batch]: what the part's core gave

    def call(self, batch: int, layer: int) -> _Call:
        calls = self.calls[batch]
        return calls[layer] if len(calls) > 1 else calls[0]


@dataclass
class Seen:
    """What one run of a layer showed of one sublayer, all [B, S, ...]."""

    z: Tensor | None = None  # input of the projections into the units
    x: Tensor | None = None  # residual the output is added to, over the scale of the output if there is one
    h: Tensor | None = None  # input of the output projection
    o: Tensor | None = None  # its output
    hidden: Tensor | None = None  # output of the layer


def probe(stack: Stack, depth: int, part: int, lane: Lane, batch: int, upto: Point) -> Seen:
    """Run one layer for one batch up to a point, and tell what passed by. What is finished is not run again."""
    sublayers = stack.sublayers[depth]
    sublayer = sublayers[part]
    scale = sublayer.scale
    seen = Seen()
    added: list[Tensor] = []  # to the residual, by the sublayer beside this one
    entering = lane.hidden[batch]
    examples = len(entering)

    def on_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = sublayer.part.place
        x = by_example(args[place] if place else split_call(args, kwargs)[0], examples)
        seen.x = x if scale is None else x / scale

    def on_output_beside(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        added.append(by_example(output[0] if isinstance(output, tuple) else output, examples))

    def on_z(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.z = by_example(args[0], examples)
        if upto == "in":
            raise _Stop

    def on_h(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.h = by_example(args[0], examples)
        if upto == "h":
            raise _Stop

    def on_o(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        # Falcon adds the attention's output to this one in place.
        seen.o = by_example(output.clone() if sublayer.beside else output, examples)
        if upto == "out" and not sublayer.out_in_core:
            raise _Stop

    def on_core(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if part < len(sublayers) - 1 and _is_one_tensor(output) and not lane.hidden.spilled:
            lane.finished[part, batch] = output
        if upto == "out" and sublayer.out_in_core:
            raise _Stop

    with ExitStack() as hooks:
        for number in range(part):
            if (number, batch) in lane.finished:
                hooks.enter_context(giving(sublayers[number].core, lane.finished[number, batch]))
        hooks.callback(sublayer.residual.register_forward_pre_hook(on_residual, with_kwargs=True).remove)
        if sublayer.beside:
            hooks.callback(sublayers[part - 1].core.register_forward_hook(on_output_beside).remove)
        if sublayer.inputs:
            hooks.callback(sublayer.inputs[0].module.register_forward_pre_hook(on_z).remove)
        hooks.callback(sublayer.out.register_forward_pre_hook(on_h).remove)
        hooks.callback(sublayer.out.register_forward_hook(on_o).remove)
        hooks.callback(sublayer.core.register_forward_hook(on_core).remove)
        hooks.enter_context(half_precision(stack.layers[depth], lane.precision))
        call = lane.call(batch, depth)
        out = _until_stopped(stack.layers[depth], entering, *call.args, **call.kwargs)
    if seen.x is not None and added:
        seen.x = seen.x + added[0]
    seen.hidden = out[0] if isinstance(out, tuple) else out
    return seen


def _is_one_tensor(output: Any) -> bool:
    """Attention weights, or position biases that are handed on, would be too much to keep."""
    values = output if isinstance(output, tuple) else (output,)
    return isinstance(values[0], Tensor) and not any(isinstance(value, Tensor) for value in values[1:])


@contextmanager
def giving(module: nn.Module, output: Any) -> Iterator[None]:
    """The module gives what it gave before, whatever it is called with."""
    before = vars(module).get("forward")  # where somebody put one over that of the class
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def enter(model: nn.Module, stack: Stack, batches: Sequence[Batch], precision: Precision) -> Lane:
    """Record what reaches the layers. Once a full pass shows that all are called alike, one call per batch will do."""
    lane = Lane(Shelf(), [], precision)
    alike = False
    for batch in batches:
        hidden, calls = _record(model, stack, batch, precision, first_only=alike)
        if not alike and all(call.same_as(calls[0]) for call in calls):
            alike = True
            calls = calls[:1]
        if not len(lane.hidden) and _no_room(batches, hidden):
            lane.hidden.spilled = True
        lane.hidden.append(hidden)
        lane.calls.append(calls)
    return lane


def _record(
    model: nn.Module, stack: Stack, batch: Batch, precision: Precision, *, first_only: bool
) -> tuple[Tensor, list[_Call]]:
    """The hidden states that enter the stack, and the call of each layer (or of the first, and no further)."""
    entering: list[Tensor] = []
    calls: list[_Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, rest, named = split_call(args, kwargs)
        if not calls:
            entering.append(hidden)
        calls.append(_Call(rest, named))
        if first_only:
            raise _Stop

    with ExitStack() as hooks:
        for layer in dict.fromkeys(stack.layers):
            hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        _until_stopped(run, model, batch, precision)
    return entering[0], calls


def _until_stopped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except _Stop:
        return None
