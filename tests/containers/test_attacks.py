"""The attempts of tests/escape, made in containers, at the level that a server there claims.

They run inside, as they are: the container is their host, with its processes, files and services
as victims, and with the user who runs the server.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.containers.ways import AT, WAYS, Way, output, places, started
from tests.support.components import COMPONENTS
from tests.support.engine import EngineApi
from tests.support.images import Images

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(200)]

MODULES = ("test_attempts", "test_other_sandboxes", "test_agent", "test_terminals")
# What the tests ask for, whatever the container lacks of it.
THERE = ("root", "landlock", "x86-64")
# It looks for a process by its environment, which root in a container may not read of others.
BLIND = {"landlock-root": "share_no_uid"}
LEAST = 150  # attempts in each


@pytest.mark.needs("landlock")
@pytest.mark.parametrize("way", [pytest.param(w, id=w.name) for w in WAYS if w.attacked])
def test_no_attempt_gets_out(
    way: Way, engine: EngineApi, images: Images, capsule_for_all: tuple[str, list[str]]
) -> None:
    missing = {name: "" if name in THERE else "not in the container" for name in COMPONENTS}
    chosen = way.attacked
    if way.attacked in BLIND:
        chosen += f" and not {BLIND[way.attacked]}"
    paths = " ".join(f"tests/escape/{module}.py" for module in MODULES)
    pytest_ = f"python3 -m pytest -q -n 2 -p no:cacheprovider -k '{chosen}' {paths}"
    command = ("sh", "-c", f"cd {AT} && {pytest_}; echo; echo ended: $?")
    env = {"CAPSULE_TEST_COMPONENTS": json.dumps(missing)}
    binds = places(capsule_for_all[1])
    with started(engine, images.python, binds, way.options, *command, **env) as made:
        said = output(engine, made, within=180)
    assert said.endswith("ended: 0\n"), said[-6000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) >= LEAST, said[-2000:]
