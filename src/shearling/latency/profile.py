"""Time the user's own model with varying numbers of units.

For each shape of sublayer and each count k, the model is run with k units in every sublayer of that shape and none in
the others; the difference to the model without any units, divided by the number of those sublayers, is the time of k
units. Whole models are run instead of single sublayers, so that caches and a GPU's queue behave as in real use. If a
run of all layers takes too long, a model with only the first few layers is run instead.

The table is then scaled to the times of the dense and of the empty model, both at full depth.
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
from shearling.latency.assemble import Timings, assemble
from shearling.latency.inputs import example_inputs, placed, shape_of_inputs
from shearling.latency.table import Table
from shearling.latency.timing import Run, Timing, both_sides, check_runtime, device_name, runner, wall
from shearling.latency.variants import TimedShape, same_in_every_layer, shapes_of, shortened, with_units
from shearling.models.structure import Structure, structure_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUDGET = 60.0  # approximate seconds
FEWEST, GOAL, MOST = 3, 5, 15  # rounds
VISIT = 0.02  # seconds of timed runs per visit, where runs are short
LEAST_RUNS, MOST_RUNS = 2, 5  # per visit
ANCHOR_EVERY = 16  # visits between timings of the dense and empty models, which matter most


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
    """Measure the latency table of a model, on its device and in its dtype.

    threads  CPU threads; default: torch's setting
    runtime  "eager", or "graphs": models are recorded as CUDA graphs and replayed, without launch overhead
    budget   approximate seconds to spend; a short budget times fewer layers and rounds
    inputs   your own inputs, for unusual models; their batch size and length are used
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
    with using_threads(threads), frozen(model), torch.no_grad():
        bench = _Bench(example, device_of(model), runtime)
        bench.reference = partial(with_units(structure, None, 0).eval(), **example) if bench.two_sided else None
        shapes = shapes_of(structure)
        start = time.perf_counter()
        depth = _depth(structure, shapes, bench.once(model), budget)
        short = shortened(structure, depth) if depth else structure
        timings, rounds = _rounds(bench, structure, short, shapes, budget - time.perf_counter() + start, progress)
        seconds = assemble(structure, short, shapes, timings, side="seconds")
        launch = assemble(structure, short, shapes, timings, side="launch") if timings.two_sided else None
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
    """Times models on the example.

    reference  a fixed run whose time shows the current speed of the host
    """

    example: dict[str, Tensor]
    device: torch.device
    runtime: str
    reference: Run | None = None

    @property
    def two_sided(self) -> bool:
        """Whether host and device work concurrently and are timed separately."""
        return self.device.type == "cuda" and self.runtime == "eager"

    def once(self, model: PreTrainedModel) -> float:
        """The time of one run, after a warm-up."""
        run = runner(model, self.example, self.runtime)
        wall(run, self.device)
        return wall(run, self.device)

    def visit(self, model: PreTrainedModel) -> Timing:
        """A warm-up, then the fastest of some runs: disturbances only make runs slower."""
        model.eval()
        run = runner(model, self.example, self.runtime)
        wall(run, self.device)
        found: list[Timing] = []
        while len(found) < LEAST_RUNS or (len(found) < MOST_RUNS and sum(r.seconds for r in found) < VISIT):
            found.append(self.read(run))
        launches = [r.launch for r in found if r.launch is not None]
        paces = [r.pace for r in found if r.pace is not None]
        return Timing(min(r.seconds for r in found), min(launches, default=None), min(paces, default=None))

    def read(self, run: Run) -> Timing:
        """One run."""
        if self.reference is None:
            return Timing(wall(run, self.device))
        return both_sides(run, self.device, self.reference)


def _depth(structure: Structure, shapes: Sequence[TimedShape], whole: float, budget: float) -> int:
    """Number of layers per stack to run so that enough rounds fit into the budget; 0 for all.

    Assumes that a visit runs a model with about a quarter of the units three times, warm-up included.
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
    shapes: Sequence[TimedShape],
    budget: float,
    progress: Progress,
) -> tuple[Timings, int]:
    """Visit every model once per round, alternating the direction, until the budget is spent."""
    timings = Timings.none_yet(shapes)
    start, rounds = time.perf_counter(), 0
    while rounds < MOST:
        spent = time.perf_counter() - start
        if rounds >= FEWEST and spent * (rounds + 1) / rounds > budget:
            break
        visits = list(_visits(structure, short, shapes, timings))
        if rounds % 2:
            visits.reverse()
        for done, (build, place) in enumerate(visits):
            place.append(bench.visit(build()))
            at_least = (rounds + done / len(visits)) / FEWEST
            of_budget = (time.perf_counter() - start) / max(budget, 1e-9)
            progress(int(1000 * min(at_least, of_budget, 1.0)), 1000)
        rounds += 1
    return timings, rounds


def _visits(
    structure: Structure, short: Structure, shapes: Sequence[TimedShape], timings: Timings
) -> Iterator[tuple[Callable[[], PreTrainedModel], list[Timing]]]:
    """(how to build the model, list for its timings); the dense and empty models are repeated among the others."""
    anchors: list[tuple[Callable[[], PreTrainedModel], list[Timing]]] = [
        (lambda: structure.model, timings.whole),
        (partial(with_units, structure, None, 0), timings.empty),
    ]
    if short is not structure:
        anchors.append((partial(with_units, short, None, 0), timings.short_empty))
    passed = 0
    for shape, places in zip(shapes, timings.shapes, strict=True):
        for count, place in zip(shape.counts[1:], places[1:], strict=True):
            if passed % ANCHOR_EVERY == 0:
                yield from anchors
            passed += 1
            yield partial(with_units, short, shape, count), place
    yield from anchors
