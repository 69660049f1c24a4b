"""What came out: tables for people, JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench import e2b, targets
from bench.stats import Measure

RUNTIMES = ("runc", "runsc")
OPERATIONS = ("create", "reset", "exec", "run", "delete")
GROUPS = (
    *("create", "warm", "reset", "exec", "run", "context", "delete", "one-shot"),
    e2b.GROUP,
    *("snapshot", "steps", "scale"),
    *("growth", "rate", "transfer up", "transfer down", e2b.TRANSFER),
    *(f"{what} on {runtime}" for runtime in RUNTIMES for what in OPERATIONS),
    "exec on runsc, all cores",
    "exec on runsc, all cores, static binary",
)
OURS = "Capsule"


def baseline(measures: Sequence[Measure], group: str) -> Measure | None:
    """The group's first Capsule measure with samples: what the others are compared with."""
    ours = (m for m in measures if m.group == group and m.name.startswith(OURS) and m.samples)
    return next(ours, None)


def ratio(measure: Measure, base: Measure | None) -> str:
    if base is None or measure is base or measure.unit != base.unit or not measure.samples:
        return ""
    if measure.series != base.series or measure.group in ("scale", e2b.GROUP):
        return ""  # another thing, not another way to do the same
    share = measure.p50 / base.p50
    return f"{share:.0f}×" if share >= 10 else f"{share:.2g}×"


def verdict(measure: Measure, slower: float = 1.0) -> str:
    """`slower`: by how much this machine is; what a time may be grows with it."""
    if measure.bound is not None and measure.samples and measure.bound[0].samples:
        rival, factor = measure.bound
        met = measure.p50 <= factor * rival.p50
        own = rival.name.startswith(OURS)
        whose = rival.name.partition(": ")[2] if own else "the Engine's"
        return f"{'met' if met else 'MISSED'} ({factor:.2g}× {whose})"
    if measure.target is None or not measure.samples:
        return ""
    if measure.unit == "count":
        met = measure.p50 >= measure.target
    else:
        met = measure.p50 <= measure.target * (slower if measure.unit == "ms" else 1.0)
    grown = f" × {slower:.2f}" if measure.unit == "ms" and slower > 1 else ""
    return f"{'met' if met else 'MISSED'} ({measure.target:g}{grown})"


def table(measures: Sequence[Measure]) -> str:
    rows: list[tuple[str, ...]] = [("what", "p50", "p99", "unit", "n", "target", "× Capsule", "")]
    slower = targets.factor(measures)
    for group in GROUPS:
        members = [measure for measure in measures if measure.group == group]
        base = baseline(measures, group)
        if members:
            rows.append((f"— {group}", *[""] * 7))
        for m in members:
            if not m.samples:
                rows.append(
                    (m.name, "–", "–", "", "", "", "", f"not here: {m.missing or 'no sample'}")
                )
                continue
            n = len(m.samples)
            numbers = (f"{m.p50:.2f}", f"{m.p99:.2f}" if n > 1 else "", m.unit, str(n))
            beside = next(o for o in members if o.series == m.series) if m.series else base
            rows.append((m.name, *numbers, verdict(m, slower), ratio(m, beside), m.note))
    return aligned(rows, right=range(1, 7))


def verdicts(measures: Sequence[Measure]) -> str:
    """The targets of DESIGN §6: as written, at this machine's speed, beside others."""
    rows: list[tuple[str, ...]] = [
        ("target of DESIGN §6, p50 in ms", "measured", "as written", "at this speed", "beside")
    ]
    rows += [(j.what, j.measured, j.written, j.here, j.beside) for j in targets.judge(measures)]
    return f"{aligned(rows, right=range(1, 4))}\n\n{targets.explanation(measures)}"


def aligned(rows: Sequence[Sequence[str]], right: range) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
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
        "slower_than_design": round(targets.factor(measures), 3),
        "targets": [asdict(judged) for judged in targets.judge(measures)],
        "measures": [measure.to_json() for measure in measures],
    }
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
