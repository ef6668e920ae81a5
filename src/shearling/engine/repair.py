"""Walk teacher and student through their layers together, repairing the student's sublayers on the way up.

A repair sees the student as it is below it, errors included, and the undamaged teacher. It comes at two places of a
sublayer:

    into the units       the student's input z_S against the teacher's z_T
    out of the units     the student's h_S against y = o_T + x_T - x_S      (o: output, x: residual input; Eq. 12)
                         or against o_T alone, where a norm stands between o and x (`Sublayer.follows`)

To get there both models run the layer up to that point and stop (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.hooks import device_of, flat, frozen
from shearling.engine.layerwise import Lane, Point, Seen, Shelf, enter, probe
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision, fast_matmul
from shearling.engine.progress import Progress, silent
from shearling.models.structure import Share, Stack, Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.sample import Batch, Sample

Repair = Callable[[Sublayer, Moments, Moments], bool]  # (student's sublayer, fit, held out) -> go on?


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
            lane_t = enter(teacher.model, above, batches, precision)
            # The first stack's inputs are embeddings, which pruning leaves alone; a decoder sees the pruned encoder.
            if number == 0:
                lane_s = Lane(lane_t.hidden.copy(), lane_t.calls, precision)
            else:
                lane_s = enter(student.model, below, batches, precision)
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


def target(sublayer: Sublayer, above: Seen, below: Seen) -> Tensor:
    """What the output of the student's sublayer should be, given what was seen of it in teacher and student."""
    assert above.o is not None
    if sublayer.follows == "output":
        return above.o
    assert above.x is not None
    assert below.x is not None
    return above.o + above.x - below.x


@dataclass
class _Pair:
    """One sublayer in both models."""

    above: Stack
    below: Stack
    depth: int
    part: int
    lane_t: Lane
    lane_s: Lane
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
                y = target(sublayer, above, below)
                yield below.h[..., : sublayer.units * sublayer.width], y  # type: ignore[index]
                if advance_teacher:
                    self._advance(batch, above)

        return self._moments(sublayer.units * sublayer.width, sublayer.weight.shape[0], pairs)

    def leave_student(self, *, last: bool) -> None:
        """Go on past the repaired sublayer: to the next layer, or to where its core is finished."""
        for batch in range(len(self.batches)):
            done = (self.part, batch)
            if last:
                hidden = probe(self.below, self.depth, self.part, self.lane_s, batch, "end").hidden
                self.lane_s.hidden[batch] = hidden  # type: ignore[assignment]
            elif done in self.lane_t.finished and done not in self.lane_s.finished:  # its output was not final yet
                probe(self.below, self.depth, self.part, self.lane_s, batch, "out")

    @property
    def _sublayer(self) -> Sublayer:
        return self.below.sublayers[self.depth][self.part]

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[Seen, Seen]]:
        """The sublayer in the teacher and in the student, each run up to a point."""
        above = probe(self.above, self.depth, self.part, self.lane_t, batch, teacher)
        yield above, probe(self.below, self.depth, self.part, self.lane_s, batch, student)

    def _advance(self, batch: int, above: Seen) -> None:
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

    def _both(self, batch: int, teacher: Point, student: Point) -> Iterator[tuple[Seen, Seen]]:
        hidden = self.lane_t.hidden[batch]
        count = len(self.above.layers)
        for run_number in range(count * self.above.repeats):
            depth = run_number % count
            lane = Lane(Shelf([hidden]), [[self.lane_t.call(batch, run_number)]], self.lane_t.precision)
            above = probe(self.above, depth, self.part, lane, 0, "end")
            if depth == self.depth:
                yield above, probe(self.below, depth, self.part, lane, 0, student)
            hidden = above.hidden  # type: ignore[assignment]

    def _advance(self, batch: int, above: Seen) -> None:
        """Every fit starts below the first depth again."""
