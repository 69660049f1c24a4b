"""`sudo` under gVisor says that it has no root. In other containers: tests/escape/test_sudo.py."""

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
from tests.unit.test_service_real import serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def gvisor(runsc: object, engine: EngineApi, images: Images, agent_binary: Path) -> Iterator[Path]:
    kind = Kind("runsc", "socket", "loop")
    made = backend_of(kind, engine, images.python, agent_binary)
    with make_folder() as path:
        template = replace(CATALOG["base"], image=images.python)
        backends.register(path, replace(made, catalog={"base": template}))
        yield path


async def test_gvisor_has_no_root_and_sudo_says_so(gvisor: Path) -> None:
    async with serving(gvisor) as service:
        made = await service.create(CreateRequest(template="base"))
        for words in (("-n", "id"), ("-v",), ("-l",)):
            done = await service.exec(made.id, ExecCall(("sudo", *words)))
            assert (done.exit.exit_code, done.stdout) == (1, b"")
            assert done.stderr.startswith(b"sudo: no program is root under gVisor")
