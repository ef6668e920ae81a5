"""Time the user's own model with fewer and fewer units.

For each shape of sublayer and each count k, the model itself is run with k units in every sublayer of that shape and
none in any other; what that takes beyond the model with no unit at all, divided by the number of those sublayers, is
the time of k units. Whole models are run, not single sublayers, because that predicts the time of whole models: caches
and a GPU's queue then behave as in real use. Where a run of all layers would take too long, a model with only the
first few layers is run instead.

The table is then anchored at both ends, by the dense model and by the one with no unit left, both in full depth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shearling._version import versions
from shearling.engine.cuda_graph import using_threads
from shearling.engine.hooks import device_of, frozen
from shearling.engine.precision import dtype_name
from shearling.engine.progress import Progress, silent
from shearling.errors import InputError
from shearling.latency.assemble import Readings, assemble
from shearling.latency.inputs import example_inputs, placed, shape_of_inputs
from shearling.latency.table import Table
from shearling.latency.timing import Reading, Run, both_sides, check_runtime, device_name, runner, wall
from shearling.latency.variants import Shape, same_in_every_layer, shapes_of, shortened, with_units
from shearling.models.structure import Structure, structure_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUDGET = 60.0  # seconds, about
FEWEST, GOAL, MOST = 3, 5, 15  # rounds
VISIT = 0.02  # seconds of timed runs a visit, where runs are short
LEAST_RUNS, MOST_RUNS = 2, 5  # a visit
ANCHOR_EVERY = 16  # visits; the two ends matter most


def profile(
    model: PreTrainedModel,
    *,
    batch_size: int = 32,
    seq_len: int = 128,
    threads: int | None = None,
    runtime: str = "eager",
    budget: float = BUDGET,
    inputs: dict[str, Tensor] | None = None,
    progress: Progress = silent,
) -> Table:
    """The latency table of a model, on the device and in the dtype it is in.

    threads  of the CPU; as many as torch uses unless given
    runtime  "eager", or "graphs": each model is recorded as a CUDA graph and replayed, so no launch is waited for
    budget   seconds to spend, about; fewer layers and rounds are timed when it is short
    inputs   your own, where the model takes something unusual; the table then has their batch size and length
    """
    if not budget > 0 or (threads is not None and threads < 1):
        raise InputError(f"A budget of {budget} seconds and {threads} threads: both must be positive.")
    check_runtime(runtime, device_of(model))
    structure = structure_of(model)
    if inputs is None:
        example = example_inputs(model, batch_size, seq_len)
    else:
        example = placed(inputs, model)
        batch_size, seq_len = shape_of_inputs(example)
    with using_threads(threads), frozen(model), torch.inference_mode():
        bench = _Bench(example, device_of(model), runtime)
        bench.reference = partial(with_units(structure, None, 0).eval(), **example) if bench.two_sided else None
        shapes = shapes_of(structure)
        start = time.perf_counter()
        depth = _depth(structure, shapes, bench.once(model), budget)
        short = shortened(structure, depth) if depth else structure
        readings, rounds = _rounds(bench, structure, short, shapes, budget - time.perf_counter() + start, progress)
        seconds = assemble(structure, short, shapes, readings, side="seconds")
        launch = assemble(structure, short, shapes, readings, side="launch") if readings.two_sided else None
        return Table(
            device=device_name(bench.device),
            device_type=bench.device.type,
            model_type=model.config.model_type,
            layers=structure.sizes,
            batch_size=batch_size,
            seq_len=seq_len,
            dtype=dtype_name(model.dtype),
            threads=torch.get_num_threads(),
            runtime=runtime,
            whole=seconds.whole,
            fixed=seconds.fixed,
            whole_launch=launch.whole if launch else None,
            fixed_launch=launch.fixed if launch else None,
            sublayers=[seconds.entry(i, shape, launch) for i, shape in enumerate(shapes)],
            versions=versions(),
            settings={"rounds": rounds, "depth": depth or None, "budget": budget},
        )


@dataclass
class _Bench:
    """Runs models on the example, and times them."""

    example: dict[str, Tensor]
    device: torch.device
    runtime: str
    reference: Run | None = None  # always the same run: its time shows the current speed of the host

    @property
    def two_sided(self) -> bool:
        """Whether the host launches the work while the device does it."""
        return self.device.type == "cuda" and self.runtime == "eager"

    def once(self, model: PreTrainedModel) -> float:
        """The time of one run, after a warm-up."""
        run = runner(model, self.example, self.runtime)
        wall(run, self.device)
        return wall(run, self.device)

    def visit(self, model: PreTrainedModel) -> Reading:
        """A warm-up, then some runs, of which the fastest counts: what disturbs a run only ever makes it slower."""
        model.eval()
        run = runner(model, self.example, self.runtime)
        wall(run, self.device)
        found: list[Reading] = []
        while len(found) < LEAST_RUNS or (len(found) < MOST_RUNS and sum(r.seconds for r in found) < VISIT):
            found.append(self.read(run))
        launches = [r.launch for r in found if r.launch is not None]
        paces = [r.pace for r in found if r.pace is not None]
        return Reading(min(r.seconds for r in found), min(launches, default=None), min(paces, default=None))

    def read(self, run: Run) -> Reading:
        """One run."""
        if self.reference is None:
            return Reading(wall(run, self.device))
        return both_sides(run, self.device, self.reference)


def _depth(structure: Structure, shapes: Sequence[Shape], whole: float, budget: float) -> int:
    """How many layers of each stack to run, so that enough rounds fit into the budget; 0 for all of them.

    A visit runs a model with about a quarter of the units three times, the warm-up included.
    """
    layers = max(len(stack.layers) for stack in structure.stacks)
    if not same_in_every_layer(structure):
        return 0
    visits = sum(len(shape.counts) for shape in shapes)
    affordable = int(budget / (GOAL * visits * 3 * 0.3 * whole / layers))
    least = 2 if any(s.floor for s in structure.sublayers) else 1
    return 0 if affordable >= layers else max(affordable, least)


def _rounds(
    bench: _Bench,
    structure: Structure,
    short: Structure,
    shapes: Sequence[Shape],
    budget: float,
    progress: Progress,
) -> tuple[Readings, int]:
    """Visit every model once a round, in an order that turns around, until the budget is spent."""
    readings = Readings.none_yet(shapes)
    start, rounds = time.perf_counter(), 0
    while rounds < MOST:
        spent = time.perf_counter() - start
        if rounds >= FEWEST and spent * (rounds + 1) / rounds > budget:
            break
        visits = list(_visits(structure, short, shapes, readings))
        if rounds % 2:
            visits.reverse()
        for done, (build, place) in enumerate(visits):
            place.append(bench.visit(build()))
            at_least = (rounds + done / len(visits)) / FEWEST
            of_budget = (time.perf_counter() - start) / max(budget, 1e-9)
            progress(int(1000 * min(at_least, of_budget, 1.0)), 1000)
        rounds += 1
    return readings, rounds


def _visits(
    structure: Structure, short: Structure, shapes: Sequence[Shape], readings: Readings
) -> Iterator[tuple[Callable[[], PreTrainedModel], list[Reading]]]:
    """What to build and where its readings go; the dense and the empty model again and again among the others."""
    anchors: list[tuple[Callable[[], PreTrainedModel], list[Reading]]] = [
        (lambda: structure.model, readings.whole),
        (partial(with_units, structure, None, 0), readings.empty),
    ]
    if short is not structure:
        anchors.append((partial(with_units, short, None, 0), readings.short_empty))
    passed = 0
    for shape, places in zip(shapes, readings.shapes, strict=True):
        for count, place in zip(shape.counts[1:], places[1:], strict=True):
            if passed % ANCHOR_EVERY == 0:
                yield from anchors
            passed += 1
            yield partial(with_units, short, shape, count), place
    yield from anchors
