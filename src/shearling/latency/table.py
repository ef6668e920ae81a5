"""The latency table: time of k units of a sublayer on one device, at one batch size, length and dtype.

With a GPU, host and device work concurrently: the host launches kernels, the device runs them, and the slower one is
the bottleneck. A table of a GPU therefore has both times (`seconds` of the device, `launch` of the host); each is
summed over the sublayers, and the forward pass takes the larger sum. On a CPU there is only one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shearling.errors import TableError
from shearling.files import json_text, write_whole
from shearling.latency.fit import Floats, cleaned
from shearling.models.structure import Structure
from shearling.schema import TABLE

FORMAT = 1
MAX_BYTES = 64 * 2**20
RESTLESS = 0.15  # spread / time above which a table is unreliable
WAITING = 1.2  # ratio of total to device time above which a note says that the GPU waits for the host

ShapeKey = tuple[int, str, int, int, int]  # stack, kind, width, hidden size, weights per unit


@dataclass(frozen=True)
class Entry:
    """Times of one shape of sublayer, shared by all sublayers of that shape.

    units    timed counts, from 0 to all units
    seconds  in addition to the sublayer without units (its bias, residual and norm)
    spread   half the interquartile range of the repeated runs
    launch   time of the host, on a GPU, with its own spread
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
    def shape(self) -> ShapeKey:
        """What the time of a unit depends on."""
        return self.stack, self.kind, self.width, self.hidden_size, self.weights_per_unit

    def curve(self, side: str = "seconds") -> Floats:
        """[units + 1]: denoised time of every count, interpolated linearly between timed counts."""
        spread, times = self.side(side)
        return np.interp(np.arange(self.units[-1] + 1), self.units, cleaned(self.units, times, spread))

    def side(self, name: str) -> tuple[list[float], list[float]]:
        """(spread, times) of the device or of the host."""
        if name == "launch" and self.launch is not None:
            return self.launch_spread or [0.0] * len(self.launch), self.launch
        return self.spread, self.seconds


@dataclass(frozen=True)
class Table:
    """The latency table; `whole` is the dense forward pass, `fixed` the part that cannot be pruned."""

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
        """Seconds of the dense forward pass: the larger side."""
        return max(self.whole, self.whole_launch or 0.0)

    @property
    def sides(self) -> dict[str, float]:
        """The fixed part of each side: `seconds` of the device and, on a GPU, `launch` of the host."""
        return {"seconds": self.fixed} | ({} if self.fixed_launch is None else {"launch": self.fixed_launch})

    @property
    def slower_side(self) -> str:
        """The side that is the bottleneck of the dense model."""
        return "launch" if (self.whole_launch or 0.0) > self.whole else "seconds"

    @property
    def floor(self) -> float:
        """Seconds of the forward pass without any units."""
        return max(self.sides.values())

    @property
    def unrest(self) -> float:
        """Median of spread / time; below a few percent on a quiet machine."""
        shares = [s / t for e in self.sublayers for s, t in zip(*e.side(self.slower_side), strict=True) if t > 0]
        return float(np.median(shares)) if shares else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table atomically."""
        target = Path(path)
        write_whole(target, json_text(self.to_json()))
        return target

    def curves(self, structure: Structure, side: str = "seconds") -> list[Floats]:
        """Per sublayer of the model, [units + 1] seconds."""
        by_shape = {entry.shape: entry.curve(side) for entry in self.sublayers}
        found = zip(structure.sublayers, shapes_in(structure), strict=True)
        return [by_shape[shape][: s.units + 1] if s.units else np.zeros(1) for s, shape in found]

    def layer_shares(self, structure: Structure) -> list[float]:
        """Per layer, its share of the dense forward pass."""
        times = iter(self.curves(structure, self.slower_side))
        layers = [layer for stack in structure.stacks for layer in stack.sublayers]
        return [float(sum(next(times)[-1] for _ in layer)) / self.dense for layer in layers]

    def predict(self, structure: Structure, counts: Sequence[int]) -> float:
        """Predicted seconds of the forward pass with these counts."""
        return max(
            fixed + float(sum(curve[n] for curve, n in zip(self.curves(structure, side), counts, strict=True)))
            for side, fixed in self.sides.items()
        )

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
    """Format seconds with a suitable unit."""
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 or not seconds else (1e6, "µs")
    return f"{scale * seconds:.0f} {unit}" if scale * seconds >= 100 else f"{scale * seconds:.3g} {unit}"


def restless(unrest: float) -> str:
    """Warning about a table measured on a busy machine."""
    return f"the machine was busy: repeated runs differ by {unrest:.0%}; measure the table again when it is quiet"


def shapes_in(structure: Structure) -> list[ShapeKey]:
    """Per sublayer, what the time of a unit depends on."""
    return [
        (index, s.kind, s.width, int(s.weight.shape[0]), s.weights_per_unit if s.units else 0)
        for index, stack in enumerate(structure.stacks)
        for layer in stack.sublayers
        for s in layer
    ]


def load_table(path: str | os.PathLike[str]) -> Table:
    """Read a table from a file and check every field."""
    record = TABLE.read(Path(path), most=MAX_BYTES)
    entries = [Entry(**entry) for entry in record.pop("sublayers")]
    record.pop("format")
    return Table(**record, sublayers=entries)


def check_fits(table: Table, structure: Structure) -> None:
    """Raise unless the table was measured on a model with these shapes."""
    known = {entry.shape: entry.units[-1] for entry in table.sublayers}
    missing = (
        f"has no times for the {s.name} ({s.units} units of width {s.width}, hidden size {shape[3]})"
        for s, shape in zip(structure.sublayers, shapes_in(structure), strict=True)
        if s.units and known.get(shape, -1) < s.units
    )
    model_type, wrong = structure.model.config.model_type, next(missing, "")
    if table.model_type != model_type:
        wrong = f"is of a {table.model_type} model, this one is {model_type}"
    elif table.layers != structure.sizes:
        wrong = f"is of a model with {_sizes(table.layers)}; this one has {_sizes(structure.sizes)}"
    if wrong:
        raise TableError(f"The latency table {wrong}. Measure this model with `shearling profile`.")


def _sizes(layers: Sequence[dict[str, int]]) -> str:
    """`12 layers of 12 heads and 3072 filters`, or a list where layers differ."""
    if any(layer != layers[0] for layer in layers):
        return f"{len(layers)} layers {layers}"
    return f"{len(layers)} layers of " + " and ".join(f"{count} {kind}" for kind, count in layers[0].items())
