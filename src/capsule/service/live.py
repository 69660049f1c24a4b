"""An exec that a caller follows while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

import structlog

from capsule.errors import CapsuleError, InvalidError, UnavailableError
from capsule.link.exec_stream import ExecStream, Gap, Output
from capsule.model import ExecId, Exit, Stream
from capsule.service import validate
from capsule.service.permits import Permit

log = structlog.get_logger(__name__)

Explain = Callable[[UnavailableError], Awaitable[CapsuleError]]
Ended = Callable[[ExecStream], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class LiveExec:
    """Iterate for output; `exit` is set when that ends. Closing leaves the program running: what
    is due at its end (its session's report, its code's removal, who is told of it) and input not
    sent yet are then seen to by a task of the service.

    Iterating raises UnavailableError when the connection breaks (attach again from `offsets`) and
    GoneError when the sandbox was ended meanwhile; `exit` then stays None. One reader at a time.

    Holds the exec's permit until its end was seen or it is closed, and owns one task: the one that
    sends input too large to be sent before the program is read from.
    """

    def __init__(
        self,
        stream: ExecStream,
        *,
        explain: Explain,
        touch: Callable[[], None],
        permit: Permit | None = None,
        listens: bool = False,
    ) -> None:
        self._stream = stream
        self._explain = explain
        self._touch = touch
        self._permit = permit
        self._listens = listens  # and has no way in
        self._ended: Ended | None = None
        self._spawn: Spawn | None = None
        self._holds = True
        self._closed = False
        self._feeder: asyncio.Task[None] | None = None

    @property
    def exec_id(self) -> ExecId:
        return self._stream.exec_id

    @property
    def pid(self) -> int:
        return self._stream.pid

    @property
    def exit(self) -> Exit | None:
        return self._stream.exit

    @property
    def offsets(self) -> dict[Stream, int]:
        """How far each stream was read: where to attach again."""
        return self._stream.offsets

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | Gap:
        try:
            item = await self._stream.__anext__()
        except StopAsyncIteration:
            await self._end()
            raise
        except UnavailableError as error:
            raise await self._explain(error) from error
        self._touch()
        return item

    async def _end(self) -> None:
        self._release()
        ended, self._ended = self._ended, None
        if ended is not None:
            await ended(self._stream)

    def on_end(self, ended: Ended, spawn: Spawn, *, holds: bool = True) -> None:
        """What is to be done once its exit was seen, and who sees it when the caller leaves.
        `holds`: it keeps its permit until then."""
        self._ended = ended
        self._spawn = spawn
        self._holds = holds

    def feed(self, data: bytes) -> None:
        """Send all of the program's input, and its end, while the caller reads."""
        self._feeder = asyncio.create_task(self._feed(data))

    async def _feed(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
            await self._stream.send_eof()
        except CapsuleError:
            pass  # it ended without reading all; or its reader learns that the connection broke

    async def send(self, data: bytes) -> None:
        await self._way_in().send(data)

    async def send_eof(self) -> None:
        await self._way_in().send_eof()

    async def signal(self, name: str) -> None:
        await self._way_in().signal(validate.signal(name))

    async def resize(self, rows: int, cols: int) -> None:
        validate.screen(rows, cols)
        await self._way_in().resize(rows, cols)

    def _way_in(self) -> ExecStream:
        """Raises InvalidError."""
        if self._listens:
            raise InvalidError(
                f"exec {self.exec_id} was attached to without input",
                hint="attach again, with input",
                field="input",
            )
        self._touch()
        return self._stream

    def _release(self) -> None:
        if self._permit is not None:
            self._permit.release()

    async def aclose(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._spawn is not None and self.exit is None and self._ended is not None:
            if not self._holds:
                self._release()
            self._spawn(self._see_off(), f"see off exec {self.exec_id}")
        else:
            await self._let_go()

    async def _see_off(self) -> None:
        try:
            async for _ in self._stream:
                pass
            await self._end()
        except UnavailableError as error:  # its box is gone, or does not answer
            log.debug("end of an exec not seen", id=self.exec_id, reason=error.message)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        self._release()
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait({self._feeder})
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
