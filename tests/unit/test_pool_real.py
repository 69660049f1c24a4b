"""The pool over real boxes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capsule.catalog import Catalog
from capsule.config import Config
from capsule.model import Started
from capsule.providers.contract import Provider
from capsule.providers.registry import make_provider
from capsule.service import CreateRequest, ExecCall, Service
from capsule.service.context_calls import ContextRun
from tests.support import backends, eventually
from tests.unit.test_service_real import boxes, folder, serving

pytestmark = pytest.mark.real
__all__ = ["folder"]


async def filled(service: Service, count: int) -> None:
    def ready() -> bool:
        return [shelf.ready for shelf in service.pool().shelves] == [count]

    await eventually(ready, what=f"{count} boxes are ready")


async def say(service: Service, id: str, script: str) -> str:
    result = await service.exec(id, ExecCall(("bash", "-c", script)))
    return result.stdout.decode()


async def test_a_warm_sandbox_is_as_any_other(folder: Path) -> None:
    async with serving(folder, pool_min=2, pool_templates=("bash",)) as service:
        await filled(service, 2)
        warm = await service.create(CreateRequest("bash", env={"COLOUR": "blue"}))
        cold = await service.create(CreateRequest("bash", limits={"inodes": 5000}))
        assert (warm.started, cold.started) == (Started.WARM, Started.COLD)
        assert await say(service, warm.id, "echo $COLOUR") == "blue\n"
        look = "pwd; id -u; hostname; ls -A /workspace /tmp; echo hi > f; cat f"
        assert await say(service, warm.id, look) == await say(service, cold.id, look)
        await filled(service, 2)
        assert len(boxes(folder)) == 4
        await service.delete(warm.id)
        await service.delete(cold.id)
        assert len(boxes(folder)) == 2
    assert boxes(folder) == []


# Templates with an interpreter that is started before somebody asks for it


@pytest.fixture
def warm(folder: Path) -> Path:
    python = backends.CATALOG["python"]
    made = replace(python, name="warm", warm_context="python", warm_imports=("decimal",))
    catalog = Catalog.of({**backends.CATALOG, "warm": made})

    def make(config: Config) -> Provider:
        return make_provider("local", config, catalog)

    backends.register(folder, backends.Backend(make=make, catalog=catalog))
    return folder


async def ask(service: Service, id: str, code: str) -> str:
    result = await service.contexts.run(id, ContextRun(code, language="python"))
    assert result.error is None, result.error
    return str(result.results[-1].text)


async def test_an_interpreter_runs_before_somebody_asks(warm: Path) -> None:
    async with serving(warm, pool_min=1, pool_templates=("warm",)) as service:
        await filled(service, 1)
        began = time.time()
        sandbox = await service.create(CreateRequest("warm"))
        assert sandbox.started is Started.WARM
        (context,) = await service.contexts.list(sandbox.id)
        assert (context.id, context.state, context.runs) == ("default-python", "idle", 0)
        assert context.created_at.timestamp() < began
        assert await ask(service, sandbox.id, "import sys; 'decimal' in sys.modules") == "True"
        assert await ask(service, sandbox.id, "x = 1; x + 1") == "2"
        await filled(service, 1)
        await service.reset(sandbox.id)
        assert await ask(service, sandbox.id, "'x' in globals()") == "False"
        assert len(await service.execs(sandbox.id)) == 1, "the one that was ready"


@pytest.mark.parametrize(
    ("options", "code", "answer"),
    [
        ({"env": {"COLOUR": "blue"}}, "import os; os.environ['COLOUR']", "'blue'"),
        (
            {"limits": {"open_files": 77}},
            "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)",
            "(77, 77)",
        ),
    ],
    ids=["variables", "limits"],
)
async def test_other_variables_and_limits_are_the_interpreters_too(
    warm: Path, options: dict[str, Any], code: str, answer: str
) -> None:
    async with serving(warm, pool_min=1, pool_templates=("warm",)) as service:
        await filled(service, 1)
        sandbox = await service.create(CreateRequest("warm", **options))
        assert await ask(service, sandbox.id, code) == answer
