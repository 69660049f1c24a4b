"""Providers: found by name, opened when first named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from capsule.config import Config
from capsule.errors import InvalidError, NotSupportedError, UnavailableError
from capsule.model import Handle, Isolation, Limits, SandboxId, SandboxSpec, Template
from capsule.providers import registry
from capsule.providers.contract import Box, Capabilities, Provider
from capsule.providers.local.provider import LocalProvider
from capsule.providers.ondemand import OnDemand


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        data_dir=tmp_path / "d", run_dir=Path("/tmp/unused"), isolation=Isolation.LANDLOCK
    )


def test_local_is_built_in(config: Config, agent_binary: Path) -> None:
    template = Template("python", needs=("python3",))
    provider = registry.make_provider("local", config, {"python": template})
    assert isinstance(provider, LocalProvider)
    assert provider.settings.data_dir == config.data_dir
    assert provider.settings.isolation is Isolation.LANDLOCK
    assert provider.settings.templates == (template,)


def test_other_packages_announce_theirs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"extra": "capsule.providers.local.build:build", "broken": "no_such_module:build"}
    points = EntryPoints(
        EntryPoint(name, target, registry.GROUP) for name, target in targets.items()
    )
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))
    assert isinstance(registry.make_provider("extra", config), LocalProvider)
    assert registry.names() == ("broken", "docker", "e2b", "extra", "local")
    with pytest.raises(InvalidError, match="broken cannot be imported"):
        registry.make_provider("broken", config)


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
