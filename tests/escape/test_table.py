"""README.md lists the attempts as they are."""

from __future__ import annotations

from tests.escape.table import README, START, rows, table


def test_the_table_is_current() -> None:
    written = README.read_text("utf-8").partition(START)[2]
    assert written == table(rows()), "write it anew: python -m tests.escape.table"


def test_names_are_unique_within_a_module_and_cells_exist() -> None:
    found = rows()
    assert len(found) >= 70
    for row in found:
        assert {where for where, _ in row.stands + row.fatal + row.moot} <= set(row.cells)
