"""The table of docs/limits.md that says which limits hold where, from a run of test_systemd.py.

`python -m tests.vm.machines` writes it into the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support import ROOT

PAGE = ROOT / "docs" / "limits.md"
ROWS = ROOT / ".cache" / "vm" / "systemd" / "rows.json"
BEGIN, END = "<!-- made by python -m tests.vm.machines -->\n", "<!-- end -->\n"
WORDS = {True: "holds", False: "**does not**"}
COLUMNS = ("memory", "cpus", "processes", "disk")


def table(machine: str, rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [f"{machine}:", "", f"| started by | in | {' | '.join(f'`{c}`' for c in COLUMNS)} |"]
    lines.append("|---|---|" + "---|" * len(COLUMNS))
    for row in sorted(rows, key=lambda row: (row["user"] == "root", row["user"], row["way"])):
        user = "root" if row["user"] == "root" else "an ordinary user"
        cells = [WORDS.get(row["held"][column], row["held"][column]) for column in COLUMNS]
        lines.append(f"| {user} | {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, machine: str, rows: Iterable[Mapping[str, Any]]) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(machine, rows)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), **json.loads(ROWS.read_text())))
