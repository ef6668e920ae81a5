"""Run a model one layer at a time and capture tensors at a given point.

Only the hidden states before the current layer are stored. A layer can be run up to a given point; the output of its
attention is cached, so that the attention does not run again for the FFN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shearling.engine.hooks import by_example, run, split_call
from shearling.engine.memory import free_bytes
from shearling.engine.precision import Precision, half_precision, suited
from shearling.models.structure import Stack
from shearling.sample.batch import Batch

# How far a layer is run: to the input of the units, to h, through the output projection, or to its end.
Point = Literal["in", "h", "out", "end"]


class _Stop(BaseException):
    """Ends a forward pass early. A BaseException, so that model code does not catch it."""


@dataclass
class LayerCall:
    """The arguments of one layer for one batch, without hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def same_as(self, other: LayerCall) -> bool:
        """Whether both calls have the same arguments."""
        mine = [*self.args, *sorted(self.kwargs.items(), key=lambda kv: kv[0])]
        theirs = [*other.args, *sorted(other.kwargs.items(), key=lambda kv: kv[0])]
        return len(mine) == len(theirs) and all(_same(a, b) for a, b in zip(mine, theirs, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, (str, int, float)) and isinstance(b, (str, int, float)) and a == b)


class HiddenStates:
    """The hidden states [B, S, D] of every batch; on the host if they do not fit on the device."""

    def __init__(self, tensors: Iterable[Tensor] = (), *, on_host: bool = False) -> None:
        self.on_host = on_host
        self._tensors: list[Tensor] = []
        self._devices: list[torch.device] = []
        for tensor in tensors:
            self.append(tensor)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index].to(self._devices[index], non_blocking=True)

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._tensors[index], self._devices[index] = self._stored(tensor), tensor.device

    def append(self, tensor: Tensor) -> None:
        """Add the hidden states of one more batch."""
        self._tensors.append(self._stored(tensor))
        self._devices.append(tensor.device)

    def copy(self) -> HiddenStates:
        """A shallow copy."""
        other = HiddenStates(on_host=self.on_host)
        other._tensors, other._devices = [*self._tensors], [*self._devices]
        return other

    def _stored(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.on_host else tensor


@dataclass
class LayerwiseRun:
    """The state of running one stack layer by layer: hidden states before the current layer, and the layers' arguments.

    calls     [batch][layer]; a single entry is for all layers
    finished  [part, batch]: cached output of a sublayer's core, for running the layer again for a later sublayer
    """

    hidden: HiddenStates
    calls: list[list[LayerCall]]
    precision: Precision
    finished: dict[tuple[int, int], Any] = field(default_factory=dict)

    def call(self, batch: int, layer: int) -> LayerCall:
        """The arguments of a layer for a batch."""
        calls = self.calls[batch]
        return calls[layer] if len(calls) > 1 else calls[0]


@dataclass
class Captured:
    """The tensors of one sublayer in one run of its layer, all [B, S, ...]."""

    z: Tensor | None = None  # input of the projections into the units
    x: Tensor | None = None  # residual input, divided by the scale of the output if there is one
    h: Tensor | None = None  # input of the output projection
    o: Tensor | None = None  # its output
    hidden: Tensor | None = None  # output of the layer


def run_layer(stack: Stack, depth: int, part: int, run: LayerwiseRun, batch: int, upto: Point) -> Captured:
    """Run one layer for one batch up to a point, and capture a sublayer's tensors; cached cores are not run again."""
    sublayers = stack.sublayers[depth]
    sublayer = sublayers[part]
    scale = sublayer.scale
    captured = Captured()
    added: list[Tensor] = []  # output of the parallel sublayer
    entering = run.hidden[batch]
    examples = len(entering)

    def on_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = sublayer.part.place
        x = by_example(args[place] if place else split_call(args, kwargs)[0], examples)
        captured.x = x if scale is None else x / scale

    def on_output_beside(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        added.append(by_example(output[0] if isinstance(output, tuple) else output, examples))

    def on_z(module: nn.Module, args: tuple[Any, ...]) -> None:
        if captured.z is None:  # DeBERTa also projects relative positions, after the tokens, with the same weights
            captured.z = by_example(args[0], examples)
        if upto == "in":
            raise _Stop

    def on_h(module: nn.Module, args: tuple[Any, ...]) -> None:
        captured.h = by_example(args[0], examples)
        if upto == "h":
            raise _Stop

    def on_o(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        # Falcon modifies this output in place.
        captured.o = by_example(output.clone() if sublayer.part.beside else output, examples)
        if upto == "out" and not sublayer.out_in_core:
            raise _Stop

    def on_core(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if part < len(sublayers) - 1 and _is_one_tensor(output) and not run.hidden.on_host:
            run.finished[part, batch] = output
        if upto == "out" and sublayer.out_in_core:
            raise _Stop

    with ExitStack() as hooks:
        for number in range(part):
            if (number, batch) in run.finished:
                hooks.enter_context(returning(sublayers[number].core, run.finished[number, batch]))
        hooks.callback(sublayer.residual.register_forward_pre_hook(on_residual, with_kwargs=True).remove)
        if sublayer.part.beside:
            hooks.callback(sublayers[part - 1].core.register_forward_hook(on_output_beside).remove)
        if sublayer.inputs:
            hooks.callback(sublayer.inputs[0].module.register_forward_pre_hook(on_z).remove)
        hooks.callback(sublayer.out.register_forward_pre_hook(on_h).remove)
        hooks.callback(sublayer.out.register_forward_hook(on_o).remove)
        hooks.callback(sublayer.core.register_forward_hook(on_core).remove)
        hooks.enter_context(half_precision(stack.layers[depth], run.precision))
        call = run.call(batch, depth)
        out = _until_stopped(stack.layers[depth], entering, *call.args, **call.kwargs)
    if captured.x is not None and added:
        captured.x = captured.x + added[0]
    captured.hidden = out[0] if isinstance(out, tuple) else out
    return captured


def _is_one_tensor(output: Any) -> bool:
    """Whether the output is a single tensor; attention weights or position biases would take too much memory."""
    values = output if isinstance(output, tuple) else (output,)
    return isinstance(values[0], Tensor) and not any(isinstance(value, Tensor) for value in values[1:])


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward."""
    before = vars(module).get("forward")  # a forward set on the instance
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def returning(module: nn.Module, output: Any) -> AbstractContextManager[None]:
    """Make the module return this output without running."""
    return replaced(module, lambda *args, **kwargs: output)


def start_run(model: nn.Module, stack: Stack, batches: Sequence[Batch], precision: Precision) -> LayerwiseRun:
    """Capture the inputs of a stack. If all layers have equal arguments, later batches run only to the first layer."""
    precision = suited(model, precision)
    started = LayerwiseRun(HiddenStates(), [], precision)
    alike = False
    for batch in batches:
        hidden, calls = _record_calls(model, stack, batch, precision, first_only=alike)
        if not alike and all(call.same_as(calls[0]) for call in calls):
            alike = True
            calls = calls[:1]
        if not len(started.hidden) and _too_large(batches, hidden):
            started.hidden.on_host = True
        started.hidden.append(hidden)
        started.calls.append(calls)
    return started


def _too_large(batches: Sequence[Batch], hidden: Tensor) -> bool:
    """Whether both models' hidden states and a layer's activations would take more than half of the free memory.

    The first batch has the longest examples, so its size per example is an upper bound.
    """
    if hidden.device.type != "cuda":
        return False
    examples = sum(map(len, batches))
    return 4 * examples / len(hidden) * hidden.nbytes > free_bytes(hidden.device) / 2


def _record_calls(
    model: nn.Module, stack: Stack, batch: Batch, precision: Precision, *, first_only: bool
) -> tuple[Tensor, list[LayerCall]]:
    """The input of the stack, and the arguments of each layer, or only of the first."""
    entering: list[Tensor] = []
    calls: list[LayerCall] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, rest, named = split_call(args, kwargs)
        if not calls:
            entering.append(hidden)
        calls.append(LayerCall(rest, named))
        if first_only:
            raise _Stop

    with ExitStack() as hooks:
        for layer in dict.fromkeys(stack.layers):
            hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if stack.repeats == 1:  # stop after the last layer, before a language model's head
            hooks.callback(stack.layers[-1].register_forward_hook(_stop).remove)
        _until_stopped(run, model, batch, precision)
    return entering[0], calls


def _stop(module: nn.Module, args: Any, output: Any) -> None:
    raise _Stop


def _until_stopped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except _Stop:
        return None
