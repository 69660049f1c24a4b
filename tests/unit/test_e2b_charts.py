"""Charts and tables as E2B's SDK reads them."""

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
    return msgspec.Raw(body if isinstance(body, bytes) else json.dumps(body).encode())


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


def test_other_kinds() -> None:
    bars = {"label": "", "x": ["a", 2], "y": [1, 2.5], "horizontal": True}
    chart = read({"type": "bar", "title": "", "series": [bars], **AXES})
    found = [(each.label, each.group, each.value) for each in chart.elements]
    assert found == [("a", "Group 0", 1), ("2", "Group 0", 2.5)]
    assert (chart.x_label, chart.y_label) == ("speed", "time (s)")  # as E2B has lying bars
    (element,) = read({"type": "pie", "series": [{"label": "half", "value": 0.5}]}).elements
    assert (element.label, element.angle, element.radius) == ("half", 180, 1)
    box = {"label": "b", "low": 1, "q1": 2, "median": 3, "q3": 4, "high": 5, "outliers": [9]}
    chart = read({"type": "box", "title": "", "series": [box], **AXES})
    assert chart.type == "box_and_whisker"
    (element,) = chart.elements
    values = (element.min, element.first_quartile, element.median, element.third_quartile)
    assert (*values, element.max, element.outliers) == (1, 2, 3, 4, 5, [9])
    line = {"type": "line", "series": [{"label": "", "x": [1], "y": [2]}]}
    chart = read({"type": "several", "title": "all", "charts": [line, line]})
    assert (chart.type, chart.title) == ("superchart", "all")
    (first, _) = chart.elements
    assert (first.title, first.x_label, first.elements[0].label) == (None, None, "Line 0")
    assert read({"type": "unknown", "title": "T"}).elements == []


@pytest.mark.parametrize(
    "body",
    [
        1,
        [],
        {"x": 3},
        {"type": "line", "series": [{"x": 1}]},
        {"type": "line", "series": [{"label": "a", "x": [1], "y": [10**400]}]},
        {"type": "bar", "series": [{"label": ["g"], "x": ["a"], "y": [1]}]},
        {"type": "pie", "series": [{"label": "a", "value": "a"}]},
        {"type": "pie", "series": [{"label": "a", "value": True}]},
        deep(b'{"type":"line","series":[{"x":', b"}]}"),
        b'{"type":"several","charts":[' * 10_000 + b"]}" * 10_000,
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_no_chart_is_left_out(body: Any) -> None:
    assert charts.chart(raw(body)) is None


def test_a_label_is_not_repeated_without_bound() -> None:
    bars = {"label": "g" * 500_000, "x": ["a"] * 50_000, "y": [1] * 50_000}
    chart = charts.chart(raw({"type": "bar", "series": [bars]}))
    assert chart is not None and len(bytes(chart)) < 20_000_000


def test_a_table_has_its_columns() -> None:
    data = charts.data(raw({"columns": ["n", "s"], "index": [0, 1], "rows": [[1, "a"], [2, None]]}))
    assert data is not None and json.loads(bytes(data)) == {"n": [1, 2], "s": ["a", None]}
    empty = charts.data(raw({"columns": ["n"], "rows": []}))
    assert empty is not None and json.loads(bytes(empty)) == {"n": []}
    for nothing in ([1], deep(b'{"columns":["n"],"rows":[[', b"]]}")):
        assert charts.data(raw(nothing)) is None
