"""Providers that misbehave, and calls that are cancelled wherever they wait."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from capsule.catalog import load_catalog
from capsule.config import Config
from capsule.errors import CapsuleError, GoneError, UnavailableError
from capsule.model import Isolation, SandboxId, SandboxSpec, State
from capsule.providers.contract import Box, Provider
from capsule.providers.fake import (
    DiesAtLaunch,
    DiesMidExec,
    LiesAboutExit,
    NeverReady,
    RefusesDestroy,
    SlowLaunch,
)
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.service import CreateRequest, ExecCall, Service, pool, reaper, sandboxes
from tests.faults.footprint import look
from tests.support import eventually
from tests.support.folders import server_folder

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

T = TypeVar("T")
BASH = CreateRequest(template="bash")
TRUE = ExecCall(("true",))
CATALOG = load_catalog(None)


@pytest.fixture
def base() -> Iterator[Path]:
    with server_folder("cf-", mode=0o755, data="data") as made:
        yield made


@pytest.fixture
def local(base: Path, agent_binary: Path) -> Provider:
    return LocalProvider(LocalSettings(base / "data", base / "run", agent_binary))


@asynccontextmanager
async def serving(base: Path, provider: Provider) -> AsyncIterator[Service]:
    config = Config(data_dir=base / "data", run_dir=base / "run", drain="delete", drain_timeout=0.1)
    async with Service(config, {"local": provider}, CATALOG) as service:
        yield service


async def nothing_left(base: Path, provider: Provider) -> None:
    ours = frozenset({os.getpid()})
    deadline = asyncio.get_running_loop().time() + 10
    while True:
        seen = await asyncio.to_thread(look, base, server=os.getpid(), ignored=ours)
        found = [*seen.differences(), *seen.rows]
        if not found:
            break
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.05)
    assert [handle async for handle in provider.owned()] == []


async def cancelled_at(step: int, work: Coroutine[Any, Any, T]) -> T:
    """Run it, and cancel it when it waits for the step-th time."""
    task = asyncio.current_task()
    assert task is not None

    @types.coroutine
    def drive() -> Generator[Any, Any, T]:
        inner = work.__await__()
        sent: Any = None
        for waits in range(10_000):
            try:
                waiting = inner.send(sent)
            except StopIteration as done:
                result: T = done.value
                return result
            if waits == step:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                sent = yield waiting
            except BaseException as error:
                yield from _throw(inner, error)
        raise AssertionError("it waits for ever")

    return await drive()


def _throw(inner: Generator[Any, Any, Any], error: BaseException) -> Generator[Any, Any, None]:
    """Pass the cancellation on, and let it clean up."""
    try:
        waiting = inner.throw(error)
        while True:
            waiting = inner.send((yield waiting))
    except StopIteration:
        return


async def at_every_step(
    work: Callable[[int], Coroutine[Any, Any, T]],
    after: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]],
) -> int:
    """Cancel `work()` at its first wait, its second, and so on until it ends before that."""
    for step in range(500):
        task = asyncio.create_task(cancelled_at(step, work(step)))
        await asyncio.wait({task})
        await after(task)
        if not task.cancelled():
            task.result()
            return step
    raise AssertionError("it has no end")


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK])
async def test_a_launch_cancelled_at_every_await_leaves_nothing(
    base: Path, agent_binary: Path, level: Isolation
) -> None:
    settings = LocalSettings(base / "data", base / "run", agent_binary, isolation=level)
    provider = LocalProvider(settings)
    await provider.open()
    template = CATALOG["bash"]

    async def launch(step: int) -> Box:
        spec = SandboxSpec(template, template.limits)
        return await provider.launch(SandboxId(f"box-{step}"), spec)

    async def after(task: asyncio.Task[Box]) -> None:
        if not task.cancelled():
            await task.result().destroy()
        await nothing_left(base, provider)

    try:
        assert await at_every_step(launch, after) >= 1
    finally:
        for handle in [handle async for handle in provider.owned()]:
            await provider.discard(handle)
        await provider.aclose()


async def test_a_create_cancelled_at_every_await_leaves_nothing(
    base: Path, local: Provider
) -> None:
    async with serving(base, local) as service:

        async def create(step: int) -> None:
            made = await service.create(BASH)
            await service.delete(made.id)

        async def after(task: asyncio.Task[None]) -> None:
            await eventually(lambda: not unended(service), what="it is over")

        assert await at_every_step(create, after) > 1
        await nothing_left(base, local)


def unended(service: Service) -> list[str]:
    return [sandbox.id for sandbox in service.list()]


async def test_an_exec_cancelled_at_every_await_holds_no_place(base: Path, local: Provider) -> None:
    async with serving(base, local) as service:
        made = await service.create(BASH)
        keyed = ExecCall(("sh", "-c", "echo x >> ran"), session="s")

        async def execute(step: int) -> None:
            await service.exec(made.id, keyed)

        async def after(task: asyncio.Task[None]) -> None:
            assert service.stats().execs == 0

        assert await at_every_step(execute, after) >= 1
        assert (await service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_a_delete_cancelled_at_every_await_still_ends_it(base: Path, local: Provider) -> None:
    async with serving(base, local) as service:
        ids = [(await service.create(BASH)).id for _ in range(8)]

        for step, id in enumerate(ids):
            await asyncio.wait({asyncio.create_task(cancelled_at(step, service.delete(id)))})
        await eventually(lambda: not unended(service), what="all are over")
        await nothing_left(base, local)


async def test_thirty_launches_that_fail_leave_nothing(base: Path, local: Provider) -> None:
    async with serving(base, DiesAtLaunch(local, times=30)) as service:
        for _ in range(30):
            with pytest.raises(UnavailableError, match="ended before it was ready"):
                await service.create(BASH)
        assert service.list() == []
        await nothing_left(base, local)
        made = await service.create(BASH)
        assert (await service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_a_box_that_is_never_ready_is_given_up(
    base: Path, local: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LAUNCH_BUDGET", 1.0)
    async with serving(base, NeverReady(local)) as service:
        with pytest.raises(UnavailableError, match="not up within 1 seconds"):
            await service.create(BASH)
        assert service.list() == []
        await nothing_left(base, local)


async def test_a_sandbox_deleted_while_it_is_made(base: Path, local: Provider) -> None:
    async with serving(base, SlowLaunch(local, delay=30)) as service:
        creating = asyncio.create_task(service.create(BASH))
        await eventually(service.list, what="it is being made")
        await service.delete(service.list()[0].id)
        with pytest.raises(GoneError):
            await creating
        await nothing_left(base, local)


async def test_a_server_that_stops_during_a_launch(base: Path, local: Provider) -> None:
    async with serving(base, SlowLaunch(local, delay=30)) as service:
        creating = asyncio.create_task(service.create(BASH))
        await eventually(service.list, what="it is being made")
    with pytest.raises(CapsuleError):
        await creating
    seen = look(base, server=None, ignored=frozenset({os.getpid()}))
    assert seen.rows == {}
    assert seen.differences(serving=False) == []


@pytest.mark.parametrize("after", [1, 30, 150])
async def test_a_box_that_dies_during_an_exec(base: Path, local: Provider, after: int) -> None:
    async with serving(base, DiesMidExec(local, after=after)) as service:
        made = await service.create(BASH)
        with pytest.raises((UnavailableError, GoneError)):
            await service.exec(made.id, ExecCall(("sh", "-c", "yes | head -c 5000; sleep 100")))
        await eventually(
            lambda: service.get(made.id).state is State.FAILED, what="failed", within=5
        )
        assert service.stats().execs == 0
        await service.delete(made.id)
        await nothing_left(base, local)


@pytest.mark.parametrize("made_up", [False, True])
async def test_no_exit_is_made_of_a_lie(base: Path, local: Provider, made_up: bool) -> None:
    async with serving(base, LiesAboutExit(local, made_up=made_up)) as service:
        made = await service.create(BASH)
        with pytest.raises(CapsuleError):
            await service.exec(made.id, ExecCall(("echo", "out")))
        stream = await service.start(made.id, ExecCall(("echo", "out")))
        with pytest.raises(CapsuleError):
            async for _ in stream:
                pass
        assert stream.exit is None
        await stream.aclose()
        assert service.stats().execs == 0


async def test_a_box_that_will_not_go_goes_in_the_end(
    base: Path, local: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sandboxes, reaper):
        monkeypatch.setattr(module, "RETRY", 0.2)
    async with serving(base, RefusesDestroy(local, times=3)) as service:
        made = await service.create(BASH)
        with pytest.raises(UnavailableError, match="cannot be removed right now"):
            await service.delete(made.id)
        with pytest.raises(GoneError):
            await service.exec(made.id, TRUE)
        await eventually(lambda: not unended(service), what="the reaper has removed it")
        await nothing_left(base, local)
