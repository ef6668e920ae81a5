"""The latency table: what k units of a sublayer take, on one device, at one batch size, length and dtype.

Time on a GPU has two sides that run at once: the host launches the work, the device does it, and the slower of the
two sets the pace. A table of a GPU therefore holds both (`seconds` of the device, `launch` of the host), each adds up
over the sublayers, and the forward pass takes the larger sum. On a CPU there is one side only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shearling.files import write_whole
from shearling.latency.fit import fit
from shearling.models.structure import Structure
from shearling.schema import TABLE

FORMAT = 1
MAX_BYTES = 64 * 2**20
RESTLESS = 0.15  # spread over time, from which on a table is not to be relied on
WAITING = 1.2  # times its own work, from which on a GPU is said to wait for the host
NOISE = 2.0  # spreads; a dip deeper than this is the hardware's own and stays

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Entry:
    """The times of one shape of sublayer, shared by all the sublayers of that shape.

    units    the counts that were timed, from 0 to every unit
    seconds  beyond what the sublayer takes with no unit left (its bias, residual and norm)
    spread   half the interquartile range of the repeated runs
    launch   the host's share, where it runs beside the device, with its own spread
    """

    stack: int
    kind: str
    width: int
    hidden_size: int
    weights_per_unit: int
    units: list[int]
    seconds: list[float]
    spread: list[float]
    launch: list[float] | None = None
    launch_spread: list[float] | None = None

    @property
    def shape(self) -> tuple[int, str, int, int, int]:
        """What makes two sublayers alike: all but their number of units."""
        return self.stack, self.kind, self.width, self.hidden_size, self.weights_per_unit

    def curve(self, side: str = "seconds") -> Floats:
        """[units + 1]: the time of every count, noise taken out, straight lines between the counts that were timed."""
        spread, times = self.side(side)
        return np.interp(np.arange(self.units[-1] + 1), self.units, cleaned(self.units, times, spread))

    def side(self, name: str) -> tuple[list[float], list[float]]:
        """(spread, times) of the device or of the host."""
        if name == "launch" and self.launch is not None:
            return self.launch_spread or [0.0] * len(self.launch), self.launch
        return self.spread, self.seconds


@dataclass(frozen=True)
class Table:
    """All of it; `fixed` is what stays when every unit is gone, `whole` the dense forward pass."""

    device: str
    device_type: str
    model_type: str
    layers: list[dict[str, int]]
    batch_size: int
    seq_len: int
    dtype: str
    threads: int
    whole: float
    fixed: float
    sublayers: list[Entry]
    whole_launch: float | None = None
    fixed_launch: float | None = None
    runtime: str = "eager"
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dense(self) -> float:
        """Seconds of the dense forward pass: the slower side of it."""
        return max(self.whole, self.whole_launch or 0.0)

    @property
    def slower_side(self) -> str:
        """The one that sets the pace of the dense model."""
        return "launch" if (self.whole_launch or 0.0) > self.whole else "seconds"

    @property
    def floor(self) -> float:
        """Seconds that stay when every unit is gone."""
        return max(self.fixed, self.fixed_launch or 0.0)

    @property
    def unrest(self) -> float:
        """How much repeated runs differed, typically: spread over time. A quiet machine stays below a few percent."""
        shares = [s / t for e in self.sublayers for s, t in zip(*e.side(self.slower_side), strict=True) if t > 0]
        return float(np.median(shares)) if shares else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table, complete or not at all."""
        target = Path(path)
        write_whole(target, json.dumps(self.to_json(), indent=1) + "\n")
        return target

    def curves(self, structure: Structure, side: str = "seconds") -> list[Floats]:
        """Per sublayer of the model, [units + 1] seconds."""
        by_shape = {entry.shape: entry.curve(side) for entry in self.sublayers}
        found = []
        for number, sublayer in enumerate(structure.sublayers):
            curve = by_shape[shape_of(structure, number)] if sublayer.units else np.zeros(1)
            found.append(curve[: sublayer.units + 1])
        return found

    def layer_shares(self, structure: Structure) -> list[float]:
        """Per layer of the model, its share of the dense forward pass."""
        times = iter(self.curves(structure, self.slower_side))
        layers = [layer for stack in structure.stacks for layer in stack.sublayers]
        return [float(sum(next(times)[-1] for _ in layer)) / self.dense for layer in layers]

    def predict(self, structure: Structure, counts: Sequence[int]) -> float:
        """Seconds of the forward pass with these units left."""
        sides = [self.fixed + sum(c[n] for c, n in zip(self.curves(structure), counts, strict=True))]
        if self.fixed_launch is not None:
            launch = self.curves(structure, "launch")
            sides.append(self.fixed_launch + sum(c[n] for c, n in zip(launch, counts, strict=True)))
        return float(max(sides))

    def __str__(self) -> str:
        shape = f"batch {self.batch_size}, length {self.seq_len}, {self.dtype}"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device_type == "cpu" else ""
        graphs = ", as a CUDA graph" if self.runtime == "graphs" else ""
        lines = [
            f"{self.model_type} on {self.device}: {shape}{threads}{graphs}",
            f"  whole forward pass {milli(self.dense)}, of which {milli(self.floor)} cannot be pruned",
        ]
        for entry in self.sublayers:
            full, count = entry.curve()[-1], entry.units[-1]
            word = f"  {entry.kind:<8} {count:>5} units {milli(full)}"
            if entry.launch is not None:
                word += f" (launch {milli(entry.curve('launch')[-1])})"
            lines.append(word + f", {len(entry.units)} counts timed")
        if self.dense > WAITING * self.whole:
            lines.append(
                f"  note: this GPU waits for the host: its own work takes {milli(self.whole)}, the launching of it "
                f"{milli(self.dense)}. Served with CUDA graphs, the model would not wait: --runtime graphs times that"
            )
        if self.unrest > RESTLESS:
            lines.append(f"  note: {restless(self.unrest)}")
        return "\n".join(lines)


def milli(seconds: float) -> str:
    """Seconds as people read them."""
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 or not seconds else (1e6, "µs")
    return f"{scale * seconds:.0f} {unit}" if scale * seconds >= 100 else f"{scale * seconds:.3g} {unit}"


def restless(unrest: float) -> str:
    """What to tell of a table measured while the machine was busy."""
    return f"the machine was busy: repeated runs differ by {unrest:.0%}; measure the table again when it is quiet"


def shape_of(structure: Structure, number: int) -> tuple[int, str, int, int, int]:
    """What the time of a unit depends on, from the modules as they are."""
    sublayer = structure.sublayers[number]
    price = sublayer.weights_per_unit if sublayer.units else 0
    return _stack_of(structure, number), sublayer.kind, sublayer.width, int(sublayer.weight.shape[0]), price


def _stack_of(structure: Structure, number: int) -> int:
    """Which stack a sublayer belongs to."""
    for index, stack in enumerate(structure.stacks):
        number -= sum(len(layer) for layer in stack.sublayers)
        if number < 0:
            return index
    raise IndexError(number)


def load_table(path: str | os.PathLike[str]) -> Table:
    """A table from a file; every field is checked, because people edit files and disks fill up."""
    record = TABLE.read(Path(path), most=MAX_BYTES)
    entries = [Entry(**entry) for entry in record.pop("sublayers")]
    record.pop("format")
    return Table(**record, sublayers=entries)


def cleaned(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats | None) -> Floats:
    """The times without what the spread says is noise."""
    noise = np.zeros(len(units)) if spread is None else np.asarray(spread)
    return without_noise(steadied(units, values, noise), noise)


def steadied(units: Sequence[int], values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Move each time towards the piecewise-linear fit, as far as its spread says that it cannot be trusted.

    An allocation looks for cheap counts, so on a busy machine it would find those that were timed in a quiet moment.
    How far the hardware itself departs from the fit is what is left of the residuals once the noise is taken off; on
    a quiet machine that is all of them, and plateaus and steps stay where they are.
    """
    times, noise = np.asarray(values, dtype=np.float64), np.asarray(spread, dtype=np.float64) ** 2
    if len(times) < 3:
        return times
    smooth = fit(np.interp(np.arange(units[-1] + 1), units, times))
    line = np.array([smooth(count) for count in units])
    real = max(float(np.mean((times - line)[1:] ** 2 - noise[1:])), 0.0)
    trust = np.divide(real, real + noise, out=np.ones_like(noise), where=noise > 0)
    trust[0] = 1.0  # zero units take no time
    steady: Floats = trust * times + (1 - trust) * line
    return steady


def without_noise(values: Sequence[float] | Floats, spread: Sequence[float] | Floats) -> Floats:
    """Pool neighbours that go down no further than the noise: more units do not take less time.

    Plateaus and steps are left exactly as they were measured, and so is a dip that noise cannot explain (hardware
    does run some sizes faster than smaller ones).
    """
    blocks: list[tuple[float, float, int]] = []  # mean, spread, points
    for value, noise in zip(values, spread, strict=True):
        block = (float(value), float(noise), 1)
        while blocks and 0 < blocks[-1][0] - block[0] <= NOISE * (blocks[-1][1] + block[1]):
            before = blocks.pop()
            points = before[2] + block[2]
            mean = (before[0] * before[2] + block[0] * block[2]) / points
            block = (mean, max(before[1], block[1]), points)
        blocks.append(block)
    return np.concatenate([np.full(points, mean) for mean, _, points in blocks])
