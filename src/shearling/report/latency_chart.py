"""A picture of a latency table: the times, their spread, and Alg. 2's fit over them."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shearling.errors import OutputError
from shearling.files import write_whole
from shearling.latency.fit import fit, values
from shearling.latency.table import milli

if TYPE_CHECKING:
    from shearling.latency.table import Entry, Table

ENDINGS = ("svg", "png", "pdf")
DOTS, LINE, HOST = "#2f6690", "#d1495b", "#8d99ae"


def plot(table: Table, path: str | os.PathLike[str]) -> Path:
    """Draw the table; the ending of the path says how (svg, png, pdf)."""
    target = Path(path)
    ending = check_picture(target)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(table.sublayers), 3.8), layout="constrained")
    for axes, entry in zip(np.atleast_1d(figure.subplots(1, len(table.sublayers))), table.sublayers, strict=True):
        _draw(axes, entry)
    threads = f", {table.threads} threads" if table.device_type == "cpu" else ""
    shape = f"batch {table.batch_size}, length {table.seq_len}, {table.dtype}{threads}"
    figure.suptitle(f"{table.model_type} on {table.device}: {shape}", fontsize=11)
    drawn = BytesIO()
    figure.savefig(drawn, format=ending)
    write_whole(target, drawn.getvalue())
    return target


def check_picture(path: Path) -> str:
    """The ending of a picture that can be drawn here; complains before a table is measured for it."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in ENDINGS:
        raise OutputError(f"Cannot draw {path}: its ending must be one of {', '.join(ENDINGS)}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise OutputError("A plot needs matplotlib: pip install 'shearling[plot]'.") from None
    return ending


def _draw(axes: Any, entry: Entry) -> None:
    units = entry.units[-1]
    found = fit(entry.curve())
    seconds, spread = np.array(entry.seconds), np.array(entry.spread)
    size = 4.5 if len(entry.units) < 30 else 3
    axes.errorbar(
        entry.units, 1e3 * seconds, yerr=1e3 * spread, fmt="o", ms=size, lw=0.8, color=DOTS, label="timed, with spread",
    )  # fmt: skip
    axes.plot(np.arange(units + 1), 1e3 * entry.curve(), color=DOTS, lw=1, alpha=0.6, label="table")
    word = f"fit: {milli(found.overhead)} up to {found.threshold}, then {1e6 * found.slope:.3g} µs a unit"
    axes.plot(np.arange(1, units + 1), 1e3 * values(found, units)[1:], color=LINE, lw=1.8, label=word)
    if entry.launch is not None:
        axes.plot(entry.units, 1e3 * np.array(entry.launch), "x", ms=size, color=HOST, label="host launching it")
    axes.set_xlabel(f"{entry.kind} left in the sublayer")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(0, 1.35e3 * max(seconds.max(), 1e-9))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
