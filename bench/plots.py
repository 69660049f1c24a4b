"""The plots: medians, distributions, and what happens when there is more of it. SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.report import GROUPS, OURS
from bench.stats import Measure

STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#1f2328;"
    "font-size:13px}.small{font-size:11px}.grid{stroke:#d8dee4;stroke-width:1}"
    ".ours{fill:#2da44e}.other{fill:#afb8c1}.line{fill:none;stroke-width:2}"
)
GREENS = ("#1a7f37", "#6fbf73", "#0f766e", "#a3b818", "#2dd4bf", "#4d6b1f")
OTHERS = ("#0969da", "#bc4c00", "#8250df", "#57606a", "#bf3989")
SERIES = ("#1a7f37", "#0969da", "#bc4c00", "#8250df")
DISTRIBUTIONS = (
    *("create", "warm", "reset", "exec", "context", "delete", "one-shot"),
    *("create on runc", "reset on runc", "exec on runc"),
)
WIDTH, LEGEND = 440, 16


class Axis:
    """From values to pixels, logarithmic or not, with its ticks."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        *,
        log: bool,
        ticks: Sequence[float] = (),
    ) -> None:
        self._low, self._high, self._start, self._end, self._log = low, high, start, end, log
        self._ticks = ticks

    def __call__(self, value: float) -> float:
        value = min(max(value, self._low), self._high)
        if self._log:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> Sequence[float]:
        if self._ticks:
            return self._ticks
        if not self._log:
            step = nice(self._high / 4)
            return [n * step for n in range(int(self._high / step + 1e-9) + 1)]
        first, last = math.ceil(math.log10(self._low)), math.floor(math.log10(self._high))
        return [10.0**power for power in range(first, last + 1)]


def nice(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999)


def around(values: Sequence[float]) -> tuple[float, float]:
    """The decades that hold them."""
    low, high = min(values), max(values)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high * 1.0001))


def line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="line" stroke="{colour}"/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def text(x: float, y: float, what: str, *, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(what)}</text>'
    )


def frame(x: Axis, y: Axis, box: tuple[float, float, float, float], units: tuple[str, str]) -> str:
    """Grid, ticks and units of a panel; `box` is left, top, right, bottom."""
    left, top, right, bottom = box
    parts = []
    for tick in x.ticks():
        at = x(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        parts.append(text(at, bottom + 15, f"{tick:,g}", anchor="middle", kind="small"))
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        label = f"{tick:.0%}" if units[1] == "%" else f"{tick:,g}"
        parts.append(text(left - 6, at + 4, label, anchor="end", kind="small"))
    parts.append(text(right, bottom + 30, units[0], anchor="end", kind="small"))
    if units[1] != "%":
        parts.append(text(left - 34, top - 8, units[1], kind="small"))
    return "".join(parts)


def legend(x: float, y: float, rows: Sequence[tuple[str, str]]) -> str:
    parts = []
    for number, (colour, name) in enumerate(rows):
        at = y + number * LEGEND
        parts.append(
            f'<line x1="{x}" x2="{x + 16}" y1="{at - 4}" y2="{at - 4}" stroke="{colour}"'
            ' stroke-width="3"/>'
        )
        parts.append(text(x + 22, at, name, kind="small"))
    return "".join(parts)


def page(path: Path, panels: Sequence[tuple[str, float]], title: str) -> None:
    """Panels in two columns, each with its height; a row is as high as its highest."""
    columns = 2
    parts, y = [text(10, 24, title)], 44.0
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for number, (body, _) in enumerate(row):
            parts.append(
                f'<g transform="translate({10 + number * (WIDTH + 20)},{y:.0f})">{body}</g>'
            )
        y += max(height for _, height in row) + 14
    write(path, 20 + columns * (WIDTH + 20) - 20, y, "".join(parts))


def write(path: Path, width: float, height: float, body: str) -> None:
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n',
        encoding="utf-8",
    )


def colours(members: Sequence[Measure]) -> list[str]:
    ours, others = iter(GREENS * 3), iter(OTHERS * 3)
    return [next(ours if m.name.startswith(OURS) else others) for m in members]


def distributions(path: Path, measures: Sequence[Measure]) -> None:
    """Per operation, which share of the samples took at most so long."""
    shown = [
        m
        for m in measures
        if m.group in DISTRIBUTIONS and len(m.samples) > 2 and "at once" not in m.name
    ]
    if not shown:
        return
    low, high = around([value for m in shown for value in (m.percentile(0.01), m.p99)])
    panels = [
        distribution(group, members, low, high)
        for group in DISTRIBUTIONS
        if (members := [m for m in shown if m.group == group])
    ]
    page(
        path,
        panels,
        "Share of the samples that took at most so long, per operation. Dots: medians.",
    )


def distribution(
    group: str, members: Sequence[Measure], low: float, high: float
) -> tuple[str, float]:
    left, top, right, bottom = 44.0, 30.0, WIDTH - 10.0, 160.0
    x, y = Axis(low, high, left, right, log=True), Axis(0, 1, bottom, top, log=False)
    parts = [text(0, 14, group, kind="title")]
    parts.append(frame(x, y, (left, top, right, bottom), ("ms", "%")))
    tints = colours(members)
    for measure, tint in reversed(list(zip(members, tints, strict=True))):
        ordered = sorted(measure.samples)
        points = []
        for number, value in enumerate(ordered):
            points.append((x(value), y(number / len(ordered))))
            points.append((x(value), y((number + 1) / len(ordered))))
        parts += [line(points, tint), dot(x(measure.p50), y(0.5), tint)]
    names = [f"{m.name} · {m.p50:.2f} ms" for m in members]
    parts.append(legend(left, bottom + 44, list(zip(tints, names, strict=True))))
    return "".join(parts), bottom + 44 + LEGEND * len(members)


def scaling(path: Path, measures: Sequence[Measure]) -> None:
    """Cost against live sandboxes and layers, rates against clients and time."""
    groups = {
        group: [m for m in measures if m.group == group and m.series and m.samples]
        for group in ("growth", "rate", "snapshot")
    }
    panels = []
    if groups["growth"]:
        panels.append(curves("cost of an operation", groups["growth"], "sandboxes alive", "ms"))
    if groups["rate"]:
        panels.append(curves("execs of `true`", groups["rate"], "clients", "per second"))
    if groups["snapshot"]:
        panels.append(curves("snapshots and forks", groups["snapshot"], "MiB written", "ms"))
    steady = [m for m in measures if m.unit == "1/s" and len(m.samples) > 1]
    panels += [over_time(m) for m in steady]
    if panels:
        page(path, panels, "What it costs when there is more. Bands: 10th to 90th percentile.")


def curves(title: str, points: Sequence[Measure], below: str, beside: str) -> tuple[str, float]:
    """A line per series through the medians; a band from the 10th to the 90th percentile."""
    left, top, right, bottom = 44.0, 44.0, WIDTH - 10.0, 220.0
    names = list(dict.fromkeys(m.series for m in points))
    places = sorted({m.at for m in points})
    ends = (places[0], max(places[-1], places[0] * 2))
    x = Axis(*ends, left + 8, right - 14, log=True, ticks=places)
    y = Axis(*heights(points, beside), bottom, top, log=beside == "ms")
    parts = [text(0, 14, title, kind="title")]
    parts.append(frame(x, y, (left, top, right, bottom), (below, beside)))
    for name, tint in zip(names, SERIES * 2, strict=False):
        members = sorted((m for m in points if m.series == name), key=lambda m: m.at)
        upper = [(x(m.at), y(m.percentile(0.9))) for m in members]
        lower = [(x(m.at), y(m.percentile(0.1))) for m in members]
        band = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*upper, *reversed(lower)])
        parts.append(f'<polygon points="{band}" fill="{tint}" opacity="0.12"/>')
        middle = [(x(m.at), y(m.p50)) for m in members]
        parts += [line(middle, tint), *(dot(a, b, tint) for a, b in middle)]
    parts.append(legend(left, bottom + 44, list(zip(SERIES, names, strict=False))))
    return "".join(parts), bottom + 44 + LEGEND * len(names)


def heights(points: Sequence[Measure], unit: str) -> tuple[float, float]:
    if unit == "ms":
        return around([v for m in points for v in (m.percentile(0.1), m.percentile(0.9))])
    return 0.0, max(m.p50 for m in points) * 1.15


def over_time(measure: Measure) -> tuple[str, float]:
    left, top, right, bottom = 44.0, 44.0, WIDTH - 10.0, 220.0
    x = Axis(0, len(measure.samples), left, right, log=False)
    y = Axis(0, max(measure.samples) * 1.15, bottom, top, log=False)
    parts = [text(0, 14, "creates, sustained", kind="title")]
    parts.append(frame(x, y, (left, top, right, bottom), ("seconds", "per second")))
    points = [(x(second + 0.5), y(value)) for second, value in enumerate(measure.samples)]
    parts += [line(points, SERIES[0]), *(dot(a, b, SERIES[0]) for a, b in points)]
    told = f"create, and as many deletes · median {measure.p50:.0f} per second"
    parts.append(legend(left, bottom + 44, [(SERIES[0], told)]))
    return "".join(parts), bottom + 44 + LEGEND


def medians(path: Path, measures: Sequence[Measure]) -> None:
    """Horizontal bars on a logarithmic axis, one block per group."""
    shown = [m for m in measures if m.samples and m.unit == "ms" and not m.series]
    if not shown:
        return
    left = 24 + round(6.4 * max(len(m.name) for m in shown))  # as wide as the longest name
    right, step = left + 420, 20
    low, high = around([m.p50 for m in shown])
    x = Axis(low, high, left, right, log=True)
    parts: list[str] = []
    y = 34
    for group in GROUPS:
        members = [m for m in shown if m.group == group]
        if members:
            parts.append(text(8, y + 14, group, kind="title"))
            y += step
        for m in members:
            length = max(2.0, x(m.p50) - left)
            kind = "ours" if m.name.startswith(OURS) else "other"
            parts.append(text(left - 8, y + 13, m.name, anchor="end"))
            parts.append(
                f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="13" rx="2"'
                f' class="{kind}"/>'
            )
            parts.append(text(left + length + 6, y + 13, f"{m.p50:.2f} ms"))
            y += step
    axis = [
        f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="28" y2="{y}" class="grid"/>'
        + text(x(tick), 20, f"{tick:,g} ms", anchor="middle", kind="small")
        for tick in x.ticks()
    ]
    write(path, right + 100, y + 12, "".join([*axis, *parts]))
