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


def test_a_program_and_a_link_to_one_are_there(usr: Path) -> None:
    (usr / "bin/tool").symlink_to("../lib/real")
    assert not is_missing(usr)
    assert not is_missing(usr, "real")


@pytest.mark.parametrize("target", ["nowhere", "../../home/bin/real", "tool", "../lib"])
def test_a_link_that_leads_a_box_to_no_program_is_missing(usr: Path, target: str) -> None:
    (usr / "bin/tool").symlink_to(target)
    assert is_missing(usr)


def test_what_cannot_be_executed_is_no_program(usr: Path) -> None:
    (usr / "bin/tool").write_text("text")
    assert is_missing(usr)


def test_a_place_that_boxes_do_not_see_hides_none_that_they_do(usr: Path) -> None:
    assert is_missing(usr, "real", path="home/bin")
    assert not is_missing(usr, "real", path="home/bin:usr/bin")
