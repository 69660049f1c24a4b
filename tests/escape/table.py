"""The table of attempts in README.md. `python -m tests.escape.table` writes it anew."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.escape.attempt import ALONE, CELLS, LOCAL, PEER, RELAYED, ROOT, ROWS, WITH_ROOT, Row

README = Path(__file__).with_name("README.md")
START = "<!-- table -->\n"
PROOFS = {PEER: "as a user", ALONE: "as a user", ROOT: "as root"}


def rows() -> list[Row]:
    """In the order of the modules' names, and of the attempts in each."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.escape.{path.stem}")
    seen: dict[tuple[str, str], Row] = {(row.module, row.name): row for row in ROWS}
    return sorted(seen.values(), key=lambda row: row.module)


def tried_by_root() -> tuple[int, dict[str, str]]:
    """How many attempts root inside makes once more, and those that have no meaning then."""
    module = importlib.import_module("tests.escape.test_root")
    return len(module.AGAIN), module.GRANTED


def table(found: list[Row]) -> str:
    only = sum(not set(LOCAL) & set(row.cells) for row in found)
    rooted = sum(set(row.cells) == set(WITH_ROOT) for row in found)
    relayed = sum(set(RELAYED) <= set(row.cells) for row in found)
    again, granted = tried_by_root()
    lines = [
        f"{len(found)} attempts in {len(CELLS)} kinds of sandboxes; {only} of them in containers "
        f"alone, {relayed} of them\nalso in containers that are reached through a relay;"
        f" {rooted} by "
        "programs that are root inside, in the three kinds\nthat have such, where they make "
        f"{again} of the others as well.\n"
    ]
    for module in dict.fromkeys(row.module for row in found):
        title = module.replace("_", " ").capitalize()
        lines += [f"## {title}\n", "| attempt | what it tries | works outside |", "|---|---|---|"]
        lines += [_line(row) for row in found if row.module == module]
        lines.append("")
    lines += ["## What is known to work\n", *_reasons(found, "stands"), ""]
    lines += ["## What may end the whole sandbox\n", *_reasons(found, "fatal"), ""]
    lines += ["## What has no meaning\n", *_reasons(found, "moot")]
    lines += [f"| root inside | {name} | {reason} |" for name, reason in granted.items()]
    return "\n".join(lines) + "\n"


def _reasons(found: list[Row], which: str) -> list[str]:
    return ["| where | attempt | why |", "|---|---|---|"] + [
        f"| {cell} | {row.name} | {reason} |"
        for cell in (*CELLS, *RELAYED)
        for row in found
        for where, reason in getattr(row, which)
        if where == cell
    ]


def _line(row: Row) -> str:
    return f"| `{row.name}` | {row.what} | {PROOFS.get(row.proof, f'not tried: {row.proof}')} |"


if __name__ == "__main__":
    head = README.read_text("utf-8").partition(START)[0]
    README.write_text(head + START + table(rows()), "utf-8")
