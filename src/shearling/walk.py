"""Walk teacher and student through their layers together, repairing the student's sublayers on the way up.

At every moment only one layer's inputs are held: for each batch what enters the layer in the teacher and in the
student. A repair sees the student as it is below it, errors included, and the undamaged teacher. It comes at two
places of a sublayer:

    into the units       the student's input z_S against the teacher's z_T
    out of the units     the student's h_S against y = o_T + x_T - x_S      (o: output, x: residual input; Eq. 12)

To get there both models run the layer up to that point and stop. Of what happens inside a layer only the output of its
attention is kept, so that it need not run again for the sublayers that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shearling.models.structure import Share, Stack, Structure
from shearling.models.sublayer import Sublayer
from shearling.moments import Moments
from shearling.passes import (
    Precision,
    Progress,
    by_example,
    device_of,
    fast_matmul,
    flat,
    frozen,
    half_precision,
    run,
    silent,
    split_call,
)
from shearling.sample import Batch, Sample

Repair = Callable[[Sublayer, Moments, Moments], bool]  # (student's sublayer, fit, held out) -> go on?
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


class _Shelf:
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

    def copy(self) -> _Shelf:
        """The same tensors on a shelf of their own."""
        return _Shelf((self[i] for i in range(len(self))), spilled=self.spilled)

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.spilled else tensor


def _no_room(batches: Sequence[Batch], hidden: Tensor) -> bool:
    """Whether two lanes of hidden states, and as much inside a layer, would fill more than half of what is free."""
    if hidden.device.type != "cuda":
        return False
    rows = sum(len(batch) for batch in batches) / hidden.shape[0]
    return 4 * rows * hidden.numel() * hidden.element_size() > torch.cuda.mem_get_info(hidden.device)[0] / 2


@dataclass
class _Lane:
    """One model's way through one stack: the hidden states before the current layer, and how to call each layer."""

    hidden: _Shelf
    calls: list[list[_Call]]  # [batch][layer]; a single entry serves all layers
    precision: Precision
    finished: dict[tuple[int, int], Any] = field(default_factory=dict)  # [part, batch]: what the part's core gave

    def call(self, batch: int, layer: int) -> _Call:
        calls = self.calls[batch]
        return calls[layer] if len(calls) > 1 else calls[0]


@dataclass
class _Seen:
    """What one run of a layer showed of one sublayer, all [B, S, ...]."""

    z: Tensor | None = None  # input of the projections into the units
    x: Tensor | None = None  # residual input, over the scale of the output if there is one
    h: Tensor | None = None  # input of the output projection
    o: Tensor | None = None  # its output
    hidden: Tensor | None = None  # output of the layer


def walk(
    teacher: Structure,
    student: Structure,
    sample: Sample,
    repair: Repair,
    *,
    realign: Repair | None = None,
    precision: Precision = "float32",
    progress: Progress = silent,
) -> None:
    """Repair every sublayer of the student, bottom-up: first into its units, if asked for, then out of them.

    Ends early when a repair returns False.
    """
    total = len(teacher.sublayers)
    done = 0
    with frozen(teacher.model), frozen(student.model), torch.inference_mode(), fast_matmul(precision):
        batches = [batch.held_out_last().to(device_of(teacher.model)) for batch in sample]
        for number, (above, below) in enumerate(zip(teacher.stacks, student.stacks, strict=True)):
            lane_t = _enter(teacher.model, above, batches, precision)
            # The first stack's inputs are embeddings, which pruning leaves alone; a decoder sees the pruned encoder.
            if number == 0:
                lane_s = _Lane(lane_t.hidden.copy(), lane_t.calls, precision)
            else:
                lane_s = _enter(student.model, below, batches, precision)
            for depth, sublayers in enumerate(below.sublayers):
                for part, sublayer in enumerate(sublayers):
                    kind = _SharedPair if below.repeats > 1 else _Pair
                    pair = kind(above, below, depth, part, lane_t, lane_s, batches)
                    if realign is not None and sublayer.foldable and sublayer.units:
                        realign(sublayer, *pair.into_units())
                    last = part == len(sublayers) - 1
                    if not repair(sublayer, *pair.out_of_units(advance_teacher=last)):
                        return
                    if below.repeats == 1:
                        pair.leave_student(last=last)
                    done += 1
                    progress(done, total)
                for lane in (lane_t, lane_s):
                    lane.finished.clear()


@dataclass
class _Pair:
    """One sublayer in both models."""

    above: Stack
    below: Stack
    depth: int
    part: int
    lane_t: _Lane
    lane_s: _Lane
    batches: Sequence[Batch]

    def into_units(self) -> tuple[Moments, Moments]:
        """Moments of z_S against z_T: (to fit, held out)."""
        weight = self._sublayer.weight
        return self._moments(weight.shape[0], weight.shape[0], self._inputs)

    def out_of_units(self, *, advance_teacher: bool) -> tuple[Moments, Moments]:
        """Moments of h_S against y; the teacher's lane moves on to the next layer if asked to."""
        sublayer = self._sublayer

        def pairs(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for above, below in self._both(batch, "end" if advance_teacher else "out", "h"):
                y = above.o + above.x - below.x  # type: ignore[operator]
                yield below.h[..., : sublayer.units * sublayer.width], y  # type: ignore[index]
                if advance_teacher:
                    self._advance(batch, above)

        return self._moments(sublayer.units * sublayer.width, sublayer.weight.shape[0], pairs)

    def leave_student(self, *, last: bool) -> None:
        """Go on past the repaired sublayer: to the next layer, or to where its core is finished."""
        for batch in range(len(self.batches)):
            done = (self.part, batch)
            if last:
                hidden = _probe(self.below, self.depth, self.part, self.lane_s, batch, "end").hidden
                self.lane_s.hidden[batch] = hidden  # type: ignore[assignment]
            elif done in self.lane_t.finished and done not in self.lane_s.finished:  # its output was not final yet
                _probe(self.below, self.depth, self.part, self.lane_s, batch, "out")

    @property
    def _sublayer(self) -> Sublayer:
        return self.below.sublayers[self.depth][self.part]

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[_Seen, _Seen]]:
        """The sublayer in the teacher and in the student, each run up to a point."""
        above = _probe(self.above, self.depth, self.part, self.lane_t, batch, teacher)
        yield above, _probe(self.below, self.depth, self.part, self.lane_s, batch, student)

    def _advance(self, batch: int, above: _Seen) -> None:
        self.lane_t.hidden[batch] = above.hidden  # type: ignore[assignment]

    def _inputs(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for above, below in self._both(batch, "in", "in"):
            yield below.z, above.z  # type: ignore[misc]

    def _moments(
        self, n: int, out: int, pairs: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    ) -> tuple[Moments, Moments]:
        fit, held_out = (Moments.zeros(n, out, self._sublayer.weight) for _ in range(2))
        shares: tuple[tuple[Moments, Share], ...] = ((fit, "fit"), (held_out, "held out"))
        for number, batch in enumerate(self.batches):
            for given, wanted in pairs(number):
                for moments, share in shares:
                    rows = self.below.rows(batch, given.shape[:2], share)
                    moments.add(flat(given, rows), flat(wanted, rows))
        fit.add_up()
        held_out.add_up()
        return fit, held_out


class _SharedPair(_Pair):
    """One sublayer that runs at several depths: all of them count in one fit.

    The student is shown what enters the layer in the teacher. Its own inputs would change at every depth with the
    weights that are being fitted, and the fit would be to inputs that are never seen again.
    """

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[_Seen, _Seen]]:
        hidden = self.lane_t.hidden[batch]
        count = len(self.above.layers)
        for run_number in range(count * self.above.repeats):
            depth = run_number % count
            lane = _Lane(_Shelf([hidden]), [[self.lane_t.call(batch, run_number)]], self.lane_t.precision)
            above = _probe(self.above, depth, self.part, lane, 0, "end")
            if depth == self.depth:
                yield above, _probe(self.below, depth, self.part, lane, 0, student)
            hidden = above.hidden  # type: ignore[assignment]

    def _advance(self, batch: int, above: _Seen) -> None:
        """Every fit starts below the first depth again."""


def _probe(stack: Stack, depth: int, part: int, lane: _Lane, batch: int, upto: Point) -> _Seen:
    """Run one layer for one batch up to a point, and tell what passed by. What is finished is not run again."""
    sublayers = stack.sublayers[depth]
    sublayer = sublayers[part]
    scale = sublayer.scale
    seen = _Seen()
    entering = lane.hidden[batch]
    examples = len(entering)

    def on_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = by_example(split_call(args, kwargs)[0], examples)
        seen.x = x if scale is None else x / scale

    def on_z(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.z = by_example(args[0], examples)
        if upto == "in":
            raise _Stop

    def on_h(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.h = by_example(args[0], examples)
        if upto == "h":
            raise _Stop

    def on_o(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.o = by_example(output, examples)
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
                hooks.enter_context(_giving(sublayers[number].core, lane.finished[number, batch]))
        hooks.callback(sublayer.residual.register_forward_pre_hook(on_residual, with_kwargs=True).remove)
        if sublayer.inputs:
            hooks.callback(sublayer.inputs[0].module.register_forward_pre_hook(on_z).remove)
        hooks.callback(sublayer.out.register_forward_pre_hook(on_h).remove)
        hooks.callback(sublayer.out.register_forward_hook(on_o).remove)
        hooks.callback(sublayer.core.register_forward_hook(on_core).remove)
        hooks.enter_context(half_precision(stack.layers[depth], lane.precision))
        call = lane.call(batch, depth)
        out = _until_stopped(stack.layers[depth], entering, *call.args, **call.kwargs)
    seen.hidden = out[0] if isinstance(out, tuple) else out
    return seen


def _is_one_tensor(output: Any) -> bool:
    """Attention weights, or position biases that are handed on, would be too much to keep."""
    values = output if isinstance(output, tuple) else (output,)
    return isinstance(values[0], Tensor) and not any(isinstance(value, Tensor) for value in values[1:])


@contextmanager
def _giving(module: nn.Module, output: Any) -> Iterator[None]:
    """The module gives what it gave before, whatever it is called with."""
    before = vars(module).get("forward")  # where somebody put one over that of the class
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _enter(model: nn.Module, stack: Stack, batches: Sequence[Batch], precision: Precision) -> _Lane:
    """Record what reaches the layers. Once a full pass shows that all are called alike, one call per batch will do."""
    lane = _Lane(_Shelf(), [], precision)
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
