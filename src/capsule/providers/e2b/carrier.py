"""The stream to a relay in a cloud's sandbox: a program of the SDK's, with its stdin and stdout.

The SDK gives output as text, so the relay armours what it says: lines of base64 (spec/relay.md).
Input is bytes as it is. One request carries all that has come together while the one before was
under way, and each is answered, so a slow cloud slows us down and nothing piles up.

    Carrier._watch     owned by the Carrier, ended by `aclose`: waits for the program's end
"""

from __future__ import annotations

import asyncio
from collections import deque

from capsule.errors import CapsuleError, UnavailableError
from capsule.link.protocol import ProtocolError
from capsule.providers.cleanup import finish
from capsule.providers.e2b.cloud import Machine, Running
from capsule.providers.relay.lines import Lines

MOST_HELD = 4 * 1024 * 1024  # bytes that nobody has taken yet
LONGEST_COMPLAINT = 500
END_WITHIN = 2.0


class Carrier:
    def __init__(self) -> None:
        self._running: Running | None = None
        self._watching: asyncio.Task[None] | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._lines = Lines()
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._complaint = ""
        self._reason: str | None = None

    @classmethod
    async def start(cls, machine: Machine, command: str, user: str | None) -> Carrier:
        made = cls()
        made._running = await machine.start(
            command, user, stdin=True, on_stdout=made._hear, on_stderr=made._complain
        )
        made._watching = asyncio.create_task(made._watch())
        return made

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """As much as there is: no less than a frame of the relay's is of use."""
        while not self._pieces:
            if self._reason is not None:
                raise UnavailableError(f"the relay ended: {self._reason}")
            self._arrival.clear()
            await self._arrival.wait()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        self._room.set()
        return data

    async def send(self, data: bytes) -> None:
        assert self._running is not None
        if self._reason is not None:
            raise UnavailableError(f"the relay ended: {self._reason}")
        try:
            await self._running.send(data)
        except UnavailableError:
            raise
        except CapsuleError as exc:
            raise UnavailableError(exc.message) from exc

    async def aclose(self) -> None:
        self._end("it was closed")
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._running is not None:
            await finish(self._running.kill(within=END_WITHIN), "relay", budget=2 * END_WITHIN)

    async def _hear(self, text: str) -> None:
        try:
            piece = self._lines.feed(text)
        except ProtocolError as exc:
            self._end(exc.message)
            return
        if piece:
            self._pieces.append(piece)
            self._held += len(piece)
            self._arrival.set()
        if self._held > MOST_HELD:
            self._room.clear()
            await self._room.wait()

    def _complain(self, text: str) -> None:
        self._complaint = (self._complaint + text)[-LONGEST_COMPLAINT:]

    async def _watch(self) -> None:
        assert self._running is not None
        try:
            over = await self._running.ended()
        except CapsuleError as exc:
            self._end(exc.message)
        else:
            self._end(self._complaint.strip() or f"exit code {over.code}")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._arrival.set()
        self._room.set()
