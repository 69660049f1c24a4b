"""A container as a box: how its agent is reached, awaited and asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from capsule.errors import CapsuleError, UnavailableError
from capsule.link.link import AgentLink
from capsule.link.unix import NobodyListensError
from capsule.model import MIB, Handle, Isolation, Limits, Unenforced, Usage
from capsule.providers.contract import Box, ByteStream
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.transport import Folders

ABOUT = ("runtime", "transport", "image")  # of a handle's data, for people

READY_WITHIN = 10.0
ENDED_WITHIN = 2.0
END_WITHIN = 1.0
LOOK_EVERY = 0.2  # seconds between looks at a container whose agent does not answer yet
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02


class NoSocketError(UnavailableError):
    """The container runs, but its socket is not there: the Engine's files are not ours."""


class DockerBox(Box):
    idle_memory = 16 * MIB  # a shim and our agent

    def __init__(
        self,
        handle: Handle,
        isolation: Isolation,
        unenforced: Sequence[Unenforced],
        engine: Engine,
        name: str,
        *,
        connect: Callable[[], Awaitable[ByteStream]],
        remove: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.handle = handle
        self.isolation = isolation
        self.unenforced = unenforced
        self.about = {key: str(handle.data[key]) for key in ABOUT if key in handle.data}
        self._engine = engine
        self._name = name
        self._connect = connect
        self._remove = remove
        self._halted: bool | None = None  # None: nobody has tried
        # What the Engine is asked to change for other limits, or None; an adopted box has none.
        self.adjusted: Callable[[Limits], Mapping[str, Any] | None] = lambda limits: None

    def adjusts(self, limits: Limits) -> bool:
        return self.adjusted(limits) is not None

    async def adjust(self, limits: Limits) -> None:
        body = self.adjusted(limits)
        assert body is not None
        await self._engine.update(self._name, body)

    async def connect(self) -> ByteStream:
        return await self._connect()

    async def halt(self) -> None:
        """By its agent: the Engine starts a program of its own to send a signal."""
        self._halted = False
        await AgentLink(self.connect).shutdown()
        self._halted = True

    async def destroy(self) -> None:
        await self._end()
        await self._remove()

    async def _end(self) -> None:
        """An agent that does not answer is the Engine's to kill."""
        with contextlib.suppress(CapsuleError, TimeoutError):
            async with asyncio.timeout(END_WITHIN):
                if self._halted is None:
                    await self.halt()
                if self._halted:
                    await self._engine.wait(self._name, END_WITHIN)

    async def pause(self) -> None:
        await self._shift(self._engine.pause, paused=True)

    async def resume(self) -> None:
        await self._shift(self._engine.resume, paused=False)

    async def _shift(self, ask: Callable[[str], Awaitable[None]], *, paused: bool) -> None:
        """An Engine refuses to pause what is paused; each version has its own error for it."""
        try:
            await ask(self._name)
        except CapsuleError:
            state = await self.state()
            if not state.get("Running") or bool(state.get("Paused")) is not paused:
                raise

    @property
    def over_layers(self) -> bool:
        """Whether its disk lies over layers; else it has copies of them."""
        return bool(self.handle.data.get("over_layers"))

    async def paused(self) -> bool:
        return bool((await self.state()).get("Paused"))

    async def ping(self, within: float) -> dict[str, Any]:
        return await AgentLink(self.connect, timeout=within).ping()

    async def state(self) -> dict[str, Any]:
        found = await self._engine.inspect(self._name)
        return dict((found or {}).get("State") or {})


class GvisorBox(DockerBox):
    """Inside, gVisor knows neither its own memory nor the time that the host's CPUs took."""

    idle_memory = 64 * MIB  # its kernel, and what serves it files

    async def _end(self) -> None:
        """To kill a kernel that stands still takes the Engine ten seconds, and may fail."""
        with contextlib.suppress(CapsuleError):
            if (await self.state()).get("Paused"):
                await self._engine.resume(self._name)
        await super()._end()

    async def measure(self, inside: Usage) -> Usage:
        told = await self._engine.stats(self._name)
        memory = told.get("memory_stats") or {}
        moved = (told.get("blkio_stats") or {}).get("io_service_bytes_recursive") or []
        return replace(
            inside,
            cpu_ms=told["cpu_stats"]["cpu_usage"]["total_usage"] / 1e6,
            memory_bytes=memory.get("usage"),
            memory_peak_bytes=memory.get("max_usage"),
            io_read_bytes=_sum(moved, "read"),
            io_write_bytes=_sum(moved, "write"),
            source="engine",
        )


def _sum(entries: Sequence[Mapping[str, Any]], operation: str) -> int | None:
    found = [int(each["value"]) for each in entries if str(each.get("op")).lower() == operation]
    return sum(found) if found else None


async def await_agent(box: DockerBox, folders: Folders) -> None:
    """Returns when the agent has answered. Raises UnavailableError as soon as it cannot any more.

    Right after the start its socket is not bound, or bound and not listening yet.
    """
    loop = asyncio.get_running_loop()
    give_up, look_at = loop.time() + READY_WITHIN, loop.time() + LOOK_EVERY
    pause = FIRST_PAUSE
    while True:
        try:
            await box.ping(max(give_up - loop.time(), FIRST_PAUSE))
            return
        except UnavailableError as exc:
            if loop.time() >= give_up:
                raise await _silence(box, exc) from exc
        if loop.time() >= look_at:
            look_at = loop.time() + LOOK_EVERY
            await _look(box, folders)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)


async def _look(box: DockerBox, folders: Folders) -> None:
    state = await box.state()
    if state.get("Running"):
        return
    sandbox_id = box.handle.sandbox_id
    reason = await asyncio.to_thread(folders.reason, sandbox_id)
    reason = reason or state.get("Error") or f"exit code {state.get('ExitCode', 'unknown')}"
    raise UnavailableError(
        f"the sandbox could not be started: its agent ended: {reason}",
        hint="`capsule doctor` shows what the Engine allows",
    )


async def _silence(box: DockerBox, last: UnavailableError) -> UnavailableError:
    text = f"the agent did not answer within {READY_WITHIN:g} seconds: {last.message}"
    if isinstance(last, NobodyListensError) and (await box.state()).get("Running"):
        return NoSocketError(text)
    return UnavailableError(text)


async def follows_its_agent(box: DockerBox) -> bool:
    """Whether a container whose agent is gone has ended: the Engine learns of it a little later."""
    loop = asyncio.get_running_loop()
    give_up, pause = loop.time() + ENDED_WITHIN, LONGEST_PAUSE
    while (await box.state()).get("Running"):
        if loop.time() >= give_up:
            return False
        await asyncio.sleep(pause)
        pause *= 2
    return True
