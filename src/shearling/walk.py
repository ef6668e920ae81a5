"""Walk teacher and student through their layers together, repairing the student's sublayers on the way up.

At every moment only one layer's inputs are held: for each batch what enters the layer in the teacher and in the
student. A sublayer's repair sees the student as it is below it, errors included, and the teacher's undamaged output:

    y = o_T + x_T - x_S      (o: output of the projection, x: residual input)      Eq. 12
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shearling.models.structure import Stack, Structure, Sublayer
from shearling.moments import Moments
from shearling.passes import Progress, device_of, fast_matmul, flat, frozen, run, silent, split_call
from shearling.sample import Batch, Sample

Repair = Callable[[Sublayer, Moments, Moments], bool]  # (student's sublayer, fit, held out) -> go on?


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
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


@dataclass
class _Lane:
    """One model's way through one stack: the hidden states before the current layer, and how to call each layer."""

    hidden: list[Tensor]  # one [B, S, D] a batch
    calls: list[list[_Call]]  # [batch][layer]; a single entry serves all layers

    def call(self, batch: int, layer: int) -> _Call:
        calls = self.calls[batch]
        return calls[layer] if len(calls) > 1 else calls[0]


def walk(
    teacher: Structure, student: Structure, sample: Sample, repair: Repair, *, progress: Progress = silent
) -> None:
    """Repair every sublayer of the student, bottom-up; ends early when a repair says so."""
    total = len(teacher.sublayers)
    done = 0
    with frozen(teacher.model), frozen(student.model), torch.inference_mode(), fast_matmul():
        batches = [batch.to(device_of(teacher.model)) for batch in sample]
        for number, (above, below) in enumerate(zip(teacher.stacks, student.stacks, strict=True)):
            lane_t = _enter(teacher.model, above, batches)
            # The first stack's inputs are embeddings, which pruning leaves alone; a decoder sees the pruned encoder.
            lane_s = _Lane(list(lane_t.hidden), lane_t.calls) if number == 0 else _enter(student.model, below, batches)
            for depth in range(len(above.layers)):
                targets = _teach(above, depth, lane_t, batches)
                for part, sublayer in enumerate(below.sublayers[depth]):
                    fit, held_out = _observe(below, depth, part, lane_s, targets, batches)
                    if not repair(sublayer, fit, held_out):
                        return
                    done += 1
                    progress(done, total)
                del targets
                _advance(below, depth, lane_s)


def _enter(model: nn.Module, stack: Stack, batches: Sequence[Batch]) -> _Lane:
    """Record what reaches the layers. Once a full pass shows that all are called alike, one call per batch will do."""
    lane = _Lane([], [])
    alike = False
    for batch in batches:
        hidden, calls = _record(model, stack, batch, first_only=alike)
        if not alike and all(call.same_as(calls[0]) for call in calls):
            alike = True
            calls = calls[:1]
        lane.hidden.append(hidden)
        lane.calls.append(calls)
    return lane


def _record(model: nn.Module, stack: Stack, batch: Batch, *, first_only: bool) -> tuple[Tensor, list[_Call]]:
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
        _until_stopped(run, model, batch)
    return entering[0], calls


def _until_stopped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except _Stop:
        return None


def _forward(stack: Stack, depth: int, lane: _Lane, batch: int) -> Tensor:
    call = lane.call(batch, depth)
    out = stack.layers[depth](lane.hidden[batch], *call.args, **call.kwargs)
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


def _teach(stack: Stack, depth: int, lane: _Lane, batches: Sequence[Batch]) -> list[list[Tensor]]:
    """[batch][part]: o_T + x_T of each sublayer; the lane moves on to the next layer."""
    targets: list[list[Tensor]] = []
    for number in range(len(batches)):
        residuals: dict[int, Tensor] = {}
        sums: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for part, sublayer in enumerate(stack.sublayers[depth]):
                hooks.callback(_see_residual(sublayer, part, residuals))
                hooks.callback(_see_output(sublayer, part, residuals, sums))
            lane.hidden[number] = _forward(stack, depth, lane, number)
        targets.append([sums[part] for part in sorted(sums)])
    return targets


def _see_residual(sublayer: Sublayer, part: int, residuals: dict[int, Tensor]) -> Callable[[], None]:
    scale = sublayer.scale

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = split_call(args, kwargs)[0]
        residuals[part] = residual if scale is None else residual / scale

    return sublayer.residual.register_forward_pre_hook(hook, with_kwargs=True).remove


def _see_output(
    sublayer: Sublayer, part: int, residuals: dict[int, Tensor], sums: dict[int, Tensor]
) -> Callable[[], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        sums[part] = output + residuals[part]

    return sublayer.out.register_forward_hook(hook).remove


def _observe(
    stack: Stack, depth: int, part: int, lane: _Lane, targets: list[list[Tensor]], batches: Sequence[Batch]
) -> tuple[Moments, Moments]:
    """Moments of the student's h and y, for the examples that fit and for those held out."""
    sublayer = stack.sublayers[depth][part]
    columns = sublayer.units * sublayer.width
    fit, held_out = (Moments.zeros(columns, sublayer.weight.shape[0], sublayer.weight) for _ in range(2))
    for number, batch in enumerate(batches):
        residuals: dict[int, Tensor] = {}
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...], seen: list[Tensor] = seen) -> None:
            seen.append(args[0])
            raise _Stop

        with ExitStack() as hooks:
            hooks.callback(_see_residual(sublayer, part, residuals))
            hooks.callback(sublayer.out.register_forward_pre_hook(hook).remove)
            _until_stopped(_forward, stack, depth, lane, number)
        h = seen[0][..., :columns]
        y = targets[number][part] - residuals[part]
        real = batch.real_tokens(stack.row.mask, h.shape[:2])
        judge = batch.held_out().to(h.device)
        for moments, chosen in ((fit, ~judge), (held_out, judge)):
            rows = chosen[:, None].expand(h.shape[:2]) if real is None else chosen[:, None] & real
            moments.add(flat(h, rows), flat(y, rows))
    fit.add_up()
    held_out.add_up()
    return fit, held_out


def _advance(stack: Stack, depth: int, lane: _Lane) -> None:
    for number in range(len(lane.hidden)):
        lane.hidden[number] = _forward(stack, depth, lane, number)
