"""From timings to seconds, on timings that we make up."""

from __future__ import annotations

import numpy as np
import pytest

from shearling.latency.assemble import Timings, assemble
from shearling.latency.timing import Timing
from shearling.latency.variants import shapes_of
from shearling.models.structure import structure_of
from tiny import model_of


def test_the_host_takes_the_same_for_every_count() -> None:
    """Counts differ on the host by noise alone; the dense and the empty model still come out as they were read."""
    structure = structure_of(model_of("bert"))
    shapes = shapes_of(structure)
    timings = Timings.none_yet(shapes)
    noise = np.random.default_rng(7)
    timings.whole.append(Timing(9.0, 10 + 2 * (0.5 + 0.2), 10.0))
    timings.empty.append(Timing(5.0, 10.0, 10.0))
    for cost, shape, places in zip((0.5, 0.2), shapes, timings.shapes, strict=True):
        for count, place in zip(shape.counts[1:], places[1:], strict=True):
            pace = noise.uniform(5, 20)
            place.append(Timing(5.0 + count / 48, (10 + 2 * cost * noise.normal(1, 0.1)) * pace / 10, pace))
    host = assemble(structure, structure, shapes, timings, side="launch")
    factor = timings.pace / 10
    assert (host.whole, host.fixed) == (pytest.approx(11.4 * factor), pytest.approx(10 * factor))
    for cost, times in zip((0.5, 0.2), host.times, strict=True):
        assert times[0] == 0.0
        assert len(set(times[1:])) == 1
        assert times[1] == pytest.approx(cost * factor, rel=0.1)
