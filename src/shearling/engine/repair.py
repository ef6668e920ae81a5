"""Run teacher and student layer by layer, and repair the student's sublayers from the first layer to the last.

A repair uses the student's own activations, with the errors of the layers before, and the teacher's. It applies at two
places of a sublayer:

    into the units       the student's input z_S against the teacher's z_T
    out of the units     the student's h_S against y = o_T + x_T - x_S      (o: output, x: residual input; Eq. 12)
                         or against o_T alone, with a norm between o and x (`Sublayer.follows`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.hooks import device_of, flat, frozen
from shearling.engine.layerwise import Captured, HiddenStates, LayerCall, LayerwiseRun, Point, run_layer, start_run
from shearling.engine.memory import give_back
from shearling.engine.moments import Moments, sizes_of
from shearling.engine.precision import Precision, as_multiplied, kernels
from shearling.engine.progress import Progress, silent
from shearling.engine.teacher_states import TeacherStates
from shearling.models.structure import Share, Stack, Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch


@dataclass(frozen=True)
class Damaged:
    """A sublayer of the student at one of the two places, with the moments of the fitted and held-out examples."""

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
    """Iterate over the places to repair; later ones see the repaired sublayers.

        with damaged_sublayers(teacher, student, batches) as places:
            for place in places:
                place.sublayer.write(...)

    realign  also yield the places into the units, where the inputs can be changed
    states   cache of the teacher's tensors between calls over the same batches
    power    tokens of an example of n tokens are weighted by n ** -power; 1 weights examples equally

    Layers before the first pruned one are skipped. After removed layers, the next layer is repaired against its own
    teacher layer, and so takes over what they added to the residual.
    """
    with frozen(teacher.model), frozen(student.model), torch.no_grad(), kernels(teacher.model, precision):
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
        # The first stack's inputs are embeddings, which are not pruned; a decoder reads the pruned encoder.
        if number == 0 or not damaged:
            run_s = LayerwiseRun(run_t.hidden.copy(), _calls_of(pruned, run_t.calls), run_t.precision)
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
    """Whether a layer lost units; with shared weights, at any depth."""
    depths = range(len(pruned.sublayers)) if pruned.repeats > 1 else (depth,)
    return any(
        after.units < before.units
        for at in depths
        for before, after in zip(dense.sublayers[at], pruned.sublayers[at], strict=True)
    )


def _calls_of(pruned: Stack, calls: list[list[LayerCall]]) -> list[list[LayerCall]]:
    """The arguments of the student's layers, from those of the dense model's."""
    return [[one[i] for i in pruned.dense_numbers] if len(one) > 1 else one for one in calls]


def _advance(stack: Stack, depth: int, runs: Sequence[LayerwiseRun]) -> None:
    """Advance past a layer of the dense model: only the teacher if the student lacks it, both if they are equal."""
    if stack.repeats > 1:
        return
    last = len(stack.sublayers[depth]) - 1
    for batch in range(len(runs[0].hidden)):
        hidden = run_layer(stack, depth, last, runs[0], batch, "end").hidden
        for one in runs:
            one.hidden[batch] = hidden  # type: ignore[assignment]
    runs[0].finished.clear()


def target(sublayer: Sublayer, teacher: Captured, student: Captured) -> Tensor:
    """The target of the student's output."""
    if sublayer.follows == "output":
        return teacher.o  # type: ignore[return-value]
    return teacher.o + teacher.x - student.x  # type: ignore[operator]


@dataclass
class _Pair:
    """One sublayer in both models.

    number, depth, part  indices of its stack, its layer in the dense model's stack, and its part of the layer
    at     index of its layer in the student's stack
    power  tokens of an example of n tokens are weighted by n ** -power
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
        """Moments of z_S against z_T: (fit, held out)."""
        size = self._sublayer.weight.shape[0]

        def pairs(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for t, s in self._both(batch, "in", "in"):
                yield s.z, t.z  # type: ignore[misc]

        return self._moments(size, size, pairs)

    def out_of_units(self, *, advance_teacher: bool) -> tuple[Moments, Moments]:
        """Moments of h_S against y; optionally advances the teacher to the next layer."""
        columns = self._sublayer.units * self._sublayer.width

        def pairs(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for t, s in self._both(batch, "end" if advance_teacher else "out", "h"):
                yield s.h[..., :columns], target(self._sublayer, t, s)  # type: ignore[index]
                if advance_teacher:
                    self._advance_teacher(batch, t)

        return self._moments(columns, self._sublayer.weight.shape[0], pairs, normed=self._sublayer.normed)

    def advance_student(self, *, last: bool) -> None:
        """Advance past the repaired sublayer: to the next layer, or cache its core's output."""
        for batch in range(len(self.batches)):
            done = (self.part, batch)
            if last:
                hidden = run_layer(self.pruned, self.at, self.part, self.run_s, batch, "end").hidden
                self.run_s.hidden[batch] = hidden  # type: ignore[assignment]
            elif self._sublayer.out_in_core and done not in self.run_s.finished:  # its output was not repaired yet
                run_layer(self.pruned, self.at, self.part, self.run_s, batch, "out")

    @property
    def _sublayer(self) -> Sublayer:
        return self.pruned.sublayers[self.at][self.part]

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[Captured, Captured]]:
        """Run the sublayer in teacher and student, each up to a point."""
        captured = self._teacher(batch, teacher)
        yield captured, run_layer(self.pruned, self.at, self.part, self.run_s, batch, student)

    def _teacher(self, batch: int, point: Point) -> Captured:
        """The sublayer in the teacher, from the cache if possible."""
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
        self, n: int, out: int, pairs: Callable[[int], Iterator[tuple[Tensor, Tensor]]], *, normed: bool = False
    ) -> tuple[Moments, Moments]:
        """normed: errors count relative to the size of the target, as the norm after it makes them."""
        fit, held_out = (Moments.zeros(n, out, self._sublayer.weight) for _ in range(2))
        shares: tuple[tuple[Moments, Share], ...] = ((fit, "fit"), (held_out, "held out"))
        for number, batch in enumerate(self.batches):
            for given, wanted in pairs(number):
                for moments, share in shares:
                    shape = given.shape[:2]
                    rows = self.pruned.rows(batch, shape, share)
                    weights = self.pruned.weights(batch, shape, self.power, share) if self.power else None
                    h, y = (as_multiplied(flat(one, rows), self.run_s.precision) for one in (given, wanted))
                    if normed:
                        relative = sizes_of(y) ** -2
                        weights = relative if weights is None else relative * weights.to(relative)
                    moments.add(h, y, weights)
        fit.add_up()
        held_out.add_up()
        give_back(fit.gram.device)  # the layer's activations, before a solve in float64
        return fit, held_out


class _SharedPair(_Pair):
    """One sublayer that runs at several depths, which all enter one fit.

    The student gets the teacher's inputs of the layer: its own inputs at later depths depend on the weights that are
    being fitted.
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
        """Nothing to do: every fit starts at the first depth."""
