"""What came out: a table for people, JSON for machines, a plot for the documents."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from bench.stats import Measure

RUNTIMES = ("runc", "runsc")
GROUPS = (
    *("create", "warm", "exec", "run", "delete", "one-shot", "scale"),
    *(f"{what} on {runtime}" for runtime in RUNTIMES for what in ("create", "exec", "delete")),
)
OURS = "Capsule"


def baseline(measures: Sequence[Measure], group: str) -> Measure | None:
    """The group's first Capsule measure with samples: what the others are compared with."""
    ours = (m for m in measures if m.group == group and m.name.startswith(OURS) and m.samples)
    return next(ours, None)


def ratio(measure: Measure, base: Measure | None) -> str:
    if base is None or measure is base or measure.unit != base.unit or not measure.samples:
        return ""
    share = measure.p50 / base.p50
    return f"{share:.0f}×" if share >= 10 else f"{share:.2g}×"


def verdict(measure: Measure) -> str:
    if measure.bound is not None and measure.samples and measure.bound[0].samples:
        rival, factor = measure.bound
        met = measure.p50 <= factor * rival.p50
        return f"{'met' if met else 'MISSED'} ({factor:.2g}× the Engine's)"
    if measure.target is None or not measure.samples:
        return ""
    met = (
        measure.p50 <= measure.target if measure.unit != "count" else measure.p50 >= measure.target
    )
    return f"{'met' if met else 'MISSED'} ({measure.target:g})"


def table(measures: Sequence[Measure]) -> str:
    rows: list[tuple[str, ...]] = [("what", "p50", "p99", "unit", "n", "target", "× Capsule", "")]
    for group in GROUPS:
        members = [measure for measure in measures if measure.group == group]
        base = baseline(measures, group)
        if members:
            rows.append((f"— {group}", *[""] * 7))
        for m in members:
            if not m.samples:
                rows.append((m.name, "–", "–", "", "", "", "", f"not here: {m.missing}"))
                continue
            n = len(m.samples)
            numbers = (f"{m.p50:.2f}", f"{m.p99:.2f}" if n > 1 else "", m.unit, str(n))
            rows.append((m.name, *numbers, verdict(m), ratio(m, base), m.note))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    lines = []
    for row in rows:
        name, *rest = row[:7]
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells, row[7]]).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, object]:
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": total,
        "python": platform.python_version(),
        "root": os.getuid() == 0,
    }


def conditions(load: float) -> str:
    """Where and when: numbers mean nothing without it."""
    here = machine()
    cpus, gib = here["cpus"], int(str(here["memory_bytes"])) / (1 << 30)
    told = (
        f"{cpus} CPUs, {gib:.0f} GiB, Linux {here['kernel']}, {'root' if here['root'] else 'user'}"
    )
    busy = load > 0.5 * (os.cpu_count() or 1)
    warning = "; others are working on this machine, measure again when it is quiet" if busy else ""
    return f"{told}; load average at the start {load:.1f}{warning}"


def write_json(path: Path, measures: Sequence[Measure], load: float) -> None:
    body = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**machine(), "load_at_start": load},
        "measures": [measure.to_json() for measure in measures],
    }
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def log_scale(low: float, high: float, width: float) -> Callable[[float], float]:
    decades = math.log10(high / low)
    return lambda value: max(2.0, math.log10(max(value, low) / low) / decades * width)


def write_plot(path: Path, measures: Sequence[Measure]) -> None:
    """Horizontal bars of the medians on a logarithmic axis, one block per group."""
    shown = [m for m in measures if m.samples and m.unit == "ms"]
    top = max((m.p50 for m in shown), default=1.0)
    decades = [tick for tick in (0.1, 1, 10, 100, 1000, 10_000) if tick / 10 < top]
    left, width, line = 300, 420, 22
    scale = log_scale(0.1, decades[-1], width)
    parts: list[str] = []
    y = 34
    for group in GROUPS:
        members = [m for m in shown if m.group == group]
        if not members:
            continue
        parts.append(f'<text x="8" y="{y + 14}" class="group">{group}</text>')
        y += line
        for m in members:
            length = scale(m.p50)
            kind = "ours" if m.name.startswith(OURS) else "other"
            parts += [
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(m.name)}</text>',
                f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="14" class="{kind}"/>',
                f'<text x="{left + length + 6:.1f}" y="{y + 14}">{m.p50:.2f} ms</text>',
            ]
            y += line
    axis = [
        f'<line x1="{left + scale(tick):.1f}" x2="{left + scale(tick):.1f}" y1="30"'
        f' y2="{y}" class="grid"/><text x="{left + scale(tick):.1f}" y="22"'
        f' text-anchor="middle">{tick:g} ms</text>'
        for tick in decades
    ]
    style = (
        "text{font:12px sans-serif;fill:#57606a}.group{font-weight:bold}"
        ".ours{fill:#2da44e}.other{fill:#8c959f}.grid{stroke:#d0d7de}"
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 100}" height="{y + 12}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(axis)}{''.join(parts)}</svg>\n",
        encoding="utf-8",
    )
