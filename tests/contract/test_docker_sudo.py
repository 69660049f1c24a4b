"""`sudo` in containers: as in a local box; under gVisor it says why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.service import CreateRequest, ExecCall
from tests.contract.conftest import folder as make_folder
from tests.contract.test_docker_state import Kind, backend_of
from tests.support import backends
from tests.support.backends import CATALOG
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.unit import test_sudo_real
from tests.unit.test_service_real import serving
from tests.unit.test_users_real import Sandbox, base

__all__ = ["base"]

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def folder_of(kind: Kind, engine: EngineApi, image: str, agent: Path) -> Iterator[Path]:
    made = backend_of(kind, engine, image, agent)
    sudo = {name: replace(CATALOG[name], image=image) for name in ("base", "python")}
    with make_folder() as path:
        backends.register(path, replace(made, catalog=sudo))
        yield path


@pytest.fixture
def folder(engine: EngineApi, images: Images, agent_binary: Path) -> Iterator[Path]:
    yield from folder_of(Kind("runc", "socket", "loop"), engine, images.python, agent_binary)


@pytest.fixture
def gvisor(runsc: object, engine: EngineApi, images: Images, agent_binary: Path) -> Iterator[Path]:
    yield from folder_of(Kind("runsc", "socket", "loop"), engine, images.python, agent_binary)


globals().update(
    (name, value) for name, value in vars(test_sudo_real).items() if name.startswith("test_")
)
del globals()["test_a_template_without_it_says_so"]  # a container has no `sudo` of ours then


async def test_so_many_that_left_something_are_too_many(base: Sandbox) -> None:
    script = "until ! sudo sh -c 'sleep 9876 >/dev/null 2>&1 &'; do i=$((i + 1)); done; echo $i"
    done = await base.service.exec(base.id, ExecCall(("bash", "-c", script), timeout=15))
    assert b"have left programs running" in done.stderr
    assert 128 <= int(done.stdout) <= 130, "what has just ended is counted a moment later"
    await base.service.files(base.id).write("still", b"there is room for this")
    await base.service.kill(base.id, done.id)
    assert await base.sh("sudo id -u") == "0\n"


async def test_gvisor_has_no_root_and_sudo_says_so(gvisor: Path) -> None:
    async with serving(gvisor) as service:
        made = await service.create(CreateRequest(template="base"))
        for words in (("-n", "id"), ("-v",), ("-l",)):
            done = await service.exec(made.id, ExecCall(("sudo", *words)))
            assert (done.exit.exit_code, done.stdout) == (1, b"")
            assert done.stderr.startswith(b"sudo: no program is root under gVisor")
