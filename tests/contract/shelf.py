"""Boxes that are used by one test after another: making and removing one takes most tests' time.

After a test a program in the box kills its processes and removes its files. If that fails, or the
test destroyed the box, the next test gets a new one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest_asyncio

from capsule.errors import CapsuleError
from capsule.model import Template
from capsule.providers.contract import Box, Provider
from capsule.testing.harness import Launcher, NewProvider, Subject, opened, owned
from tests.contract.conftest import folder

WRITABLE = "/workspace /tmp /var/tmp /dev/shm"
# `kill -1` is all processes of this user but the shell itself; it fails if there are none.
OURS = "-not -path '*/.capsule*'"  # the agent, where it has no other place
ALL = f"{WRITABLE} -mindepth 1 {OURS}"
TIDY = f"kill -9 -1 2>/dev/null; find {ALL} -delete && find {ALL}"
TIDY_WITHIN = 5.0


@pytest_asyncio.fixture(name="provider", loop_scope="session")
async def provider_of_ones_own(new_provider: NewProvider) -> AsyncIterator[Provider]:
    async with opened(new_provider()) as made:
        yield made


@pytest_asyncio.fixture(name="launch", loop_scope="session")
async def launch_of_ones_own(provider: Provider, template: Template) -> Launcher:
    return Launcher(provider, f"t{uuid.uuid4().hex[:10]}-", template)


# A module of tests names its boxes: `box_kind`, and `make_provider` of a folder. Its session
# fixture `backend` is what they need to the end.
MakeProvider = Callable[[Path], Provider]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shelves(backend: object) -> AsyncIterator[Shelves]:
    with ExitStack() as folders:
        made = Shelves(folders)
        yield made
        await made.aclose()


@pytest_asyncio.fixture(name="subject", loop_scope="session")
async def subject_that_is_shared(
    shelves: Shelves, box_kind: object, make_provider: MakeProvider, template: Template
) -> AsyncIterator[Subject]:
    shelf = await shelves.of(box_kind, make_provider, template)
    subject = await shelf.take()
    yield subject
    await shelf.put_back(subject)


@dataclass(slots=True)
class Shelf:
    """Owns an open provider and at most one box that is not in use."""

    provider: Provider
    template: Template
    prefix: str
    _box: Box | None = None
    _launch: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self._launch = Launcher(self.provider, self.prefix, self.template)

    async def take(self) -> Subject:
        box, self._box = self._box, None
        return await self._launch() if box is None else Subject(box)

    async def put_back(self, subject: Subject) -> None:
        if await _is_clean(subject):
            self._box = subject.box
        else:
            await subject.box.destroy()

    async def aclose(self) -> None:
        for handle in await owned(self.provider):
            await self.provider.discard(handle)
        await self.provider.aclose()


async def _is_clean(subject: Subject) -> bool:
    try:
        async with asyncio.timeout(TIDY_WITHIN):
            for info in await subject.link.execs():
                if info.running:
                    await subject.link.kill(info.id)
            exit, left, said, _ = await subject.sh(TIDY)
            alive = (await subject.link.usage()).processes
            return (exit.exit_code, left, said) == (0, b"", b"") and not alive
    except (CapsuleError, TimeoutError):
        return False


class Shelves:
    """One for each kind of box, made when it is asked for."""

    def __init__(self, folders: ExitStack) -> None:
        self._folders = folders
        self._all: dict[object, Shelf] = {}

    async def of(self, kind: object, make: MakeProvider, template: Template) -> Shelf:
        if kind not in self._all:
            provider = make(self._folders.enter_context(folder()))
            await provider.open()
            self._all[kind] = Shelf(provider, template, f"s{uuid.uuid4().hex[:10]}-")
        return self._all[kind]

    async def aclose(self) -> None:
        for shelf in self._all.values():
            await shelf.aclose()
