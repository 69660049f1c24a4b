"""What the kernel says of a box's cgroups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def read_values(dirs: Iterable[Path]) -> dict[str, str]:
    """Every setting that is one short line. Blocks."""
    values: dict[str, str] = {}
    for at in dirs:
        for file in at.iterdir():
            try:
                text = file.read_text().strip()
            except OSError:
                continue
            if "\n" not in text:
                values[file.name] = text
    return values
