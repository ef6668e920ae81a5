"""A line chart as SVG: series with bands, reference levels, legend; readable on light and on dark ground.

Colours are CSS variables, so the same picture serves as a file of its own and inside a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 58, 52
LINE = 15  # pixels between labels that would otherwise overlap

# Colours that people with colour-blindness tell apart; the second of each pair is for dark ground.
COLOURS = (
    ("#0b66a8", "#62b5f0"), ("#c8511b", "#ff9a62"), ("#1d7f5c", "#4fd0a1"), ("#8a4fb0", "#cf9bf0"),
    ("#a8780a", "#ecc04c"), ("#b3315f", "#ff85ac"), ("#4b5a68", "#a9bccd"), ("#15808f", "#53d2e2"),
    ("#6b8f1a", "#b5dd5f"), ("#7a5a41", "#d3ab8b"), ("#3b4fb8", "#9daaff"), ("#9c9c9c", "#e0e0e0"),
)  # fmt: skip
MARKS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Point:
    """A value at x, with the range it stands for and words to show on hovering."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour; joined by a line unless they are single references."""

    label: str
    points: Sequence[Point]
    line: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line with a name."""

    y: float
    label: str
    strong: bool = False


def style() -> str:
    """The rules that charts need; a page that holds several includes them once."""
    light = "".join(f"--s{i}:{pair[0]};" for i, pair in enumerate(COLOURS))
    dark = "".join(f"--s{i}:{pair[1]};" for i, pair in enumerate(COLOURS))
    return (
        f":root{{{light}--ink:#1b242c;--soft:#5d6b78;--grid:#dfe5ea;--ground:#ffffff}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}--ink:#e6edf3;--soft:#9aa9b6;--grid:#2c3944;"
        "--ground:#131a20}}"
        ".chart{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        ".chart text{fill:var(--soft)}.chart .name{fill:var(--ink)}.chart .title{fill:var(--ink);font-weight:600}"
        ".chart .grid{stroke:var(--grid)}.chart .axis{stroke:var(--soft)}"
        ".chart .level{stroke:var(--soft);stroke-dasharray:2 4}.chart .strong{stroke:var(--ink);stroke-dasharray:7 4}"
        ".chart .band{opacity:.16;stroke:none}.chart .path{fill:none;stroke-width:2.2;stroke-linejoin:round}"
        ".chart .mark{stroke:var(--ground);stroke-width:1.2}"
    )


def chart(
    series: Sequence[Series],
    *,
    levels: Sequence[Level] = (),
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    x_format: Callable[[float], str] = "{:g}".format,
    standalone: bool = True,
) -> str:
    """The picture; `standalone` brings its own colours and ground along."""
    if not any(s.points for s in series):
        raise ValueError("a chart needs at least one point")
    x_axis = Axis.around([p.x for s in series for p in s.points], LEFT, WIDTH - RIGHT)
    heights = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    y_axis = Axis.around(heights + [level.y for level in levels], HEIGHT - BOTTOM, TOP, air=0.05)
    body = [
        _axes(x_axis, y_axis, x_label, y_label, x_format),
        _levels(levels, y_axis),
        *(_drawn(one, number, x_axis, y_axis) for number, one in enumerate(series)),
        _legend(series),
    ]
    if title:
        body.append(f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>')
    top = 0 if title else 24  # no room for a title that is not there
    alone = f'<style>{style()}</style><rect width="100%" height="100%" fill="var(--ground)"/>' if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 {top} {WIDTH} {HEIGHT - top}" role="img" '
        f'aria-label="{escape(title or y_label, quote=True)}">{alone}{"".join(body)}</svg>'
    )


@dataclass(frozen=True)
class Axis:
    """Values to pixels, and where the ticks are."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: Sequence[float], start: float, stop: float, *, air: float = 0.0) -> Axis:
        """Round numbers that hold every value, with a share of air on both sides."""
        low, high = min(values), max(values)
        scale = max(abs(low), abs(high), 1.0)
        air = (high - low) * air if high - low > 1e-6 * scale else 0.01 * scale  # equal values get room around them
        step = _step((high - low + 2 * air) / 6)
        first, last = math.floor((low - air) / step), math.ceil((high + air) / step)
        ticks = tuple(round(i * step, 10) for i in range(first, last + 1))
        return cls(ticks[0], ticks[-1], start, stop, ticks)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _step(rough: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _axes(x: Axis, y: Axis, x_label: str, y_label: str, x_format: Callable[[float], str]) -> str:
    parts = []
    for tick in y.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    floor = HEIGHT - BOTTOM
    for tick in x.ticks:
        parts.append(f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{floor}" y2="{floor + 5}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{floor + 20}" text-anchor="middle">{x_format(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(16 {(TOP + floor) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _levels(levels: Sequence[Level], y: Axis) -> str:
    parts = []
    above = -math.inf
    for level in sorted(levels, key=lambda one: -one.y):
        height = y(level.y)
        text = max(height + 4, above + LINE)  # labels keep clear of each other, lines stay where they are
        above = text
        kind = "strong" if level.strong else "level"
        parts.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text x="{WIDTH - RIGHT + 8}" y="{text:.1f}">{escape(level.label)}</text>'
        )
    return "".join(parts)


def _drawn(series: Series, number: int, x: Axis, y: Axis) -> str:
    points = sorted(series.points, key=lambda p: p.x)
    colour = f"var(--s{number % len(COLOURS)})"
    parts = []
    ranged = [p for p in points if p.low is not None and p.high is not None]
    if series.line and len(ranged) > 1:
        outline = [(p.x, p.high) for p in ranged] + [(p.x, p.low) for p in reversed(ranged)]
        corners = " ".join(f"{x(a):.1f},{y(b or 0):.1f}" for a, b in outline)
        parts.append(f'<polygon class="band" fill="{colour}" points="{corners}"/>')
    if series.line and len(points) > 1:
        corners = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in points)
        parts.append(f'<polyline class="path" stroke="{colour}" points="{corners}"/>')
    shape = MARKS[number % len(MARKS)]
    parts += [_mark(shape, x(p.x), y(p.y), colour, p.note or f"{series.label}: {p.y:.2f}") for p in points]
    return "".join(parts)


def _mark(shape: str, cx: float, cy: float, colour: str, note: str = "") -> str:
    title = f"<title>{escape(note)}</title>" if note else ""
    outlines = {
        "circle": [(4.4 * math.cos(a * math.pi / 8), 4.4 * math.sin(a * math.pi / 8)) for a in range(16)],
        "square": [(-3.9, -3.9), (3.9, -3.9), (3.9, 3.9), (-3.9, 3.9)],
        "diamond": [(0, -5.6), (5.6, 0), (0, 5.6), (-5.6, 0)],
        "triangle": [(0, -5.2), (5.2, 4.2), (-5.2, 4.2)],
    }
    corners = " ".join(f"{cx + dx:.1f},{cy + dy:.1f}" for dx, dy in outlines[shape])
    return f'<polygon class="mark" fill="{colour}" points="{corners}">{title}</polygon>'


def _legend(series: Sequence[Series]) -> str:
    """Names in a row above the picture, a new row where they do not fit."""
    parts = []
    left, top = LEFT, 40
    for number, one in enumerate(series):
        width = 28 + 7.8 * len(one.label)
        if left + width > WIDTH - 8 and left > LEFT:
            left, top = LEFT, top + 14
        colour = f"var(--s{number % len(COLOURS)})"
        parts.append(_mark(MARKS[number % len(MARKS)], left + 5, top - 4, colour))
        parts.append(f'<text class="name" x="{left + 15}" y="{top}">{escape(one.label)}</text>')
        left += int(width)
    return "".join(parts)
