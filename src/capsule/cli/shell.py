"""`capsule shell` and `capsule exec -t`: this terminal, connected to one in the sandbox.

main task
  ├─ output: what the sandbox's terminal shows
  ├─ input task: what is typed here, byte by byte
  └─ SIGWINCH: the new size; SIGTERM and SIGHUP: leave, with this terminal as it was
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from capsule.cli import pipes, show, tty
from capsule.cli.codes import FAILED, SIGNALED
from capsule.cli.remote import Program, Server, conclude
from capsule.errors import InvalidError
from capsule_sdk import (
    AsyncCapsule,
    AsyncCapsuleClient,
    AsyncExecStream,
    AsyncTerminal,
    CapsuleError,
    Exit,
    Output,
    UnavailableError,
)
from capsule_sdk import InvalidError as RemoteInvalidError

_COMES_BACK = {1012: "the server restarts", 1006: "the connection was lost"}  # by close code
_LEFT, _LOST = 0, -1  # how two terminals part; above 0: by that signal
_LONG = 3600.0
_PAUSE = 0.2


class Remote(Protocol):
    """A terminal on the other side."""

    def output(self) -> AsyncIterator[bytes]: ...

    async def send(self, data: bytes) -> None: ...

    async def resize(self, rows: int, cols: int) -> None: ...


def open_shell(server: Server, id: str | None, template: str, name: str, *, as_json: bool) -> int:
    _require_terminal("capsule shell")
    return asyncio.run(_shell(server, id, template, name, as_json))


def exec_on_terminal(server: Server, id: str, program: Program) -> int:
    _require_terminal("capsule exec -t")
    return asyncio.run(_exec(server, id, program))


def _require_terminal(what: str) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidError(
            f"{what} needs a terminal", hint="use `capsule exec ID CMD` in scripts and pipes"
        )


async def _shell(server: Server, id: str | None, template: str, name: str, as_json: bool) -> int:
    async with AsyncCapsuleClient(server.url, api_key=server.api_key) as client:
        capsule = await (client.get(id) if id else client.create(template))
        try:
            if id is None:
                show.note(f"sandbox {capsule.id} ({template}), deleted when you leave")
            how = await _stay(capsule, name)
        finally:
            if id is None:
                await capsule.delete()
    if how.part == _LEFT and id is not None:
        how = how._replace(story=f"left; the shell goes on: capsule shell {id} --name {name}")
    if as_json:
        code = how.exit.exit_code if how.exit else None
        show.as_json({"sandbox": capsule.id, "ended": how.story, "exit_code": code})
    elif how.lost:
        show.problem(how.story, hint=None, code="lost")
    else:
        show.note(how.story)
    return how.code


class Parting(NamedTuple):
    part: int
    story: str
    exit: Exit | None = None

    @property
    def lost(self) -> bool:
        """Neither the shell ended nor did we leave it."""
        return self.part == _LOST and self.exit is None

    @property
    def code(self) -> int:
        if self.exit is not None:
            return self.exit.exit_code
        if self.lost:
            return FAILED
        return SIGNALED + self.part if self.part else 0


async def _stay(capsule: AsyncCapsule, name: str) -> Parting:
    """In the shell until it ends. It goes on while the server restarts, so that is waited for."""
    while True:
        terminal = await _patiently(capsule, name)
        async with terminal:
            part = await _connect(Shell(terminal))
        if part != _LOST:
            print()
            return Parting(part, "left")
        if terminal.code not in _COMES_BACK:
            return Parting(part, terminal.reason, terminal.exit)
        print()
        show.note(f"{_COMES_BACK[terminal.code]}; coming back")
        await asyncio.sleep(_PAUSE)


async def _patiently(capsule: AsyncCapsule, name: str) -> AsyncTerminal:
    rows, cols = tty.size()
    for wait in (0.2, 0.5, 1.0, 2.0, 4.0, 0.0):
        try:
            return await capsule.connect_terminal(name=name, rows=rows, cols=cols)
        except UnavailableError:
            if not wait:
                raise
            await asyncio.sleep(wait)
    raise AssertionError("unreachable")


class Shell:
    def __init__(self, terminal: AsyncTerminal) -> None:
        self._terminal = terminal
        self.send = terminal.send
        self.resize = terminal.resize

    def output(self) -> AsyncIterator[bytes]:
        return self._terminal.__aiter__()


class Running:
    def __init__(self, stream: AsyncExecStream) -> None:
        self._stream = stream
        self.resize = stream.resize

    async def send(self, data: bytes) -> None:
        await self._stream.send_input(data)

    async def output(self) -> AsyncIterator[bytes]:
        async for event in self._stream:
            if isinstance(event, Output):
                yield event.data


async def _exec(server: Server, id: str, program: Program) -> int:
    async with AsyncCapsuleClient(server.url, api_key=server.api_key) as client:
        capsule = await client.get(id)
        stream = await _start(capsule, program)
        part = await _connect(Running(stream))
    if part != _LOST:
        print()
        show.note("left; the program goes on")
        return SIGNALED + part if part else 0
    assert stream.exit is not None  # its output ended, and did not raise
    return conclude(stream.exit)


async def _start(capsule: AsyncCapsule, program: Program) -> AsyncExecStream:
    """Somebody who sits at a terminal is not done after the 30 s of an exec: as long as allowed."""
    options: Any = {"env": program.env, "cwd": program.cwd, "session": program.session}
    options |= {"tty": tty.size(), "stdin_open": True}
    if program.timeout is not None:
        return await capsule.start(program.cmd, timeout=program.timeout, **options)
    try:
        return await capsule.start(program.cmd, timeout=_LONG, **options)
    except RemoteInvalidError as error:
        if error.details.get("field") != "timeout":
            raise
        return await capsule.start(program.cmd, **options)


async def _connect(remote: Remote) -> int:
    """Join the two terminals until one side leaves: _LEFT, _LOST, or the signal that ended it."""
    loop = asyncio.get_running_loop()
    keys: asyncio.Task[None] = asyncio.ensure_future(_type(remote))
    screen: asyncio.Task[None] = asyncio.ensure_future(_show(remote))
    sizes = Sizes(remote)
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        keys.cancel()

    loop.add_signal_handler(signal.SIGWINCH, sizes.changed)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        with tty.raw_mode():
            await asyncio.wait({keys, screen}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        for task in (keys, screen):
            task.cancel()
        await asyncio.wait({keys, screen})
        await sizes.aclose()
    if screen.cancelled():
        return ended_by[0] if ended_by else _LEFT
    screen.result()
    return _LOST


async def _type(remote: Remote) -> None:
    keys = tty.Keys()
    async for data in pipes.read(sys.stdin.fileno()):
        typed = keys.feed(data)
        if typed is None:
            return
        if typed:
            # Where it cannot be sent the output ends too, and tells why; ~. must still work.
            with contextlib.suppress(CapsuleError):
                await remote.send(typed)


async def _show(remote: Remote) -> None:
    screen = tty.Screen()
    try:
        async for data in remote.output():
            screen.watch(data)
            await pipes.write(sys.stdout.fileno(), data)
    finally:
        os.write(sys.stdout.fileno(), screen.undo())


class Sizes:
    """Tells the other side this terminal's size, one message at a time, the last one always."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def changed(self) -> None:
        if self._task is not None and not self._task.done():
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        with contextlib.suppress(CapsuleError):  # the output side tells what went wrong
            await self._remote.resize(*tty.size())
            while self._again:
                self._again = False
                await self._remote.resize(*tty.size())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
