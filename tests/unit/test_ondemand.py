"""A provider that is opened when it is first named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule.errors import NotSupportedError, UnavailableError
from capsule.model import Handle, Isolation, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.contract import Box, Capabilities, Provider
from capsule.providers.ondemand import OnDemand

HANDLE = Handle("late", SandboxId("a"))
SPEC = SandboxSpec(Template("python"), Limits())


class Recorded(Provider):
    """Counts what is asked of it; has one box, and cannot launch another."""

    name = "late"

    def __init__(self, level: Isolation = Isolation.CONTAINER, failures: int = 0) -> None:
        self.level = level
        self.failures = failures
        self.opened = self.closed = 0

    async def open(self) -> None:
        await asyncio.sleep(0)
        self.opened += 1
        if self.failures:
            self.failures -= 1
            raise UnavailableError("the engine is down")

    async def aclose(self) -> None:
        self.closed += 1

    async def probe(self) -> Capabilities:
        return Capabilities(self.name, usable=True, isolation=self.level)

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        raise UnavailableError("no box today")

    async def adopt(self, handle: Handle) -> Box | None:
        return None

    async def owned(self) -> AsyncIterator[Handle]:
        yield HANDLE

    async def discard(self, handle: Handle) -> None:
        pass


def late(inner: Recorded, home: Path, least: Isolation = Isolation.LANDLOCK) -> OnDemand:
    return OnDemand("late", lambda: inner, least=least, mark=home / "providers" / "late")


async def owned(provider: Provider) -> list[Handle]:
    return [handle async for handle in provider.owned()]


async def test_it_is_opened_once_when_it_is_first_named(tmp_path: Path) -> None:
    inner = Recorded(failures=1)
    provider = late(inner, tmp_path)
    await provider.open()
    assert await owned(provider) == [] == [*await provider.kept(), *await provider.volumes()]
    assert (inner.opened, provider.found) == (0, None), "it has made nothing: it is not asked"
    with pytest.raises(UnavailableError, match="the engine is down"):
        await provider.adopt(HANDLE)
    assert inner.closed == 1
    assert await asyncio.gather(*(provider.adopt(HANDLE) for _ in range(5))) == [None] * 5
    assert inner.opened == 2
    assert provider.found is not None and provider.found.isolation is Isolation.CONTAINER
    for call in (provider.drop("a"), provider.make_volume("a"), provider.diff([], [], most=1)):
        with pytest.raises(NotSupportedError, match="late cannot"):
            await call
    await provider.aclose()
    await provider.aclose()
    assert inner.closed == 2


async def test_after_a_launch_the_next_server_looks_for_what_is_left(tmp_path: Path) -> None:
    first = late(Recorded(), tmp_path)
    with pytest.raises(UnavailableError, match="no box today"):
        await first.launch(HANDLE.sandbox_id, SPEC)
    await first.aclose()
    assert await owned(late(Recorded(), tmp_path)) == [HANDLE]


async def test_one_below_the_least_isolation_is_refused(tmp_path: Path) -> None:
    inner = Recorded(Isolation.LANDLOCK)
    with pytest.raises(UnavailableError, match="isolates by landlock here, required: container"):
        await late(inner, tmp_path, least=Isolation.CONTAINER).adopt(HANDLE)
    assert inner.closed == 1
