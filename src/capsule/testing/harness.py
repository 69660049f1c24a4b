"""What the conformance tests share: a box to try things on, and words to try them with."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

import pytest

from capsule.errors import NotFoundError, NotSupportedError, UnavailableError
from capsule.link import AgentLink, Collected, ExecStream, Output
from capsule.model import (
    MIB,
    ExecId,
    ExecRequest,
    FileStat,
    Handle,
    Limits,
    SandboxId,
    SandboxSpec,
    Stream,
    Template,
)
from capsule.providers.contract import Box, Provider

T = TypeVar("T")

ENV: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
LIMITS = Limits(memory=512 * MIB, cpus=1.0, processes=64, disk=256 * MIB, inodes=16_384)


# What is there of a box on the host, by name: processes, directories, groups. Empty: it is gone.
Leftovers = Callable[[Handle], list[str]]


class NewProvider(Protocol):
    """Makes a provider that is not open yet; a second one sees the first one's boxes."""

    def __call__(self) -> Provider: ...


class Subject:
    """A box under test and a link to its agent. Another test may have had the box before."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.link = AgentLink(box.connect)
        self._mark = uuid.uuid4().hex[:8]
        self._count = 0

    def id(self, name: str) -> ExecId:
        """An exec's id that nobody used before."""
        return ExecId(f"{name}-{self._mark}")

    def request(self, *argv: str, **options: Any) -> ExecRequest:
        self._count += 1
        options = {"id": self.id(f"e{self._count}"), "env": ENV, "timeout": 15.0, **options}
        return ExecRequest(argv, **options)

    async def run(self, *argv: str, input: bytes | None = None, **options: Any) -> Collected:
        if input is not None:
            options["stdin"] = True
        return await self.link.collect(self.request(*argv, **options), input=input or b"")

    async def sh(self, script: str, **options: Any) -> Collected:
        return await self.run("/bin/sh", "-c", script, **options)

    async def python(self, code: str, *arguments: str, **options: Any) -> Collected:
        return await self.run("python3", "-c", code, *arguments, **options)

    async def output(self, script: str, **options: Any) -> str:
        """What a script that must succeed prints."""
        exit, stdout, stderr, _ = await self.sh(script, **options)
        assert exit.exit_code == 0, (exit, stdout, stderr)
        return stdout.decode().strip()

    async def workspace(self) -> str:
        """The workspace as programs see it: not every level can give it its usual name."""
        return await self.output("pwd -P")

    async def start(self, *argv: str, **options: Any) -> ExecStream:
        return await self.link.exec(self.request(*argv, **options))

    async def start_sh(self, script: str, **options: Any) -> ExecStream:
        return await self.start("/bin/sh", "-c", script, **options)

    async def start_python(self, code: str, *arguments: str, **options: Any) -> ExecStream:
        return await self.start("python3", "-u", "-c", code, *arguments, **options)

    async def content(self, path: str, **options: Any) -> bytes:
        async with self.link.read(path, **options) as reader:
            return b"".join([chunk async for chunk in reader])

    async def entries(self, path: str = ".", **options: Any) -> dict[str, FileStat]:
        listing = await self.link.list(path, **options)
        assert not listing.truncated
        return {entry.path: entry for entry in listing.entries}

    async def exists(self, path: str) -> bool:
        return path in await self.entries()

    async def pid_in(self, path: str) -> int:
        """The process id that a program leaves in a file; waits for it to be there."""

        async def read() -> int:
            try:
                return int(await self.content(path) or 0)
            except NotFoundError:
                return 0

        return await until(read, what=f"a process id in {path}")

    async def is_alive(self, *pids: int) -> bool:
        """Whether any of these processes still exists, as seen from inside.

        A process one may not signal is there all the same.
        """
        script = (
            "for pid; do\n"
            "    said=$(kill -0 $pid 2>&1) && echo $pid && continue\n"
            '    case "$said" in *permitted*) echo $pid;; esac\n'
            "done\n"
        )
        result = await self.run("/bin/sh", "-c", script, "sh", *map(str, pids))
        assert result.exit.exit_code == 0, result
        return bool(result.stdout)

    def need(self, limit: str) -> None:
        """Skip, with the box's own words, where this limit is not enforced."""
        for gap in self.box.unenforced:
            if gap.what == limit:
                pytest.skip(f"{limit} is not enforced here: {gap.why}")

    async def need_sockets(self) -> None:
        result = await self.python("import socket; socket.socket()")
        if result.exit.exit_code:
            pytest.skip(f"{self.box.isolation} gives programs no sockets")

    async def need_chmod(self) -> None:
        """Landlock does not cover modes, so a level built on it alone forbids changing them."""
        result = await self.sh("touch .probe && chmod 600 .probe; x=$?; rm .probe; exit $x")
        if result.exit.exit_code:
            pytest.skip(f"{self.box.isolation} does not let programs change modes")

    async def need_watch(self) -> None:
        try:
            async with self.link.watch("."):
                pass
        except NotSupportedError:
            pytest.skip(f"{self.box.isolation} cannot watch files")


async def read_until(stream: ExecStream, text: bytes, *, within: float = 10.0) -> bytes:
    """Output from here on, until it contains `text`."""
    seen = b""
    try:
        async with asyncio.timeout(within):
            async for item in stream:
                if isinstance(item, Output):
                    seen += item.data
                if text in seen:
                    return seen
    except TimeoutError:
        fail(f"after {within} s no {text!r} in {seen!r}")
    fail(f"it ended ({stream.exit}) without {text!r}, but with {seen!r}")


async def drain(stream: ExecStream) -> dict[Stream, bytes]:
    """All that is left of its output, by stream; its exit is known afterwards."""
    seen: dict[Stream, bytes] = {}
    async for item in stream:
        if isinstance(item, Output):
            seen[item.stream] = seen.get(item.stream, b"") + item.data
    assert stream.exit is not None
    return seen


async def until(condition: Callable[[], Awaitable[T]], *, what: str, within: float = 10.0) -> T:
    """Asks again and again until the answer is true; never longer than `within`."""
    try:
        async with asyncio.timeout(within):
            while True:
                if value := await condition():
                    return value
                await asyncio.sleep(0.02)
    except TimeoutError:
        fail(f"after {within} s still not: {what}")


def fail(reason: str) -> NoReturn:
    pytest.fail(reason)


async def owned(provider: Provider) -> list[Handle]:
    return [handle async for handle in provider.owned()]


def stored(handle: Handle) -> Handle:
    """A handle as it comes back from a store."""
    return replace(handle, data=json.loads(json.dumps(dict(handle.data))))


class Launcher:
    """Launches boxes with ids of their own, so that parallel runs do not meet."""

    def __init__(self, provider: Provider, prefix: str, template: Template) -> None:
        self.provider = provider
        self.template = template
        self._prefix = prefix
        self._count = 0

    def spec(self, **limits: Any) -> SandboxSpec:
        return SandboxSpec(self.template, replace(LIMITS, **limits))

    def new_id(self) -> SandboxId:
        self._count += 1
        return SandboxId(f"{self._prefix}{self._count}")

    async def __call__(self, **limits: Any) -> Subject:
        return Subject(await self.provider.launch(self.new_id(), self.spec(**limits)))


@asynccontextmanager
async def opened(provider: Provider) -> AsyncIterator[Provider]:
    """An open provider; afterwards nothing of what it launched is left, whatever the test did.

    One that cannot work here skips the test with its reason; in CI it fails it.
    """
    try:
        await provider.open()
    except UnavailableError as exc:
        await provider.aclose()
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            fail(f"the provider is not available: {exc}")
        pytest.skip(f"the provider is not available: {exc}")
    try:
        yield provider
    finally:
        try:
            for handle in await owned(provider):
                await provider.discard(handle)
        finally:
            await provider.aclose()
