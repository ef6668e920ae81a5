"""Charts: the right points at the right places, text as text, colours by name."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from shearling.report.charts import COLOURS, Level, Point, Series, chart, palette
from shearling.report.points import charts_of, curve_chart, series_of

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture.encode()).iter(f"{SVG}text")]


def marks(picture: str, colour: str = "s0") -> list[tuple[float, float]]:
    """The places of one series' points, in the order drawn; its mark in the legend comes last."""
    uses = ET.fromstring(picture.encode()).iter(f"{SVG}use")
    return [
        (float(u.attrib["x"]), float(u.attrib["y"])) for u in uses if f"fill: var(--{colour})" in u.attrib["style"]
    ]  # fmt: skip


def test_higher_values_are_higher_and_larger_budgets_further_right() -> None:
    picture = chart([Series("a", [Point(0.9, 80), Point(0.1, 20), Point(0.5, 60)])])
    (x1, y1), (x2, y2), (x3, y3), _ = marks(picture)
    assert x1 < x2 < x3
    assert y1 > y2 > y3
    assert (y1 - y2) / (y2 - y3) == pytest.approx(2.0, rel=0.02)  # 20 -> 60 is twice 60 -> 80


def test_words_are_text_and_escaped() -> None:
    picture = chart([Series("<b>&", [Point(0, 1)])], title="a<b", levels=[Level(1, "<u>")], marked=[(0, 1, "&best")])
    assert {"<b>&", "a<b", "<u>", "&best"} <= set(texts(picture))


def test_colours_are_names_that_the_palette_knows() -> None:
    series = [Series(str(i), [Point(i, i), Point(i + 1, i)]) for i in range(len(COLOURS) + 1)]
    inside = chart(series, standalone=False)
    names = set(re.findall(r"var\((--\w+)\)", inside))
    assert {f"--s{i}" for i in range(len(COLOURS))} <= names
    assert all(f"{name}:" in palette() for name in names)
    assert not re.findall(r"#[0-9a-f]{6}", inside)
    assert "<style>" in chart(series)


def test_charts_of_one_page_share_no_ids() -> None:
    pictures = [chart([Series("a", [Point(0, 1), Point(1, 2)])], x_label=axis, standalone=False) for axis in "xy"]
    first, second = (set(re.findall(r' id="([^"]+)"', picture)) for picture in pictures)
    assert first
    assert not first & second


def test_labels_of_near_levels_do_not_overlap() -> None:
    picture = chart([Series("a", [Point(0, 0), Point(1, 100)])], levels=[Level(50, "one"), Level(49.9, "two")])
    heights = {
        t.text: float(t.attrib["y"]) for t in ET.fromstring(picture.encode()).iter(f"{SVG}text") if "y" in t.attrib
    }
    assert heights["two"] - heights["one"] >= 12


def test_an_empty_chart_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        chart([Series("a", [])])


def rows(metric: str = "accuracy") -> list[dict[str, object]]:
    values = {("surgeon", 0.5): (80.0, 82.0), ("surgeon", 0.3): (70.0, 76.0), ("paper", 0.5): (60.0, 61.0)}
    return [
        {"method": m, "flops": f, "metric": metric, "value": v, "constraint": {"flops": f}, "seed": s, "dense": 81.5}
        for (m, f), pair in values.items()
        for s, v in enumerate(pair)
    ]


def test_a_point_of_the_curve_is_the_mean_and_its_band_the_range() -> None:
    surgeon, paper = series_of(rows())
    assert [(p.x, p.y, p.low, p.high) for p in surgeon.points] == [(0.3, 73, 70, 76), (0.5, 81, 80, 82)]
    assert paper.label == "paper"


def test_the_curve_shows_dense_one_point_below_and_the_point_to_take() -> None:
    said = texts(curve_chart(rows(), dense=81.5))
    assert {"dense 81.50", "1 point less", "recommended", "dense", "surgeon", "paper"} <= set(said)
    said = texts(curve_chart(rows("perplexity"), dense=20.0))
    assert "1 point less" not in said


def test_the_axes_are_those_that_were_measured() -> None:
    dense = {"value": 81.5, "megabytes": 10.0}
    assert [name for name, _ in charts_of(rows(), dense)] == ["FLOPs"]
    more = [row | {"megabytes": 5.0, "timing": {"measured": 0.6}} for row in rows()]
    charts = dict(charts_of(more, dense))
    assert list(charts) == ["FLOPs", "measured latency", "MB"]
    assert "weights, MB" in texts(charts["MB"])
    timed = [row | {"constraint": {"latency": 0.5}} for row in more]
    assert [name for name, _ in charts_of(timed, dense)] == ["measured latency", "FLOPs", "MB"]
