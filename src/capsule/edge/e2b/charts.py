"""Charts and tables as E2B's SDKs know them, from ours (spec/kernel.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

_UNIT = re.compile(r"\s\(([^()]{1,50})\)|\[([^\[\]]{1,50})\]")
_POINTS = ("line", "scatter")
_LONGEST = 200  # characters of what is said again with each bar
# What a program may have made up: of the wrong kind, too large, or too deep.
_WRONG = (KeyError, TypeError, ValueError, ArithmeticError, RecursionError)


class Axis(msgspec.Struct):
    label: str = ""
    scale: str = "linear"
    ticks: list[Any] = []
    tick_labels: list[str] = []


class Chart(msgspec.Struct):
    type: str = "unknown"
    title: str = ""
    x: Axis = msgspec.field(default_factory=Axis)
    y: Axis = msgspec.field(default_factory=Axis)
    series: list[dict[str, Any]] = []
    charts: list[Chart] = []


class Table(msgspec.Struct):
    columns: list[str] = []
    rows: list[list[Any]] = []


def chart(raw: msgspec.Raw) -> msgspec.Raw | None:
    """As JSON. None: a program has made up something that is no chart."""
    try:
        return msgspec.Raw(msgspec.json.encode(_chart(msgspec.json.decode(raw, type=Chart))))
    except _WRONG:
        return None


def data(raw: msgspec.Raw) -> msgspec.Raw | None:
    """As `DataFrame.to_dict("list")`. None: as above."""
    try:
        return msgspec.Raw(msgspec.json.encode(_data(msgspec.json.decode(raw, type=Table))))
    except _WRONG:
        return None


def _data(table: Table) -> dict[str, list[Any]]:
    columns = [list(column) for column in zip(*table.rows, strict=False)] or [
        [] for _ in table.columns
    ]
    return dict(zip(table.columns, columns, strict=False))


def _chart(found: Chart) -> dict[str, Any]:
    if found.type == "several":
        elements = [_chart(each) for each in found.charts]
        return {"type": "superchart", "title": found.title, "elements": elements}
    kind = {"box": "box_and_whisker"}.get(found.type, found.type)
    body: dict[str, Any] = {"type": kind, "title": found.title or None}
    if kind not in ("pie", "unknown"):
        axes = (found.x, found.y)
        if any(each.get("horizontal") for each in found.series):
            axes = (found.y, found.x)
        for name, axis in zip("xy", axes, strict=True):
            body |= _axis(name, axis, points=kind in _POINTS)
    made = _ELEMENTS.get(kind)
    series = enumerate(found.series)
    body["elements"] = [] if made is None else [e for n, each in series for e in made(each, n)]
    return body


def _axis(name: str, axis: Axis, *, points: bool) -> dict[str, Any]:
    unit = _UNIT.search(axis.label)
    told = {f"{name}_label": axis.label or None, f"{name}_unit": unit and (unit[1] or unit[2])}
    if not points:
        return told
    ticks = [_number(each) for each in axis.ticks]
    scale = {f"{name}_tick_labels": axis.tick_labels, f"{name}_scale": axis.scale}
    return {**told, f"{name}_ticks": ticks, **scale}


def _number(value: Any) -> Any:
    """As E2B's, which are never whole; what is no number is as it is."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _share(value: Any) -> float:
    """Raises TypeError: a list or a text is multiplied, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _points(series: dict[str, Any], n: int) -> list[dict[str, Any]]:
    pairs = zip(series["x"], series["y"], strict=False)
    points = [[_number(x), _number(y)] for x, y in pairs]
    return [{"label": series["label"] or f"Line {n}", "points": points}]


def _dots(series: dict[str, Any], n: int) -> list[dict[str, Any]]:
    (made,) = _points(series, n)
    return [{**made, "label": series["label"]}]


def _bars(series: dict[str, Any], n: int) -> list[dict[str, Any]]:
    label = series["label"]
    if not isinstance(label, str):
        raise TypeError
    group = label[:_LONGEST] or f"Group {n}"
    pairs = zip(series["x"], series["y"], strict=False)
    return [{"label": str(x), "group": group, "value": _number(y)} for x, y in pairs]


def _slices(series: dict[str, Any], n: int) -> list[dict[str, Any]]:
    angle = round(_share(series["value"]) * 360, 9)
    return [{"label": series["label"], "angle": angle, "radius": 1.0}]


def _boxes(series: dict[str, Any], n: int) -> list[dict[str, Any]]:
    return [
        {
            "label": series["label"],
            "min": _number(series["low"]),
            "first_quartile": _number(series["q1"]),
            "median": _number(series["median"]),
            "third_quartile": _number(series["q3"]),
            "max": _number(series["high"]),
            "outliers": [_number(each) for each in series["outliers"]],
        }
    ]


_ELEMENTS: dict[str, Callable[[dict[str, Any], int], list[dict[str, Any]]]] = {
    "line": _points,
    "scatter": _dots,
    "bar": _bars,
    "pie": _slices,
    "box_and_whisker": _boxes,
}
