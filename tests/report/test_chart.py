from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shearling.report.chart import HEIGHT, WIDTH, Axis, Level, Point, Series, chart
from shearling.report.curve import curve_chart, series_of

SVG = "{http://www.w3.org/2000/svg}"


def corners(element: ET.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def marks(picture: str) -> list[tuple[float, float]]:
    """The centres of the points that carry a value, in the order drawn."""
    root = ET.fromstring(picture)
    polygons = [p for p in root.iter(f"{SVG}polygon") if p.find(f"{SVG}title") is not None]
    centres = []
    for polygon in polygons:
        xs, ys = zip(*corners(polygon), strict=True)
        centres.append(((min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2))
    return centres


def test_higher_values_are_higher_and_larger_budgets_further_right() -> None:
    picture = chart([Series("a", [Point(0.9, 80), Point(0.1, 20), Point(0.5, 60)])])
    (x1, y1), (x2, y2), (x3, y3) = marks(picture)
    assert x1 < x2 < x3
    assert y1 > y2 > y3
    assert (y1 - y2) / (y2 - y3) == pytest.approx(2.0, rel=0.02)  # 20 -> 60 is twice 60 -> 80


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30),
    st.floats(0, 0.2),
)
def test_an_axis_holds_every_value(values: list[float], air: float) -> None:
    axis = Axis.around(values, 0, 100, air=air)
    assert axis.low <= min(values) + 1e-6
    assert axis.high >= max(values) - 1e-6
    assert 2 <= len(axis.ticks) <= 12
    steps = [b - a for a, b in zip(axis.ticks, axis.ticks[1:], strict=False)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)
    assert all(-1e-3 <= axis(value) <= 100 + 1e-3 for value in values)


def test_words_from_outside_are_escaped() -> None:
    picture = chart([Series("<b>&", [Point(0, 1, note='"<i>')])], title="a<b", levels=[Level(1, "<u>")])
    root = ET.fromstring(picture)  # not well-formed otherwise
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"<b>&", "a<b", "<u>"} <= set(texts)


def test_labels_of_near_levels_do_not_overlap() -> None:
    picture = chart([Series("a", [Point(0, 0), Point(1, 100)])], levels=[Level(50, "one"), Level(49.9, "two")])
    heights = {t.text: float(t.attrib.get("y", 0)) for t in ET.fromstring(picture).iter(f"{SVG}text")}
    assert abs(heights["one"] - heights["two"]) >= 12


def test_everything_is_inside_the_picture() -> None:
    series = [Series(f"a rather long name {i}", [Point(x / 10, i * x) for x in range(1, 11)]) for i in range(8)]
    for x, y in marks(chart(series)):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_an_empty_chart_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        chart([Series("a", [])])


def rows(metric: str = "accuracy") -> list[dict[str, object]]:
    values = {("surgeon", 0.5): (80.0, 82.0), ("surgeon", 0.3): (70.0, 76.0), ("paper", 0.5): (60.0, 61.0)}
    return [
        {"method": m, "flops": f, "metric": metric, "value": v, "constraint": {"flops": f}, "seed": s}
        for (m, f), pair in values.items()
        for s, v in enumerate(pair)
    ]


def test_a_point_of_the_curve_is_the_mean_and_its_band_the_range() -> None:
    surgeon, paper = series_of(rows())
    assert [(p.x, p.y, p.low, p.high) for p in surgeon.points] == [(0.3, 73, 70, 76), (0.5, 81, 80, 82)]
    assert paper.label == "paper"


def test_the_curve_shows_dense_and_one_point_below() -> None:
    texts = [t.text for t in ET.fromstring(curve_chart(rows(), dense=83.0)).iter(f"{SVG}text")]
    assert "dense 83.00" in texts
    assert "1 point below" in texts
    texts = [t.text for t in ET.fromstring(curve_chart(rows("perplexity"), dense=20.0)).iter(f"{SVG}text")]
    assert "1 point below" not in texts
