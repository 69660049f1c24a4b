"""A provider that nobody names costs nothing, and one that is named first works then."""

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


async def test_what_made_no_box_is_not_opened(tmp_path: Path) -> None:
    inner = Recorded()
    provider = late(inner, tmp_path)
    await provider.open()
    assert await owned(provider) == []
    await provider.aclose()
    assert (inner.opened, provider.found) == (0, None)


async def test_many_who_ask_first_open_it_once(tmp_path: Path) -> None:
    inner = Recorded()
    provider = late(inner, tmp_path)
    assert await asyncio.gather(*(provider.adopt(HANDLE) for _ in range(5))) == [None] * 5
    assert inner.opened == 1
    assert provider.found is not None and provider.found.isolation is Isolation.CONTAINER
    await provider.aclose()
    await provider.aclose()
    assert inner.closed == 1


async def test_after_a_launch_the_next_server_looks_for_what_is_left(tmp_path: Path) -> None:
    first = late(Recorded(), tmp_path)
    with pytest.raises(UnavailableError, match="no box today"):
        await first.launch(HANDLE.sandbox_id, SPEC)
    await first.aclose()
    assert await owned(late(Recorded(), tmp_path)) == [HANDLE]


async def test_what_could_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    inner = Recorded(failures=1)
    provider = late(inner, tmp_path)
    with pytest.raises(UnavailableError, match="the engine is down"):
        await provider.adopt(HANDLE)
    assert inner.closed == 1
    assert await provider.adopt(HANDLE) is None


async def test_one_below_the_least_isolation_is_refused(tmp_path: Path) -> None:
    inner = Recorded(Isolation.LANDLOCK)
    with pytest.raises(UnavailableError, match="isolates by landlock here, required: container"):
        await late(inner, tmp_path, least=Isolation.CONTAINER).adopt(HANDLE)
    assert inner.closed == 1


async def test_layers_and_volumes_are_the_inner_ones_or_unsupported(tmp_path: Path) -> None:
    inner = Recorded()
    provider = late(inner, tmp_path)
    assert list(await provider.kept()) == list(await provider.volumes()) == []
    assert inner.opened == 0, "nothing was ever kept: nobody is asked"
    for call in (provider.drop("a"), provider.make_volume("a"), provider.diff([], [], most=1)):
        with pytest.raises(NotSupportedError, match="late cannot"):
            await call
    assert list(await provider.kept()) == [] and provider.max_layers == 1
