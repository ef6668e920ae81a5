"""Meet a latency: choose by the table, time the pruned model, and choose again if the table was wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shearling.costs import Limit, Piecewise
from shearling.engine.cuda_graph import using_threads
from shearling.engine.distributed import on_first
from shearling.engine.hooks import device_of, frozen
from shearling.engine.precision import DTYPES
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError
from shearling.latency.fit import fit
from shearling.latency.inputs import example_inputs
from shearling.latency.profile import profile
from shearling.latency.table import RESTLESS, Table, milli, restless, shapes_in
from shearling.latency.timing import device_name, in_turns, runner
from shearling.methods.stock import Choice
from shearling.models.structure import Structure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 0.05  # relative to the ratio asked for
CORRECTIONS = 2

Made = tuple[Choice, Structure]  # the choice, and the student


@dataclass(frozen=True)
class Try:
    """Time of one cut, over the dense model's."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class MetLatency:
    """The record's `latency`: times over the dense model's, and the conditions of the table."""

    ratio: float
    predicted: float
    measured: float
    speedup: float
    measured_on: str
    device: str
    batch_size: int
    seq_len: int
    dtype: str
    threads: int | None  # of a CPU
    runtime: str
    corrections: int
    layer_time: list[float]
    tried: list[Try]


@dataclass(frozen=True)
class Selection:
    """A choice and its student; for a latency, also the limits of the choice, the record and warnings."""

    choice: Choice
    student: Structure
    limits: list[Limit] = field(default_factory=list)
    latency: MetLatency | None = None
    warnings: list[str] = field(default_factory=list)


def latency_limits(structure: Structure, table: Table, ratio: float, *, overhead: float = 0.0) -> list[Limit]:
    """Limits on the time of the units, such that the forward pass takes `ratio` of the dense one.

    overhead  seconds by which the table was found to underestimate
    """
    sides = [_side(structure, table, ratio, side, fixed + overhead) for side, fixed in table.sides.items()]
    binding = [side for side in sides if side.spent([len(t) - 1 for t in side.tables]) > side.budget]
    return binding or sides[:1]


def _side(structure: Structure, table: Table, ratio: float, side: str, fixed: float) -> Limit:
    curves = tuple(table.curves(structure, side))
    fits = {entry.shape: fit(entry.curve(side)) for entry in table.sublayers}  # for Alg. 2
    found = zip(structure.sublayers, shapes_in(structure), strict=True)
    pieces = tuple(fits[shape] if s.units else Piecewise(0.0) for s, shape in found)
    limit = Limit("latency", ratio, curves, fixed, whole=table.dense, pieces=pieces)
    least = sum(float(curve[s.floor :].min()) for curve, s in zip(curves, structure.sublayers, strict=True))
    if limit.budget < least:
        enough = math.ceil(100 * (fixed + least) / table.dense) / 100
        what = "embeddings, norms, head" if side == "seconds" else "the host's launching of it"
        graphs = ", or measure the model as a CUDA graph (`shearling profile --runtime graphs`)"
        other = graphs if side == "launch" else ""
        raise ConstraintError(
            f"latency={ratio:g} leaves {milli(ratio * table.dense)} of {milli(table.dense)}, but what cannot be pruned "
            f"({what}) takes {milli(fixed + least)}; ask for at least {enough:.2f}{other}."
        )
    return limit


def meet(
    ratio: float,
    table: Table,
    teacher: Structure,
    cut: Callable[[Sequence[Limit]], Made],
    *,
    correct: bool = True,
    stages: Stages,
) -> Selection:
    """Find a cut whose forward pass takes at most `ratio` of the teacher's, as predicted and as timed.

    cut      chooses and shrinks under given limits
    correct  on a miss of more than 5%, add the error of the table to its overhead and cut again, at most twice
    """
    here = device_name(device_of(teacher.model))
    same_device = here == table.device
    overhead = 0.0
    tried: list[Try] = []
    warnings: list[str] = []
    limits = latency_limits(teacher, table, ratio)
    choice, student = cut(limits)
    while True:
        predicted = table.predict(teacher, [len(units) for units in choice.cut.kept]) / table.dense
        with stages("timing"):
            measured = measure_ratio(teacher.model, student.model, table, same_device=same_device)
        tried.append(Try(predicted, measured))
        missed = measured > ratio * (1 + TOLERANCE)
        if not (missed and correct and same_device and len(tried) <= CORRECTIONS):
            break
        overhead = max(overhead, (measured - predicted) * table.dense)
        try:
            tighter = latency_limits(teacher, table, ratio, overhead=overhead)
            choice, student = cut(tighter)
        except ConstraintError as error:
            warnings.append(f"the table could not be corrected: {error}")
            break
        limits = tighter
    if table.unrest > RESTLESS:
        warnings.append(f"while the latency table was measured, {restless(table.unrest)}")
    if not same_device:
        warnings.append(f"the latency table was measured on {table.device}; timed here, on {here}")
    if missed:
        warnings.append(f"asked for {ratio:g} of the dense time, measured {measured:.3f}")
    record = MetLatency(
        ratio, predicted, measured, speedup=1 / measured, measured_on=here, device=table.device,
        batch_size=table.batch_size, seq_len=table.seq_len, dtype=table.dtype,
        threads=table.threads if table.device_type == "cpu" else None, runtime=table.runtime,
        corrections=len(tried) - 1, layer_time=table.layer_shares(teacher), tried=tried,
    )  # fmt: skip
    return Selection(choice, student, limits, record, warnings)


def table_for(structure: Structure, batch_size: int, length: float | None, stages: Stages) -> Table:
    """Measure a table, on one process."""
    seq_len = max(round(length), 1) if length is not None else 128
    with stages("profile") as progress:
        return on_first(lambda: profile(structure.model, batch_size=batch_size, seq_len=seq_len, progress=progress))


def measure_ratio(dense: PreTrainedModel, pruned: PreTrainedModel, table: Table, *, same_device: bool = True) -> float:
    """Time of the pruned over the dense model, run alternately under the conditions of the table."""
    dtype = DTYPES[table.dtype] if same_device else dense.dtype
    threads = table.threads if same_device and table.device_type == "cpu" else None
    runtime = table.runtime if same_device else "eager"

    def ratio() -> float:
        models = [model if model.dtype == dtype else copy.deepcopy(model).to(dtype) for model in (dense, pruned)]
        example = example_inputs(models[0], table.batch_size, table.seq_len)
        with using_threads(threads), frozen(models[0]), frozen(models[1]), torch.no_grad():
            full, less = in_turns([runner(model, example, runtime) for model in models], device_of(models[0]))
        return less.median / full.median

    # On one process: concurrent timings would disturb each other, and all processes must choose the same.
    return on_first(ratio)
