"""Following a program's output. Offsets are kept here, so a dropped connection costs nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from ._flow import Call, Emit, Emitting, Handle, Open, Read, Sleep
from ._rpc import JSON_HEADERS, LONGEST_WAIT, accepted, naming, new_key, to_json
from ._sse import Decoder, ServerEvent
from .errors import CapacityError, UnavailableError, from_json
from .values import Event, Exit, Gap, Output

# How long to keep knocking after the connection dropped: a server that restarts adopts its
# sandboxes, and its programs' output is still there.
RECONNECT_WAITS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0)


class Joiner:
    """One stream's position; holds back the bytes of a character that is not complete yet."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.offset = 0  # of the next byte to come from the server
        self._held = b""

    def feed(self, offset: int, data: bytes) -> Iterator[Output | Gap]:
        if offset > self.offset:
            yield from self.jump(offset)
        data = data[self.offset - offset :]
        if not data:
            return
        start = self.offset - len(self._held)
        self.offset += len(data)
        whole, self._held = _cut(self._held + data)
        if whole:
            yield Output(self.stream, start, whole)

    def jump(self, offset: int) -> Iterator[Output | Gap]:
        yield from self.flush()
        if offset > self.offset:
            gap = Gap(self.stream, self.offset, offset)
            self.offset = offset
            yield gap

    def flush(self) -> Iterator[Output]:
        if self._held:
            held, self._held = self._held, b""
            yield Output(self.stream, self.offset - len(held), held)


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Split off the beginning of a UTF-8 character at the end of `data`, at most three bytes."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if back < length:
                return data[:-back], data[-back:]
            break
    return data, b""


class Follower:
    """One exec: how to start it, if that is still to be done, and what we have heard of it."""

    def __init__(
        self,
        sandbox_id: str,
        start: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        retries: int,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.arguments = arguments  # what the caller gave, for errors to name
        self.exec_id = ""
        self.exit: Exit | None = None
        self._execs = f"/v1/sandboxes/{sandbox_id}/execs"
        self._start = {**start, "encoding": "base64"}
        if self._start.get("idempotency_key") is None:
            self._start["idempotency_key"] = new_key()
        self._retries = retries
        self._first, self._second = Joiner("stdout"), Joiner("stderr")

    @property
    def start(self) -> Mapping[str, Any]:
        """With its key: whoever sends it, and however often, starts it once."""
        return self._start

    def begun(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> None:
        self.exec_id = exec_id
        self._first.offset, self._second.offset = stdout, stderr

    def follow(self) -> Emitting[Event]:
        """Emit events up to the exit; when the connection drops, go on where it stopped."""
        tries = 0
        while self.exit is None:
            before = self._position
            try:
                yield from naming(self._listen(), self.arguments)
            except (UnavailableError, CapacityError) as error:
                tries = 0 if self._position != before else tries
                if tries >= (len(RECONNECT_WAITS) if self.exec_id else self._retries):
                    raise
                yield Sleep(_wait(error, tries))
                tries += 1

    @property
    def _position(self) -> tuple[str, int, int]:
        return self.exec_id, self._first.offset, self._second.offset

    def _listen(self) -> Emitting[Event]:
        """One connection, until it ends. Ending without an exit is a dropped connection."""
        handle: Handle = yield Open(self._call())
        yield from accepted(handle)
        decoder = Decoder()
        while self.exit is None:
            chunk: bytes = yield Read(handle)
            if not chunk:
                raise UnavailableError("the server ended the stream before the program ended")
            for event in decoder.feed(chunk):
                for said in self._hear(event):
                    yield Emit(said)

    def _call(self) -> Call:
        if not self.exec_id:
            given = {key: value for key, value in self._start.items() if value is not None}
            headers = {"Accept": "text/event-stream", **JSON_HEADERS}
            return Call("POST", self._execs, to_json(given, self.arguments), headers)
        _, stdout, stderr = self._position
        query = f"encoding=base64&stdout={stdout}&stderr={stderr}"
        path = f"{self._execs}/{quote(self.exec_id, safe='')}/stream?{query}"
        return Call("GET", path, headers={"Accept": "text/event-stream"})

    def _hear(self, event: ServerEvent) -> Iterator[Event]:
        body = event.json()
        match event.event:
            case "started":
                self.exec_id = body["exec_id"]
            case "stdout" | "stderr" | "pty":
                joiner = self._second if event.event == "stderr" else self._first
                joiner.stream = event.event
                yield from joiner.feed(body["offset"], base64.b64decode(body["data"]))
            case "gap":
                joiner = self._second if body["stream"] == "stderr" else self._first
                yield from joiner.jump(body["end"])
            case "exit":
                yield from self._first.flush()
                yield from self._second.flush()
                self.exit = Exit.from_json(body)
                yield self.exit
            case "error":
                raise from_json(body)


def _wait(error: UnavailableError | CapacityError, tries: int) -> float:
    if isinstance(error, CapacityError):
        return min(max(error.retry_after, 0.05), LONGEST_WAIT)
    return RECONNECT_WAITS[tries]
