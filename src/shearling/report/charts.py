"""Charts with matplotlib, as SVG with real text and CSS variables as colours, so that they follow the page's theme."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shearling.errors import OutputError
from shearling.files import write_whole
from shearling.latency.fit import fit, values
from shearling.latency.table import milli
from shearling.report.facts import count

if TYPE_CHECKING:
    from shearling.latency.table import Entry, Table

ENDINGS = ("svg", "png", "pdf")
# Colour-blind friendly; the second of each pair is for dark backgrounds.
COLOURS = (
    ("#0b66a8", "#62b5f0"), ("#c8511b", "#ff9a62"), ("#1d7f5c", "#4fd0a1"), ("#8a4fb0", "#cf9bf0"),
    ("#a8780a", "#ecc04c"), ("#b3315f", "#ff85ac"), ("#4b5a68", "#a9bccd"), ("#15808f", "#53d2e2"),
    ("#6b8f1a", "#b5dd5f"), ("#7a5a41", "#d3ab8b"), ("#3b4fb8", "#9daaff"), ("#9c9c9c", "#e0e0e0"),
)  # fmt: skip
NAMED = {"ink": ("#1b242c", "#e6edf3"), "soft": ("#5d6b78", "#9aa9b6"), "grid": ("#dfe5ea", "#2c3944")}
GROUND = ("#ffffff", "#131a20")
INK, SOFT, GRID = (pair[0] for pair in NAMED.values())
MARKS = "osD^"


@dataclass(frozen=True)
class Point:
    """A value at x, optionally with its range."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one colour, joined by a line unless `line` is false."""

    label: str
    points: Sequence[Point]
    line: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line with a name."""

    y: float
    label: str
    strong: bool = False


def palette() -> str:
    """The CSS variables shared by charts and pages, for light and dark backgrounds."""
    pairs = {**{f"s{i}": pair for i, pair in enumerate(COLOURS)}, **NAMED, "ground": GROUND}
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in pairs.items()) for i in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def chart(
    series: Sequence[Series],
    *,
    levels: Sequence[Level] = (),
    marked: Sequence[tuple[float, float, str]] = (),
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    x_format: Callable[[float], str] = "{:g}".format,
    standalone: bool = True,
) -> str:
    """A line chart as SVG; `marked` points (x, y, text) get a ring; `standalone` embeds the colours."""
    if not any(one.points for one in series):
        raise ValueError("a chart needs at least one point")
    with _drawing(f"{title} {x_label} {y_label}") as figure_of:
        figure = figure_of(5.5, 3.9)
        axes = figure.subplots()
        for number, level in enumerate(sorted(levels, key=lambda one: -one.y)):
            axes.axhline(level.y, color=INK if level.strong else SOFT, lw=1.2, ls=(0, (5, 3)) if level.strong else ":")
            # Right of the axes, above the line for the first level, below it for the others.
            axes.annotate(level.label, (1.01, level.y), xycoords=("axes fraction", "data"), color=SOFT, fontsize=11,
                          xytext=(0, -1 if number else 1), textcoords="offset points",
                          va="top" if number else "bottom")  # fmt: skip
        for number, one in enumerate(series):
            _draw_series(axes, one, number)
        leftmost = min(point.x for one in series for point in one.points)
        for x, y, words in marked:
            at_edge = x <= leftmost  # centred text would overlap the tick labels
            axes.plot([x], [y], "o", ms=15, mfc="none", mec=INK, mew=1.6)
            axes.annotate(
                words,
                (x, y),
                xytext=(-6 if at_edge else 0, -20),
                textcoords="offset points",
                ha="left" if at_edge else "center",
                color=INK,
                fontsize=10,
                zorder=5,
            )
        axes.xaxis.set_major_formatter(lambda value, _: x_format(value))
        axes.margins(x=0.06, y=0.12)
        _dressed(axes, x_label, y_label)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(series)), frameon=False)
        if title:
            figure.suptitle(title, fontsize=13, fontweight="bold", color=INK)
        return _svg(figure, standalone=standalone)


def plot(table: Table, path: Path | str) -> Path:
    """Draw a latency table: the times, their spread, and the fit of Alg. 2; the file extension sets the format."""
    target = Path(path)
    ending = check_picture(target)
    with _drawing(str(target.name)) as figure_of:
        figure = figure_of(5.6 * len(table.sublayers), 4.1)
        for axes, entry in zip(np.atleast_1d(figure.subplots(1, len(table.sublayers))), table.sublayers, strict=True):
            _draw_entry(axes, entry)
        threads = f", {count(table.threads, 'thread')}" if table.device_type == "cpu" else ""
        shape = f"batch {table.batch_size}, length {table.seq_len}, {table.dtype}{threads}"
        figure.suptitle(f"{table.model_type} on {table.device}: {shape}", fontsize=12, color=INK)
        if ending == "svg":
            write_whole(target, _svg(figure, standalone=True))
        else:
            drawn = BytesIO()
            figure.savefig(drawn, format=ending, facecolor="white")
            write_whole(target, drawn.getvalue())
    return target


def check_picture(path: Path) -> str:
    """The file extension of a picture; raises if it is not supported or matplotlib is missing."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in ENDINGS:
        raise OutputError(f"Cannot draw {path}: its ending must be one of {', '.join(ENDINGS)}.")
    _matplotlib()
    return ending


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError:
        raise OutputError("Charts need matplotlib, which is not installed: pip install matplotlib.") from None
    return matplotlib


@contextmanager
def _drawing(salt: str) -> Iterator[Callable[[float, float], Any]]:
    """Matplotlib in our style; `salt` makes the SVG's ids unique."""
    library = _matplotlib()
    style = {
        "svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 12, "font.family": "sans-serif", "text.color": INK,
        "axes.edgecolor": SOFT, "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": GRID,
    }  # fmt: skip
    with library.rc_context(style):
        yield lambda width, height: library.figure.Figure(figsize=(width, height), layout="constrained")


def _draw_series(axes: Any, series: Series, number: int) -> None:
    colour, mark = COLOURS[number % len(COLOURS)][0], MARKS[number % len(MARKS)]
    points = sorted(series.points, key=lambda point: point.x)
    ranged = [p for p in points if p.low is not None and p.high is not None]
    if series.line and len(ranged) > 1:
        axes.fill_between(
            [p.x for p in ranged], [p.low for p in ranged], [p.high for p in ranged], color=colour, alpha=0.16, lw=0
        )
    line = "-" if series.line else "none"
    axes.plot([p.x for p in points], [p.y for p in points], ls=line, marker=mark, ms=6, lw=2.2, color=colour,
              label=series.label, zorder=3)  # fmt: skip


def _draw_entry(axes: Any, entry: Entry) -> None:
    units, found = entry.units[-1], fit(entry.curve())
    seconds, spread = np.array(entry.seconds), np.array(entry.spread)
    size = 4.5 if len(entry.units) < 30 else 3
    axes.errorbar(entry.units, 1e3 * seconds, yerr=1e3 * spread, fmt="o", ms=size, lw=0.8, color=COLOURS[0][0],
                  label="timed, with spread")  # fmt: skip
    axes.plot(np.arange(units + 1), 1e3 * entry.curve(), color=COLOURS[0][0], lw=1, alpha=0.6, label="table")
    word = f"fit: {milli(found.overhead)} up to {found.threshold}, then {milli(found.slope)} a unit"
    axes.plot(np.arange(1, units + 1), 1e3 * values(found, units)[1:], color=COLOURS[1][0], lw=1.8, label=word)
    if entry.launch is not None:
        axes.plot(
            entry.units, 1e3 * np.array(entry.launch), "x", ms=size, color=COLOURS[6][0], label="host launching it"
        )
    axes.set_ylim(0, 1.4e3 * max(seconds.max(), 1e-9))
    _dressed(axes, f"{entry.kind} left in the sublayer", "milliseconds")
    axes.legend(fontsize=9.5, frameon=False, loc="upper left")


def _dressed(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _svg(figure: Any, *, standalone: bool) -> str:
    """The figure as SVG without metadata and ids, with CSS variables as colours."""
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn.getvalue().decode(), flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    names = {pair[0]: f"s{i}" for i, pair in enumerate(COLOURS)} | {pair[0]: name for name, pair in NAMED.items()}
    text = re.sub("|".join(names), lambda found: f"var(--{names[found[0]]})", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, 'DejaVu Sans', sans-serif", text)
    start = text.index("<svg")
    end = text.index(">", start)
    wanted = r'viewBox="[^"]*"|width="[^"]*"|height="[^"]*"' if standalone else r'viewBox="[^"]*"'
    size = " ".join(re.findall(wanted, text[start:end]))
    ground = f'<style>{palette()}</style><rect width="100%" height="100%" style="fill: var(--ground)"/>'
    head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="chart" role="img"'
    before, after = ('<?xml version="1.0" encoding="utf-8"?>\n', ground) if standalone else ("", "")
    return f"{before}<svg {head} {size}>{after}{text[end + 1 :]}"
