"""In each kind of container `doctor` says what a server there does, and so does its advice."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from capsule.model import Isolation
from tests.containers.table import PAGE, row
from tests.containers.ways import BY_NAME, LANDLOCK, NAMESPACES, WAYS, Way, places, report
from tests.support import component_missing
from tests.support.engine import EngineApi, EngineError
from tests.support.images import Images

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(120)]

Report = dict[str, Any]
CANNOT_START = "operation not permitted"  # the Engine itself lacks what --privileged gives


Look = Callable[..., Report]


def look(options: str, *only: str, engine: EngineApi, image: str, folders: list[str]) -> Report:
    if sys.version_info[:2] != (3, 11):
        component_missing("the images have Python 3.11, whose packages are used in containers")
    try:
        return report(engine, image, places(folders), options, *only)
    except EngineError as error:
        if "--privileged" in options and CANNOT_START in str(error).lower():
            pytest.skip(f"the Engine cannot start it: {error}")
        raise


@pytest.fixture
def inside(engine: EngineApi, images: Images, capsule_for_all: tuple[str, list[str]]) -> Look:
    """What is found in a container with these options."""
    return partial(look, engine=engine, image=images.python, folders=capsule_for_all[1])


def local(found: Report) -> Report:
    assert "failed" not in found["doctor"], found["doctor"]["failed"]
    answer: Report = next(p for p in found["doctor"]["providers"] if p["provider"] == "local")
    return answer


def marks(way: Way) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs(way.needs)] if way.needs else []


@pytest.mark.needs("landlock")
@pytest.mark.parametrize("way", [pytest.param(way, id=way.name, marks=marks(way)) for way in WAYS])
def test_doctor_says_what_a_create_does(way: Way, inside: Look) -> None:
    found = inside(way.options)
    promised = local(found)
    done = found["serve"]
    shown = json.dumps(promised)
    assert promised.get("isolation", "none") == way.level, shown
    assert found["serve"]["left"] == [], done
    if way.level is Isolation.NONE:
        assert not promised["usable"]
        assert not done["listens"]
        assert way.refused in shown and way.refused in done["said"], (shown, done["said"])
        return
    assert promised["usable"], shown
    assert done["listens"], done["said"]
    used = done["used"]
    assert used["isolation"] == way.level
    assert used["said"] == "42"
    assert f"isolation: {way.level}" in done["said"]
    assert used["unenforced"] == [each["what"] for each in promised["unenforced"]]
    ranges = next(each for each in promised["findings"] if each["name"] == "uid ranges")
    assert ranges["ok"] == way.alone, shown
    assert used["timeout"] | {"ms": 0} == {"reason": "timed_out", "ms": 0, "left": []}
    assert used["timeout"]["ms"] < 3000
    assert used["delete"] == {"running": True, "left": []}
    assert done["exit"] == 0, done["said"]
    assert f"\n{row(way, found)}\n" in PAGE.read_text(), "python -m tests.containers.table"


def test_it_names_the_container_and_its_limits(inside: Look) -> None:
    found = local(inside(BY_NAME["limits"].options, "doctor"))
    said = next(each for each in found["findings"] if each["name"] == "surroundings")
    assert said["detail"] == "Docker: 512 MiB of memory, 1 CPU, 256 processes"


def test_an_error_names_the_containers_limit_of_processes(inside: Look) -> None:
    told = inside("--pids-limit 100", "crowd")["serve"]["used"]["refused"]
    assert told.startswith("CapacityError"), told
    assert "of the 100 processes that it may have" in told
    assert "docker run --pids-limit" in told


WEAK = ("root", "user", "user-without-capabilities", "root-unfiltered", "user-unfiltered",
        "profile-masked", "admin")  # fmt: skip


@pytest.mark.parametrize("way", [BY_NAME[name] for name in WEAK], ids=WEAK)
def test_the_options_that_it_prints_give_namespaces(way: Way, inside: Look) -> None:
    assert way.level is LANDLOCK
    found = local(inside(way.options, "doctor"))
    level = next(each for each in found["findings"] if each["name"] == "level namespaces")
    advice = re.fullmatch(r"docker run (.*) …", level["fix"])
    assert advice, level
    options = way.options
    if "seccomp=" in advice[1]:  # it takes the place of another one, as somebody would edit it
        options = re.sub(r"--security-opt seccomp=[^ ]+", "", options)
    better = local(inside(f"{options} {advice[1]}", "doctor"))
    assert better["usable"] and better["isolation"] == NAMESPACES, better
