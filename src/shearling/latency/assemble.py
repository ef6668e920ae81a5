"""Turn timings of whole models into seconds per sublayer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shearling.latency.fit import cleaned
from shearling.latency.table import Entry, shapes_in
from shearling.latency.timing import Times, Timing
from shearling.latency.variants import TimedShape, sublayers_between
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer


@dataclass(frozen=True)
class Timings:
    """All timings: the dense model, the model without units, the same with fewer layers, and each shape and count."""

    whole: list[Timing]
    empty: list[Timing]
    short_empty: list[Timing]
    shapes: list[list[list[Timing]]]

    @classmethod
    def none_yet(cls, shapes: Sequence[TimedShape]) -> Timings:
        """Empty lists."""
        return cls([], [], [], [[[] for _ in shape.counts] for shape in shapes])

    @property
    def two_sided(self) -> bool:
        """Whether host and device were timed separately."""
        return self.whole[0].launch is not None

    @cached_property
    def pace(self) -> float:
        """Median time of the host's reference run."""
        counted = (place for shape in self.shapes for place in shape)
        found = [r.pace for place in (self.whole, self.empty, self.short_empty, *counted) for r in place if r.pace]
        return float(np.median(found))

    def times(self, found: Sequence[Timing], side: str) -> Times:
        """Statistics of one side of some runs; host times are normalised by the host's speed at that moment."""
        if side == "seconds":
            return Times.of([timing.seconds for timing in found])
        return Times.of([self.pace * cast(float, r.launch) / cast(float, r.pace) for r in found])


@dataclass(frozen=True)
class Timed:
    """One side of the table: the two anchors, and per shape the times and their spread by count."""

    whole: float
    fixed: float
    times: list[list[float]]
    spread: list[list[float]]

    def entry(self, number: int, shape: TimedShape, host: Timed | None) -> Entry:
        """The table's entry for a shape."""
        beside = (host.times[number], host.spread[number]) if host else (None, None)
        return Entry(*shape.key, shape.counts, self.times[number], self.spread[number], *beside)


def assemble(
    structure: Structure, short: Structure, shapes: Sequence[TimedShape], timings: Timings, *, side: str
) -> Timed:
    """Solve for the time of each count.

    structure, short   the model, and the model that was timed in its place (with fewer layers if it is slow)

    From one count to the next, some number of sublayers grows; the difference of the two runs divided by that number is
    the extra time of one of them. The result is scaled to reproduce the dense and the empty model exactly. The host
    launches the same work for every count but 0: its times differ only by noise, so their median is used.
    """
    summed_up = partial(timings.times, side=side)
    whole, empty = summed_up(timings.whole).median, summed_up(timings.empty).median
    start = summed_up(timings.short_empty) if short is not structure else summed_up(timings.empty)
    times, spread = [], []
    for shape, places in zip(shapes, timings.shapes, strict=True):
        runs = [start, *(summed_up(place) for place in places[1:])]
        parts = np.array([sublayers_between(short, shape, *step) for step in pairwise(shape.counts)])
        rise = np.diff([run.median for run in runs]) / np.maximum(parts, 1) * (parts > 0)
        total = np.maximum(np.concatenate([[0.0], np.cumsum(rise)]), 0.0)
        if side == "launch" and parts.any():
            present = 1 + int(np.flatnonzero(parts)[0])
            total[present:] = np.median(total[present:])
        times.append(total)
        noise = np.array([run.spread for run in runs])
        spread.append(noise / max(parts.max(initial=1), 1))

    clean = [cleaned(shape.counts, *found) for shape, *found in zip(shapes, times, spread, strict=True)]
    units = _sum_over(structure, shapes, clean, lambda s: s.units)
    floors = _sum_over(structure, shapes, clean, lambda s: min(s.floor, s.units))
    scale = max(whole - empty, 0.0) / (units - floors) if units > floors else 0.0
    fixed = min(max(empty - scale * floors, 0.0), whole)
    return Timed(whole, fixed, [(scale * t).tolist() for t in times], [(scale * s).tolist() for s in spread])


def _sum_over(
    structure: Structure,
    shapes: Sequence[TimedShape],
    times: Sequence[NDArray[np.float64]],
    count: Callable[[Sublayer], int],
) -> float:
    """Total time of all sublayers with `count` units each."""
    by_shape = {shape.key: dict(zip(shape.counts, t, strict=True)) for shape, t in zip(shapes, times, strict=True)}
    pairs = zip(structure.sublayers, shapes_in(structure), strict=True)
    return float(sum(by_shape[key][count(s)] for s, key in pairs if s.units))
