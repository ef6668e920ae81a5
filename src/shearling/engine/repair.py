"""Run teacher and student layer by layer, and repair the student's sublayers from the first layer to the last.

A repair sees the student's own activations, with the errors of the layers before, and the undamaged teacher's. It
comes at two places of a sublayer:

    into the units       the student's input z_S against the teacher's z_T
    out of the units     the student's h_S against y = o_T + x_T - x_S      (o: output, x: residual input; Eq. 12)
                         or against o_T alone, where a norm stands between o and x (`Sublayer.follows`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.hooks import device_of, flat, frozen
from shearling.engine.layerwise import Captured, HiddenStates, LayerCall, LayerwiseRun, Point, run_layer, start_run
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision, as_multiplied, kernels
from shearling.engine.progress import Progress, silent
from shearling.engine.teacher_states import TeacherStates
from shearling.models.structure import Share, Stack, Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch


@dataclass(frozen=True)
class Damaged:
    """A sublayer of the student at one of its two places, with the moments to fit and those held out."""

    sublayer: Sublayer
    into_units: bool
    fit: Moments
    held_out: Moments


@contextmanager
def damaged_sublayers(
    teacher: Structure,
    student: Structure,
    batches: Sequence[Batch],
    *,
    realign: bool = False,
    precision: Precision = "float32",
    progress: Progress = silent,
    states: TeacherStates | None = None,
    power: float = 0.0,
) -> Iterator[Iterator[Damaged]]:
    """The places to repair, one after another: what follows sees the sublayer as it was left.

        with damaged_sublayers(teacher, student, batches) as places:
            for place in places:
                place.sublayer.write(...)

    realign  stop on the way into the units too, where the inputs can be changed
    states   of the teacher, kept from one call to the next over the same batches
    power    a token of an example of n tokens counts n ** -power: with 1, examples count alike, however long

    Sublayers before the first that lost a unit see no error and lost nothing: they are passed over. Where whole layers
    are gone, the layer that follows is repaired against its own teacher, and so takes over what they added to the
    residual.
    """
    with frozen(teacher.model), frozen(student.model), torch.inference_mode(), kernels(teacher.model, precision):
        here = [batch.held_out_last().to(device_of(teacher.model)) for batch in batches]
        if states is not None:
            states.start(here)
        yield _places(teacher, student, here, realign, precision, progress, states, power)


def _places(
    teacher: Structure,
    student: Structure,
    batches: Sequence[Batch],
    realign: bool,
    precision: Precision,
    progress: Progress,
    states: TeacherStates | None,
    power: float,
) -> Iterator[Damaged]:
    total = len(teacher.sublayers)
    done, damaged = 0, False
    for number, (dense, pruned) in enumerate(zip(teacher.stacks, student.stacks, strict=True)):
        run_t = start_run(teacher.model, dense, batches, precision)
        # The first stack's inputs are embeddings, which pruning leaves alone; a decoder sees the pruned encoder.
        if number == 0 or not damaged:
            run_s = LayerwiseRun(run_t.hidden.copy(), _calls_of(pruned, run_t.calls), precision)
        else:
            run_s = start_run(student.model, pruned, batches, precision)
        kind = _SharedPair if pruned.repeats > 1 else _Pair
        layers = {depth: at for at, depth in enumerate(pruned.dense_numbers)}
        for depth, originals in enumerate(dense.sublayers):
            at = layers.get(depth)
            damaged = damaged or at is None or _lost_units(dense, pruned, depth)
            if at is None or not damaged:
                _advance(dense, depth, [run_t] if at is None else [run_t, run_s])
                done += len(originals)
                progress(done, total)
                continue
            sublayers = pruned.sublayers[at]
            for part, sublayer in enumerate(sublayers):
                pair = kind(dense, pruned, number, depth, part, at, run_t, run_s, batches, states, power)
                if realign and sublayer.foldable and sublayer.units:
                    yield Damaged(sublayer, True, *pair.into_units())
                last = part == len(sublayers) - 1
                yield Damaged(sublayer, False, *pair.out_of_units(advance_teacher=last))
                if pruned.repeats == 1:
                    pair.advance_student(last=last)
                done += 1
                progress(done, total)
            run_t.finished.clear()
            run_s.finished.clear()


def _lost_units(dense: Stack, pruned: Stack, depth: int) -> bool:
    """Whether a layer lost units; where layers share weights, any loss shows at every depth."""
    depths = range(len(pruned.sublayers)) if pruned.repeats > 1 else (depth,)
    return any(
        after.units < before.units
        for at in depths
        for before, after in zip(dense.sublayers[at], pruned.sublayers[at], strict=True)
    )


def _calls_of(pruned: Stack, calls: list[list[LayerCall]]) -> list[list[LayerCall]]:
    """How the student's layers are called, from how the dense model's are."""
    return [[one[i] for i in pruned.dense_numbers] if len(one) > 1 else one for one in calls]


def _advance(stack: Stack, depth: int, runs: Sequence[LayerwiseRun]) -> None:
    """Past a layer of the dense model: the teacher alone where the student lacks it, both where they are the same."""
    if stack.repeats > 1:
        return
    last = len(stack.sublayers[depth]) - 1
    for batch in range(len(runs[0].hidden)):
        hidden = run_layer(stack, depth, last, runs[0], batch, "end").hidden
        for one in runs:
            one.hidden[batch] = hidden  # type: ignore[assignment]
    runs[0].finished.clear()


def target(sublayer: Sublayer, teacher: Captured, student: Captured) -> Tensor:
    """What the output of the student's sublayer should be."""
    if sublayer.follows == "output":
        return teacher.o  # type: ignore[return-value]
    return teacher.o + teacher.x - student.x  # type: ignore[operator]


@dataclass
class _Pair:
    """One sublayer in both models.

    number, depth, part  its stack, its layer in the dense model's stack, and its part of the layer
    at     its layer in the student's stack
    power  a token of an example of n tokens counts n ** -power
    """

    dense: Stack
    pruned: Stack
    number: int
    depth: int
    part: int
    at: int
    run_t: LayerwiseRun
    run_s: LayerwiseRun
    batches: Sequence[Batch]
    states: TeacherStates | None = None
    power: float = 0.0

    def into_units(self) -> tuple[Moments, Moments]:
        """Moments of z_S against z_T: (to fit, held out)."""
        size = self._sublayer.weight.shape[0]

        def pairs(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for t, s in self._both(batch, "in", "in"):
                yield s.z, t.z  # type: ignore[misc]

        return self._moments(size, size, pairs)

    def out_of_units(self, *, advance_teacher: bool) -> tuple[Moments, Moments]:
        """Moments of h_S against y; the teacher moves on to the next layer if asked to."""
        columns = self._sublayer.units * self._sublayer.width

        def pairs(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for t, s in self._both(batch, "end" if advance_teacher else "out", "h"):
                yield s.h[..., :columns], target(self._sublayer, t, s)  # type: ignore[index]
                if advance_teacher:
                    self._advance_teacher(batch, t)

        return self._moments(columns, self._sublayer.weight.shape[0], pairs)

    def advance_student(self, *, last: bool) -> None:
        """Past the repaired sublayer: to the next layer, or to where its core is finished."""
        for batch in range(len(self.batches)):
            done = (self.part, batch)
            if last:
                hidden = run_layer(self.pruned, self.at, self.part, self.run_s, batch, "end").hidden
                self.run_s.hidden[batch] = hidden  # type: ignore[assignment]
            elif self._sublayer.out_in_core and done not in self.run_s.finished:  # its output was not final yet
                run_layer(self.pruned, self.at, self.part, self.run_s, batch, "out")

    @property
    def _sublayer(self) -> Sublayer:
        return self.pruned.sublayers[self.at][self.part]

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[Captured, Captured]]:
        """The sublayer in the teacher and in the student, each run up to a point."""
        captured = self._teacher(batch, teacher)
        yield captured, run_layer(self.pruned, self.at, self.part, self.run_s, batch, student)

    def _teacher(self, batch: int, point: Point) -> Captured:
        """The sublayer in the teacher; not run again where an earlier pass has shown it."""
        key = (self.number, self.depth, self.part, batch, point)
        captured = None if self.states is None else self.states.get(key)
        if captured is None:
            captured = run_layer(self.dense, self.depth, self.part, self.run_t, batch, point)
            if self.states is not None:
                self.states.put(key, captured)
        return captured

    def _advance_teacher(self, batch: int, captured: Captured) -> None:
        self.run_t.hidden[batch] = captured.hidden  # type: ignore[assignment]

    def _moments(
        self, n: int, out: int, pairs: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    ) -> tuple[Moments, Moments]:
        fit, held_out = (Moments.zeros(n, out, self._sublayer.weight) for _ in range(2))
        shares: tuple[tuple[Moments, Share], ...] = ((fit, "fit"), (held_out, "held out"))
        for number, batch in enumerate(self.batches):
            for given, wanted in pairs(number):
                for moments, share in shares:
                    shape = given.shape[:2]
                    rows = self.pruned.rows(batch, shape, share)
                    weights = self.pruned.weights(batch, shape, self.power, share) if self.power else None
                    h, y = (as_multiplied(flat(one, rows), self.run_s.precision) for one in (given, wanted))
                    moments.add(h, y, weights)
        fit.add_up()
        held_out.add_up()
        return fit, held_out


class _SharedPair(_Pair):
    """One sublayer that runs at several depths: all of them count in one fit.

    The student is shown what enters the layer in the teacher. Its own inputs would change at every depth with the
    weights that are being fitted, and the fit would be to inputs that are never seen again.
    """

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[Captured, Captured]]:
        hidden = self.run_t.hidden[batch]
        count = len(self.dense.layers)
        for number in range(count * self.dense.repeats):
            depth = number % count
            one = LayerwiseRun(HiddenStates([hidden]), [[self.run_t.call(batch, number)]], self.run_t.precision)
            captured = run_layer(self.dense, depth, self.part, one, 0, "end")
            if depth == self.depth:
                yield captured, run_layer(self.pruned, depth, self.part, one, 0, student)
            hidden = captured.hidden  # type: ignore[assignment]

    def _advance_teacher(self, batch: int, captured: Captured) -> None:
        """Every fit starts before the first depth again."""
