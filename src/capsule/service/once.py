"""Idempotency keys of execs: the same call again is the same exec.

An exec with a key has an id made from that key. Whoever comes again with it, even after the
server was killed, finds that exec in the agent and gets its result; the agent refuses to run an
id twice. Where the agent may have forgotten it the result is lost, and that is the answer: never
a second run, never an invented end.
"""

from __future__ import annotations

from dataclasses import replace

from capsule.errors import (
    CapacityError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from capsule.link.collect import Collected
from capsule.link.exec_stream import ExecStream, Output
from capsule.link.link import AgentLink
from capsule.model import ExecId, Stream
from capsule.service.admission import fingerprint
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.jobs import Call
from capsule.service.room import SMALL, Room
from capsule.service.store import Claim, Store, ended_scope
from capsule.settings import brief

AGENT_REMEMBERS = 256  # execs; see spec/agent-protocol.md

# After these the program was certainly not started.
NOT_STARTED = (InvalidError, NotFoundError, ForbiddenError, CapacityError, TooLargeError)


class Once:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def claim(self, entry: Entry, call: Call, exec_id: ExecId) -> bool:
        """Whether this call is the first with its key. Raises ConflictError."""
        assert call.idempotency_key is not None
        mark = fingerprint(replace(call, idempotency_key=None))
        mine = Claim(entry.id, call.idempotency_key, mark, exec_id, self._clock.now())
        held = await self._store.claim(mine)
        if held.fingerprint != mark:
            raise ConflictError(
                f"idempotency_key {brief(call.idempotency_key)} was used for another exec",
                hint="take a new key for a new exec",
                exec_id=held.target,
            )
        return held is mine

    async def release(self, entry: Entry, call: Call) -> None:
        """It was not started, so the key may be used again."""
        if call.idempotency_key is not None:
            await self._store.release(entry.id, call.idempotency_key)

    async def publishes(self, entry: Entry, call: Call, exec_id: ExecId) -> bool:
        """Whether this call is to publish the exec's end: with a key, the first that asks, and
        after a restart none of those that come later. Better twice than never, without a store."""
        if call.idempotency_key is None:
            return True
        mine = Claim(ended_scope(entry.id), exec_id, "", exec_id, self._clock.now())
        try:
            return await self._store.claim(mine) is mine
        except (UnavailableError, NoSpaceError):
            return True

    async def rejoin(
        self, link: AgentLink, exec_id: ExecId, *, input: bool = False
    ) -> ExecStream | None:
        """The exec that has this id. None: it was never started, and can be now.

        Raises GoneError when the agent does not remember it any more.
        """
        try:
            return await link.attach(exec_id, input=input)
        except GoneError:
            raise _lost(exec_id) from None
        except NotFoundError:
            # As long as it has not begun to forget, what it does not know it has not run.
            if len(await link.execs()) >= AGENT_REMEMBERS:
                raise _lost(exec_id) from None
            return None


async def gather(stream: ExecStream, room: Room, limit: int) -> Collected:
    """Everything an exec prints, to its end. `limit` is what bounded it when it was started."""
    left = SMALL
    parts: dict[Stream, list[bytes]] = {stream: [] for stream in Stream}
    async with stream:
        async for item in stream:
            if isinstance(item, Output):
                left -= len(item.data)
                if left < 0:
                    left += limit
                    await room.take(limit)
                parts[item.stream].append(item.data)
    assert stream.exit is not None
    stdout, stderr, pty = (b"".join(parts[s]) for s in (Stream.STDOUT, Stream.STDERR, Stream.PTY))
    return Collected(stream.exit, stdout or pty, stderr, stream.carry)


def _lost(exec_id: ExecId) -> GoneError:
    return GoneError(
        f"exec {exec_id} was started before, and its result is lost",
        hint="look at what it left behind; a new idempotency_key runs it again",
        exec_id=exec_id,
        lost=True,
    )
