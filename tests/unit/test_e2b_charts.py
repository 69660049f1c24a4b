"""Our charts and tables as E2B's SDK reads them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from e2b_code_interpreter.models import Result

from capsule.edge.e2b import charts

AXES = {
    "x": {"label": "time (s)", "scale": "log", "ticks": [1, 10], "tick_labels": ["1", "10"]},
    "y": {"label": "speed", "scale": "linear", "ticks": [0], "tick_labels": ["0"]},
}


def raw(body: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(body).encode())


def told(table: Any) -> Any:
    data = charts.data(raw(table))
    return None if data is None else json.loads(bytes(data))


def deep(head: bytes, tail: bytes) -> bytes:
    return head + b"[" * 100_000 + b"]" * 100_000 + tail


def read(body: Any) -> Any:
    """As the SDK has it."""
    chart = charts.chart(raw(body))
    assert chart is not None
    result = Result(chart=json.loads(bytes(chart)))
    assert result.chart is not None
    return result.chart


@pytest.mark.parametrize("kind", ["line", "scatter"])
def test_points(kind: str) -> None:
    series = [{"label": "a", "x": [1, 2], "y": [3, None]}]
    chart = read({"type": kind, "title": "T", "series": series, **AXES})
    assert (chart.type, chart.title) == (kind, "T")
    assert (chart.x_label, chart.x_unit, chart.x_scale) == ("time (s)", "s", "log")
    assert (chart.y_label, chart.y_unit, chart.y_scale) == ("speed", None, "linear")
    assert (chart.x_ticks, chart.x_tick_labels) == ([1, 10], ["1", "10"])
    (element,) = chart.elements
    assert (element.label, element.points) == ("a", [(1, 3), (2, None)])


def test_bars() -> None:
    series = [{"label": "g", "x": ["a", 2], "y": [1, 2.5]}]
    chart = read({"type": "bar", "title": "", "series": series, **AXES})
    found = [(each.label, each.group, each.value) for each in chart.elements]
    assert found == [("a", "g", 1), ("2", "g", 2.5)]


def test_a_pie() -> None:
    chart = read({"type": "pie", "series": [{"label": "half", "value": 0.5}]})
    (element,) = chart.elements
    assert (element.label, element.angle, element.radius) == ("half", 180, 1)


def test_boxes() -> None:
    box = {"label": "b", "low": 1, "q1": 2, "median": 3, "q3": 4, "high": 5, "outliers": [9]}
    chart = read({"type": "box", "title": "", "series": [box], **AXES})
    assert chart.type == "box_and_whisker"
    (element,) = chart.elements
    values = (element.min, element.first_quartile, element.median, element.third_quartile)
    assert (*values, element.max, element.outliers) == (1, 2, 3, 4, 5, [9])


def test_several() -> None:
    line = {"type": "line", "series": [{"label": "", "x": [1], "y": [1]}], **AXES}
    chart = read({"type": "several", "title": "all", "charts": [line, line]})
    assert (chart.type, chart.title) == ("superchart", "all")
    assert [each.type for each in chart.elements] == ["line", "line"]


@pytest.mark.parametrize("body", [1, [], {"type": "line", "series": [{"x": 1}]}, {"x": 3}])
def test_what_is_no_chart_is_left_out(body: Any) -> None:
    assert charts.chart(raw(body)) is None


@pytest.mark.parametrize("value", ["a" * 1000, [1] * 1000, True, None, {}, 10**400])
def test_a_share_is_a_number(value: Any) -> None:
    assert charts.chart(raw({"type": "pie", "series": [{"label": "a", "value": value}]})) is None


@pytest.mark.parametrize("kind", ["line", "bar"])
def test_a_number_without_end_is_no_chart(kind: str) -> None:
    series = [{"label": "a", "x": [1], "y": [10**400]}]
    assert charts.chart(raw({"type": kind, "series": series})) is None


def test_what_is_too_deep_is_left_out() -> None:
    assert charts.chart(msgspec.Raw(deep(b'{"type":"line","series":[{"x":', b"}]}"))) is None
    several = b'{"type":"several","charts":['
    assert charts.chart(msgspec.Raw(several * 10_000 + b"]}" * 10_000)) is None


def test_what_is_said_with_each_bar_is_short() -> None:
    """It would be as long as all bars times itself."""
    bars = {"label": "g" * 500_000, "x": ["a"] * 50_000, "y": [1] * 50_000}
    chart = charts.chart(raw({"type": "bar", "series": [bars]}))
    assert chart is not None and len(bytes(chart)) < 20_000_000
    assert charts.chart(raw({"type": "bar", "series": [{**bars, "label": ["g"]}]})) is None


def test_a_table_is_told_column_by_column() -> None:
    table = {"columns": ["n", "s"], "index": [0, 1], "rows": [[1, "a"], [2, None]]}
    assert told(table) == {"n": [1, 2], "s": ["a", None]}
    assert told({"columns": ["n"], "rows": []}) == {"n": []}
    assert charts.data(raw([1])) is None
    assert charts.data(msgspec.Raw(deep(b'{"columns":["n"],"rows":[[', b"]]}"))) is None


def test_as_the_suites_of_the_sdk_want_it() -> None:
    """Nothing said is None, numbers are floats, and lying bars are measured on the y-axis."""
    bare = read({"type": "line", "series": [{"label": "", "x": [1], "y": [2]}]})
    assert (bare.title, bare.x_label, bare.elements[0].label) == (None, None, "Line 0")
    assert [type(each) for each in bare.elements[0].points[0]] == [float, float]
    bars = {"label": "", "x": ["a"], "y": [1], "horizontal": True}
    lying = read({"type": "bar", "series": [bars], **AXES})
    assert (lying.x_label, lying.y_label) == ("speed", "time (s)")
    assert lying.elements[0].group == "Group 0"
    assert read({"type": "unknown", "title": "T"}).elements == []
