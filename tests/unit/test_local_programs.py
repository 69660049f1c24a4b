"""Whether a template's programs are there for a box, not only for the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.model import Template
from capsule.providers.local.programs import missing_on_host


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    """A folder that boxes see, beside one that they do not."""
    for name in ("usr/bin", "usr/lib", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        program = tmp_path / name / "real"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path / "usr"


def is_missing(usr: Path, name: str = "tool", *, path: str = "usr/bin") -> bool:
    places = ":".join(str(usr.parent / place) for place in path.split(":"))
    template = Template("t", needs=(name,), env={"PATH": places})
    return missing_on_host(template, visible=(f"{usr}/",)) == [name]


def test_programs_are_there_where_a_box_finds_them(usr: Path) -> None:
    tool = usr / "bin/tool"
    assert not is_missing(usr, "real")
    assert is_missing(usr, "real", path="home/bin")
    assert not is_missing(usr, "real", path="home/bin:usr/bin")
    tool.symlink_to("../lib/real")
    assert not is_missing(usr)
    for target in ("nowhere", "../../home/bin/real", "tool", "../lib"):
        tool.unlink()
        tool.symlink_to(target)
        assert is_missing(usr), target
    tool.unlink()
    tool.write_text("no program")
    assert is_missing(usr)
