"""The pool and reset over real boxes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capsule.catalog import Catalog, load_catalog
from capsule.config import Config
from capsule.errors import GoneError, UnavailableError
from capsule.link.link import AgentLink
from capsule.model import MIB, Reason, Started
from capsule.providers.registry import make_provider
from capsule.service import CreateRequest, ExecCall, Service, warm
from capsule.service import kernel_wire as wire
from capsule.service.context_calls import ContextRun
from capsule.service.interpreters import start_ahead
from tests.support import component_missing, eventually
from tests.support.cgroups import read_values
from tests.support.folders import server_folder

pytestmark = pytest.mark.real

CATALOG = load_catalog(None)
BASH = CreateRequest(template="bash")


@pytest.fixture
def folder(agent_binary: Path) -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    with server_folder("cs-") as path:
        yield path


@asynccontextmanager
async def serving(
    folder: Path, *, catalog: Catalog = CATALOG, **settings: Any
) -> AsyncIterator[Service]:
    settings = {"drain": "delete", "pool_templates": ("bash",), **settings}
    config = Config(data_dir=folder / "d", run_dir=folder / "r", **settings)
    provider = await asyncio.to_thread(make_provider, "local", config, catalog)
    service = Service(config, {"local": provider}, catalog)
    try:
        await service.open()
    except UnavailableError as error:
        component_missing(f"no sandboxes for the pool's tests: {error.message}")
    try:
        yield service
    finally:
        await service.aclose()


def boxes(folder: Path) -> list[str]:
    return os.listdir(folder / "r" / "boxes")


async def filled(service: Service, count: int) -> None:
    def ready() -> bool:
        return [shelf.ready for shelf in service.pool().shelves] == [count]

    await eventually(ready, what=f"{count} boxes are ready")


async def say(service: Service, id: str, script: str) -> str:
    result = await service.exec(id, ExecCall(("bash", "-c", script)))
    return result.stdout.decode()


async def test_a_warm_sandbox_is_as_any_other(folder: Path) -> None:
    async with serving(folder, pool_min=2) as service:
        await filled(service, 2)
        warm = await service.create(CreateRequest(template="bash", env={"COLOUR": "blue"}))
        cold = await service.create(CreateRequest(template="bash", limits={"inodes": 5000}))
        assert (warm.started, cold.started) == (Started.WARM, Started.COLD)
        look = "echo $COLOUR; pwd; id -u; hostname; ls -A /workspace /tmp; echo hi > f; cat f"
        assert await say(service, warm.id, "echo $COLOUR") == "blue\n"
        assert (await say(service, warm.id, look)).replace("blue", "") == await say(
            service, cold.id, look
        )
        await filled(service, 2)
        assert len(boxes(folder)) == 4
        await service.delete(warm.id)
        await service.delete(cold.id)
        assert len(boxes(folder)) == 2
    assert boxes(folder) == []


async def test_a_hundred_at_once_all_get_one(folder: Path) -> None:
    async with serving(folder, pool_min=4, pool_max=8) as service:
        await filled(service, 4)

        async def one() -> Started | None:
            made = await service.create(BASH)
            assert (await service.exec(made.id, ExecCall(("true",)))).exit.exit_code == 0
            await service.delete(made.id)
            return made.started

        started = await asyncio.gather(*(one() for _ in range(100)))
        assert {Started.WARM, Started.COLD} == set(started)
        (shelf,) = service.pool().shelves
        assert shelf.hits + shelf.misses == 100
        assert shelf.hits == started.count(Started.WARM)
        assert shelf.target == 8
    assert boxes(folder) == []


async def test_reset_leaves_nothing_of_before(folder: Path) -> None:
    async with serving(folder, pool_max=1) as service:
        made = await service.create(BASH)
        before = await say(service, made.id, "readlink /proc/self/ns/mnt /proc/self/ns/pid")
        await say(service, made.id, "echo x > /workspace/a; echo y > /tmp/b; echo z > /dev/shm/c")
        live = await service.start(made.id, ExecCall(("sleep", "1000")))
        await service.exec(made.id, ExecCall(("bash", "-c", "cd /tmp; export X=1"), session="main"))
        again = await service.reset(made.id)
        assert again.id == made.id
        with pytest.raises(GoneError, match="was reset during the call"):
            await live.__anext__()
        await live.aclose()
        assert await say(service, made.id, "find /workspace /tmp /dev/shm -mindepth 1") == ""
        assert "sleep" not in await say(service, made.id, "cat /proc/[0-9]*/comm")
        after = await say(service, made.id, "readlink /proc/self/ns/mnt /proc/self/ns/pid")
        assert not set(before.split()) & set(after.split())
        place = await service.exec(
            made.id, ExecCall(("bash", "-c", "pwd; echo [$X]"), session="main")
        )
        assert place.stdout == b"/workspace\n[]\n"
        await filled(service, 1)
        assert (await service.reset(made.id)).started is Started.WARM
        await filled(service, 1)
        assert len(boxes(folder)) == 2
    assert boxes(folder) == []


@pytest.fixture
def adjusting(as_root: None) -> None:
    """What a box is counted by can only be changed where it has cgroups and a range of uids."""


SHOWN = """
grep MemTotal /proc/meminfo | tr -dc 0-9; echo
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes
ulimit -n; ulimit -Hn; ulimit -u; nproc
"""
FORK = """
import os, signal
children = []
try:
    while len(children) < 1000:
        pid = os.fork()
        if not pid:
            signal.pause()
        children.append(pid)
except OSError:
    pass
print(len(children))
"""
EAT = "import sys; b = bytearray(int(sys.argv[1]) << 20); print(len(b) >> 20)"


async def eaten(service: Service, id: str, mebibytes: int) -> Reason:
    cmd = ("python3", "-c", EAT, str(mebibytes))
    return (await service.exec(id, ExecCall(cmd))).exit.reason


COUNTED = frozenset(
    """
    memory.max memory.swap.max memory.limit_in_bytes memory.memsw.limit_in_bytes pids.max
    cpu.max cpu.max.burst cpu.cfs_quota_us cpu.cfs_burst_us cpu.cfs_period_us
    """.split()
)


async def settings_of(service: Service, id: str) -> dict[str, str]:
    handle = service._sandboxes.find(id).handle
    assert handle is not None
    found = await asyncio.to_thread(read_values, [Path(each) for each in handle["cgroups"]])
    return {name: value for name, value in found.items() if name in COUNTED}


@pytest.mark.parametrize(
    "limits",
    [
        {"memory": 96 * MIB, "processes": 12, "cpus": 0.25, "open_files": 77},
        {"memory": 900 * MIB, "processes": 300, "cpus": 0.75, "open_files": 3000},
    ],
)
async def test_other_limits_are_as_if_it_had_been_launched_with_them(
    folder: Path, adjusting: None, limits: dict[str, Any]
) -> None:
    asked = CreateRequest(template="bash", limits=limits)
    async with serving(folder, pool_min=1) as service:
        if "adjust" not in service.capabilities()["local"].features:
            component_missing("this host has no cgroups to adjust limits with")
        await filled(service, 1)
        warm = await service.create(asked)
        assert warm.started is Started.WARM
        usage = await say(service, warm.id, SHOWN)
        counted = await settings_of(service, warm.id)
        most = limits["memory"] // MIB
        assert await eaten(service, warm.id, most - 40) is Reason.EXITED
        assert await eaten(service, warm.id, most + 40) is Reason.OOM_KILLED
        forked = await service.exec(warm.id, ExecCall(("python3", "-c", FORK)))
        assert int(forked.stdout) == limits["processes"] - 1  # it is one of them itself
    async with serving(folder) as service:
        cold = await service.create(asked)
        assert cold.started is Started.COLD
        shown = await say(service, cold.id, SHOWN)
        as_launched = await settings_of(service, cold.id)
    without = [n for n, line in enumerate(shown.splitlines()) if n != 5]  # counted by the cgroup
    assert [usage.splitlines()[n] for n in without] == [shown.splitlines()[n] for n in without]
    assert counted == as_launched
    assert boxes(folder) == []


async def test_what_cannot_be_changed_starts_cold(folder: Path, adjusting: None) -> None:
    async with serving(folder, pool_min=1) as service:
        await filled(service, 1)
        for limits in ({"disk": 64 * MIB}, {"inodes": 5000}):
            made = await service.create(CreateRequest(template="bash", limits=limits))
            assert made.started is Started.COLD
        assert service.pool().shelves[0].ready == 1


# Contexts that are warm


def with_context() -> Catalog:
    python = CATALOG["python"]
    warm = replace(python, name="warm", warm_context="python", warm_imports=("decimal",))
    return Catalog.of({**CATALOG, "warm": warm})


async def ask(service: Service, id: str, code: str) -> str:
    result = await service.contexts.run(id, ContextRun(code, language="python"))
    assert result.error is None, result.error
    return str(result.results[-1].text)


async def test_an_interpreter_runs_before_somebody_asks(folder: Path) -> None:
    settings = {"pool_min": 1, "pool_templates": ("warm",)}
    async with serving(folder, catalog=with_context(), **settings) as service:
        await filled(service, 1)
        began = time.time()
        sandbox = await service.create(CreateRequest(template="warm"))
        assert sandbox.started is Started.WARM
        (context,) = await service.contexts.list(sandbox.id)
        assert (context.id, context.state, context.runs) == ("default-python", "idle", 0)
        assert context.created_at.timestamp() < began
        assert await ask(service, sandbox.id, "import sys; 'decimal' in sys.modules") == "True"
        assert await ask(service, sandbox.id, "x = 1; x + 1") == "2"
        assert len(await service.contexts.list(sandbox.id)) == 1

        await filled(service, 1)
        await service.reset(sandbox.id)
        assert await ask(service, sandbox.id, "'x' in globals()") == "False"
        assert len(await service.execs(sandbox.id)) == 1, "the one that was ready"


async def test_a_box_is_counted_with_what_its_interpreter_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "INTERPRETER", 0)
    settings = {"pool_min": 1, "pool_templates": ("warm",), "pool_memory": 1000 * MIB}
    async with serving(folder, catalog=with_context(), **settings) as service:
        await filled(service, 1)
        counted = service.pool().memory_bytes
        made = await service.create(CreateRequest(template="warm"))
        taken = (await service.metrics(made.id)).memory_bytes
        assert taken is not None and taken > 3 * MIB
        assert counted > taken / 2, "and a ready box's own"


async def test_an_interpreter_that_is_slow_to_start_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> None:
        begun.set()
        await go.wait()
        await start_ahead(*args)

    monkeypatch.setattr(warm, "start_ahead", slow)
    settings = {"pool_min": 1, "pool_templates": ("warm",), "max_launches": 1}
    async with serving(folder, catalog=with_context(), **settings) as service:
        await begun.wait()
        assert service.pool().launching == 0 and service.pool().shelves[0].launching == 1
        async with asyncio.timeout(10):
            made = await service.create(CreateRequest(template="warm"))
        assert made.started is Started.COLD
        go.set()
        await filled(service, 1)
        assert (await service.create(CreateRequest(template="warm"))).started is Started.WARM


async def test_who_brings_variables_gets_an_interpreter_that_has_them(folder: Path) -> None:
    settings = {"pool_min": 1, "pool_templates": ("warm",)}
    async with serving(folder, catalog=with_context(), **settings) as service:
        await filled(service, 1)
        request = CreateRequest(template="warm", env={"COLOUR": "blue"})
        sandbox = await service.create(request)
        assert sandbox.started is Started.WARM
        assert await service.contexts.list(sandbox.id) == []
        assert await ask(service, sandbox.id, "import os; os.environ['COLOUR']") == "'blue'"


async def test_who_wants_other_limits_gets_an_interpreter_that_has_them(
    folder: Path, adjusting: None
) -> None:
    settings = {"pool_min": 1, "pool_templates": ("warm",)}
    async with serving(folder, catalog=with_context(), **settings) as service:
        if "adjust" not in service.capabilities()["local"].features:
            component_missing("this host has no cgroups to adjust limits with")
        for open_files in (77, 4000):
            await filled(service, 1)
            limits = {"open_files": open_files}
            sandbox = await service.create(CreateRequest(template="warm", limits=limits))
            assert sandbox.started is Started.WARM
            assert await service.contexts.list(sandbox.id) == []
            look = "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)"
            assert await ask(service, sandbox.id, look) == f"({open_files}, {open_files})"


async def test_an_interpreter_that_ended_on_the_shelf_is_not_handed_out(folder: Path) -> None:
    settings = {"pool_min": 1, "pool_templates": ("warm",)}
    async with serving(folder, catalog=with_context(), **settings) as service:
        await filled(service, 1)
        ((stocked,),) = [each.ready for each in service._pool._shelves.values()]
        link = AgentLink(stocked.box.connect)
        (interpreter,) = await link.execs()
        await link.kill(interpreter.id)
        sandbox = await service.create(CreateRequest(template="warm"))
        assert sandbox.started is Started.WARM
        assert await service.contexts.list(sandbox.id) == []
        assert await ask(service, sandbox.id, "1 + 1") == "2"


async def test_an_interpreter_makes_room_for_who_wants_less_memory(
    folder: Path, adjusting: None
) -> None:
    settings = {"pool_min": 2, "pool_templates": ("warm",)}
    async with serving(folder, catalog=with_context(), **settings) as service:
        if "adjust" not in service.capabilities()["local"].features:
            component_missing("this host has no cgroups to adjust limits with")
        await filled(service, 2)
        for stocked in next(iter(service._pool._shelves.values())).ready:
            await eat_on_the_shelf(AgentLink(stocked.box.connect), 64 * MIB)
        request = CreateRequest(template="warm", limits={"memory": 32 * MIB})
        sandbox = await service.create(request)
        assert sandbox.started is Started.WARM
        assert service.pool().shelves[0].discarded == 0  # a cgroup refuses less than is used
        assert await service.contexts.list(sandbox.id) == []
        assert await ask(service, sandbox.id, "1 + 1") == "2"


async def eat_on_the_shelf(link: AgentLink, size: int) -> None:
    """As with modules that take memory."""
    (interpreter,) = await link.execs()
    await link.send_input(interpreter.id, wire.run("python", 1, f"x = bytearray({size})", {}))

    async def eaten() -> bool:
        return ((await link.usage()).memory_bytes or 0) > size

    await eventually(eaten, what="the interpreter has eaten")


async def test_a_module_that_is_missing_costs_the_context_and_not_the_box(folder: Path) -> None:
    warm = replace(CATALOG["python"], name="warm", warm_context="python", warm_imports=("nosuch",))
    catalog = Catalog.of({**CATALOG, "warm": warm})
    settings = {"pool_min": 1, "pool_templates": ("warm",)}
    async with serving(folder, catalog=catalog, **settings) as service:
        await filled(service, 1)
        sandbox = await service.create(CreateRequest(template="warm"))
        assert sandbox.started is Started.WARM
        assert await service.contexts.list(sandbox.id) == []
        assert await ask(service, sandbox.id, "1 + 1") == "2"
