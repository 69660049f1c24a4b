"""Charts and tables as E2B's SDKs know them, from ours (spec/kernel.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

_UNIT = re.compile(r"\(([^()]{1,50})\)\s*$")
_POINTS = ("line", "scatter")


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


def chart(raw: msgspec.Raw) -> dict[str, Any] | None:
    """None: a program has made up something that is no chart."""
    try:
        return _chart(msgspec.json.decode(raw, type=Chart))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return None


def data(raw: msgspec.Raw) -> dict[str, list[Any]] | None:
    """As `DataFrame.to_dict("list")`. None: as above."""
    try:
        table = msgspec.json.decode(raw, type=Table)
    except msgspec.MsgspecError:
        return None
    columns = [list(column) for column in zip(*table.rows, strict=False)] or [
        [] for _ in table.columns
    ]
    return dict(zip(table.columns, columns, strict=False))


def _chart(found: Chart) -> dict[str, Any]:
    if found.type == "several":
        elements = [_chart(each) for each in found.charts]
        return {"type": "superchart", "title": found.title, "elements": elements}
    kind = {"box": "box_and_whisker"}.get(found.type, found.type)
    body: dict[str, Any] = {"type": kind, "title": found.title}
    if kind != "pie":
        for name, axis in (("x", found.x), ("y", found.y)):
            unit = _UNIT.search(axis.label)
            body |= {f"{name}_label": axis.label, f"{name}_unit": unit[1] if unit else None}
            if kind in _POINTS:
                body |= {
                    f"{name}_ticks": axis.ticks,
                    f"{name}_tick_labels": axis.tick_labels,
                    f"{name}_scale": axis.scale,
                }
    made = _ELEMENTS.get(kind)
    body["elements"] = [] if made is None else [e for each in found.series for e in made(each)]
    return body


def _points(series: dict[str, Any]) -> list[dict[str, Any]]:
    points = [list(pair) for pair in zip(series["x"], series["y"], strict=False)]
    return [{"label": series["label"], "points": points}]


def _bars(series: dict[str, Any]) -> list[dict[str, Any]]:
    group = series["label"]
    pairs = zip(series["x"], series["y"], strict=False)
    return [{"label": str(x), "group": group, "value": y} for x, y in pairs]


def _slices(series: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"label": series["label"], "angle": series["value"] * 360, "radius": 1.0}]


def _boxes(series: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "label": series["label"],
            "min": series["low"],
            "first_quartile": series["q1"],
            "median": series["median"],
            "third_quartile": series["q3"],
            "max": series["high"],
            "outliers": series["outliers"],
        }
    ]


_ELEMENTS: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "line": _points,
    "scatter": _points,
    "bar": _bars,
    "pie": _slices,
    "box_and_whisker": _boxes,
}
