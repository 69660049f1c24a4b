"""Named shells with several viewers.

A shell is an exec with a terminal whose last output the agent keeps. Each viewer reads it
through a connection of its own, at its own pace, so nothing is buffered here: one that falls
behind by more than the agent keeps misses what was between, and goes on at the start of a line,
as on a screen that scrolls too fast. A shell outlives its viewers and the server; whoever comes
next is shown the recent screen. It ends with its own exit or with the sandbox.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from capsule.errors import (
    CapacityError,
    CapsuleError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from capsule.link.exec_stream import ExecStream, Gap
from capsule.link.link import AgentLink
from capsule.model import MIB, ExecId, ExecInfo, ExecRequest, Exit
from capsule.service import validate
from capsule.service.access import Access
from capsule.service.entry import Entry
from capsule.settings import brief

KEPT = MIB  # output the agent keeps; a viewer further behind misses the rest
REPLAY = 64 * 1024  # of it, what a new viewer is shown
MAX_VIEWERS = 16
MAX_SHELLS = 8

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)

ClosingCode = Literal["exited", "gone", "left", "unavailable"]


@dataclass(frozen=True, slots=True)
class Closing:
    """Why a viewer's stream ended."""

    code: ClosingCode
    message: str
    exit: Exit | None = None


class TerminalSession:
    """One viewer of one shell: an async iterator of output, beginning with the recent screen.

    It ends with the shell or with the sandbox; `closing` then says why. Leaving (`aclose`) does
    not end the shell. An async context manager.
    """

    def __init__(
        self,
        terminals: Terminals,
        entry: Entry,
        link: AgentLink,
        name: str,
        stream: ExecStream,
        skip: bool,
    ) -> None:
        self.name = name
        self.closing: Closing | None = None
        self._terminals = terminals
        self._entry = entry
        self._link = link
        self._stream = stream
        self._skip = skip  # what comes next begins in the middle of a line

    @property
    def exec_id(self) -> ExecId:
        return self._stream.exec_id

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while self.closing is None:
            data = await self._next()
            if data:
                return data
        raise StopAsyncIteration

    async def _next(self) -> bytes:
        try:
            item = await self._stream.__anext__()
        except StopAsyncIteration:
            self._shell_ended()
            return b""
        except UnavailableError as error:
            await self._lost(error)
            return b""
        self._terminals.access.touch(self._entry)
        if isinstance(item, Gap):
            self._skip = True
            return b""
        return self._from_line_start(item.data)

    def _from_line_start(self, data: bytes) -> bytes:
        if self._skip:
            self._skip = False
            return data[data.find(b"\n") + 1 :]
        return data

    def _shell_ended(self) -> None:
        exit = self._stream.exit
        assert exit is not None
        how = f"signal {exit.signal}" if exit.signal else f"code {exit.exit_code}"
        self._close("exited", f"the shell ended with {how}", exit)

    async def _lost(self, error: UnavailableError) -> None:
        why = await self._terminals.access.pulse.explain(self._entry, error, self._link)
        gone = isinstance(why, GoneError) or why is not error
        self._close("gone" if gone else "unavailable", why.message)

    def _close(self, code: ClosingCode, message: str, exit: Exit | None = None) -> None:
        if self.closing is None:
            self.closing = Closing(code, message, exit)

    async def send(self, data: bytes) -> None:
        """What the viewer types. Nothing happens once the shell has ended."""
        self._terminals.access.touch(self._entry)
        if self.closing is None and self._stream.exit is None:
            await self._stream.send(data)

    async def resize(self, rows: int, cols: int) -> None:
        validate.screen(rows, cols)
        if self.closing is None and self._stream.exit is None:
            await self._stream.resize(rows, cols)

    async def aclose(self) -> None:
        """Idempotent."""
        self._close("left", "the viewer left")
        self._terminals.left(self)
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Terminals:
    def __init__(self, access: Access) -> None:
        self.access = access
        self._viewers: dict[tuple[str, str], set[TerminalSession]] = {}

    async def join(self, id: str, name: str, rows: int, cols: int) -> TerminalSession:
        _check_name(name)
        validate.screen(rows, cols)
        visit = self.access.visit(id)
        place = (visit.entry.id, name)
        async with visit.entry.joining, visit as link:
            if len(self._viewers.get(place, ())) >= MAX_VIEWERS:
                raise CapacityError(
                    f"terminal {name} has {MAX_VIEWERS} viewers, limit {MAX_VIEWERS}",
                    hint="close one",
                    limit=MAX_VIEWERS,
                )
            stream, skip = await self._stream(visit.entry, link, name, rows, cols)
            session = TerminalSession(self, visit.entry, link, name, stream, skip)
            self._viewers.setdefault(place, set()).add(session)
        return session

    def left(self, session: TerminalSession) -> None:
        place = (session._entry.id, session.name)
        viewers = self._viewers.get(place, set())
        viewers.discard(session)
        if not viewers:
            self._viewers.pop(place, None)

    async def _stream(
        self, entry: Entry, link: AgentLink, name: str, rows: int, cols: int
    ) -> tuple[ExecStream, bool]:
        shells = [x for x in await link.execs() if x.running and x.id.startswith("t-")]
        found = next((x for x in shells if x.id.rpartition("-")[0] == f"t-{name}"), None)
        if found is not None:
            return await self._join(link, found, rows, cols)
        if len(shells) >= MAX_SHELLS:
            raise CapacityError(
                f"sandbox {entry.id} has {len(shells)} shells, limit {MAX_SHELLS}",
                hint="end one, or join one by its name",
                limit=MAX_SHELLS,
            )
        return await _start(entry, link, name, rows, cols), False

    async def _join(
        self, link: AgentLink, shell: ExecInfo, rows: int, cols: int
    ) -> tuple[ExecStream, bool]:
        offset = max(0, shell.stdout_bytes - REPLAY)
        stream = await link.attach(shell.id, stdout=offset, input=True)
        try:
            await stream.resize(rows, cols)
        except CapsuleError:
            pass  # it may have ended this moment; reading will tell
        except BaseException:
            await stream.aclose()
            raise
        return stream, offset > 0


async def _start(entry: Entry, link: AgentLink, name: str, rows: int, cols: int) -> ExecStream:
    request = ExecRequest(
        argv=entry.template.shell,
        id=ExecId(f"t-{name}-{secrets.token_hex(4)}"),
        env={"TERM": "xterm-256color", **entry.environ},
        cwd=entry.template.user.home,
        timeout=0.0,
        stdin=True,
        tty=True,
        rows=rows,
        cols=cols,
        output_limit=KEPT,
        keep="tail",
    )
    try:
        return await link.exec(request)
    except NotFoundError:
        return await link.exec(replace(request, argv=("/bin/sh", "-l")))


def _check_name(name: str) -> None:
    """It becomes a part of the exec's id, by which the shell is found again."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidError(
            f"session: {brief(name)} is no name, allowed: 1 to 32 letters, digits, '_' and '-'",
            field="session",
        )
