"""Following a program's output. Offsets are kept here, so a dropped connection costs nothing."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self, TypedDict

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Call, Emit, Emitting, Flow, Handle, Open, Read, Sleep, drain, method
from ._rpc import accepted, new_key, rpc
from ._sse import Decoder, ServerEvent
from .errors import UnavailableError, from_json
from .values import Event, ExecResult, Exit, Gap, Output

# How long to keep knocking after the connection dropped: a server that restarts adopts its
# sandboxes, and its programs' output is still there.
RECONNECT_WAITS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0)


class ExecOptions(TypedDict, total=False):
    timeout: float | None  # seconds; the server's default is 30
    env: Mapping[str, str] | None
    cwd: str | None
    session: str | None  # carries environment and directory from call to call
    stdin: str | bytes | None
    output_limit: int | None  # bytes per stream
    on_limit: str | None  # "truncate" or "kill"


def exec_params(options: ExecOptions) -> dict[str, Any]:
    """The options in the wire's words: milliseconds, and base64 for what may not be text."""
    params: dict[str, Any] = dict(options)
    if (timeout := params.pop("timeout", None)) is not None:
        params["timeout_ms"] = round(timeout * 1000)
    if isinstance(stdin := params.get("stdin"), bytes):
        params["stdin"] = None
        params["stdin_base64"] = base64.b64encode(stdin).decode()
    return params


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
    """What one exec has said so far, as far as we have heard it."""

    def __init__(self, sandbox_id: str, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> None:
        self.path = f"/v1/sandboxes/{sandbox_id}/execs/{exec_id}/stream"
        self.exit: Exit | None = None
        self._first, self._second = Joiner("stdout"), Joiner("stderr")
        self._first.offset, self._second.offset = stdout, stderr

    def follow(self) -> Emitting[Event]:
        """Emit events up to the exit; when the connection drops, go on where it stopped."""
        tries = 0
        while self.exit is None:
            if tries:
                yield Sleep(RECONNECT_WAITS[tries - 1])
            before = self._position
            try:
                yield from self._listen()
            except UnavailableError:
                if tries == len(RECONNECT_WAITS):
                    raise
            tries = 1 if self._position != before else tries + 1

    @property
    def _position(self) -> tuple[int, int]:
        return self._first.offset, self._second.offset

    def _listen(self) -> Emitting[Event]:
        """One connection, until it ends. Ending without an exit is a dropped connection."""
        stdout, stderr = self._position
        path = f"{self.path}?encoding=base64&stdout={stdout}&stderr={stderr}"
        handle: Handle = yield Open(Call("GET", path, headers={"Accept": "text/event-stream"}))
        yield from accepted(handle)
        decoder = Decoder()
        while self.exit is None:
            chunk: bytes = yield Read(handle)
            if not chunk:
                raise UnavailableError("the server ended the stream before the program ended")
            for event in decoder.feed(chunk):
                for said in self._hear(event):
                    yield Emit(said)

    def _hear(self, event: ServerEvent) -> Iterator[Event]:
        body = event.json()
        match event.event:
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


class ExecMethods:
    """A program in a sandbox: iterate for its output, `wait` for its end. It runs on without us.

    `exec_id` is known as soon as it has started, and `attach(exec_id)` finds it again later.
    """

    _driver: SyncDriver | AsyncDriver

    def __init__(self, sandbox_id: str, start: Mapping[str, Any] | None = None) -> None:
        self._sandbox_id = sandbox_id
        self._start = start
        self._follower: Follower | None = None
        self.exec_id = ""

    @property
    def exit(self) -> Exit | None:
        """How it ended, once that has been read."""
        return self._follower.exit if self._follower else None

    @method
    def wait(self) -> Flow[ExecResult]:
        """Read on to its end. `stdout` and `stderr` hold what was not read before."""
        parts: dict[str, list[str]] = {"stdout": [], "stderr": []}

        def take(event: Event) -> None:
            if isinstance(event, Output):
                parts["stderr" if event.stream == "stderr" else "stdout"].append(event.text)

        yield from drain(self._events(), take)
        stdout, stderr = ("".join(parts[name]) for name in ("stdout", "stderr"))
        return ExecResult(**_fields(self.exit), stdout=stdout, stderr=stderr)

    @method
    def send_input(self, data: str | bytes, *, eof: bool = False) -> Flow[None]:
        """Write to its standard input, which must have been kept open (`stdin_open=True`)."""
        params: dict[str, Any] = {"data": data, "eof": eof}
        if isinstance(data, bytes):
            params |= {"data": base64.b64encode(data).decode(), "encoding": "base64"}
        yield from self._ask("sendInput", repeatable=False, **params)

    @method
    def close_input(self) -> Flow[None]:
        """End of its standard input."""
        yield from self._ask("sendInput", eof=True)

    @method
    def kill(self, signal: str = "KILL", *, grace: float = 0.0) -> Flow[bool]:
        """End it and all it started; True if it was still running.

        Another signal than KILL is only sent; what is left after `grace` seconds is killed.
        """
        reply = yield from self._ask("kill", signal=signal, grace_ms=round(grace * 1000))
        return bool(reply["running"])

    @method
    def resize(self, rows: int, cols: int) -> Flow[None]:
        """Tell its terminal (`tty=…`) the new size."""
        yield from self._ask("resize", rows=rows, cols=cols)

    def _ask(self, name: str, *, repeatable: bool = True, **params: Any) -> Flow[Any]:
        yield from self._begin()
        ids = {"id": self._sandbox_id, "exec_id": self.exec_id}
        retries = self._driver.target.retries
        call = rpc(f"sandbox.v1.{name}", {**ids, **params}, retries=retries, repeatable=repeatable)
        return (yield from call)

    def _begin(self) -> Flow[None]:
        if self._start is None:
            return
        params = {"id": self._sandbox_id, "idempotency_key": new_key(), **self._start}
        reply = yield from rpc("sandbox.v1.start", params, retries=self._driver.target.retries)
        self._start = None
        self._resume(reply["exec_id"])

    def _resume(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Self:
        self.exec_id = exec_id
        self._follower = Follower(self._sandbox_id, exec_id, stdout=stdout, stderr=stderr)
        return self

    def _events(self) -> Emitting[Event]:
        yield from self._begin()
        assert self._follower is not None
        yield from self._follower.follow()


def _fields(exit: Exit | None) -> dict[str, Any]:
    assert exit is not None, "the stream ends with an exit or an error"
    return {name: getattr(exit, name) for name in Exit.__dataclass_fields__}


class ExecStream(ExecMethods):
    _driver: SyncDriver

    def __init__(
        self, driver: SyncDriver, sandbox_id: str, start: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(sandbox_id, start)
        self._driver = driver

    def __iter__(self) -> Iterator[Event]:
        return self._driver.iterate(self._events())


class AsyncExecStream(ExecMethods):
    _driver: AsyncDriver

    def __init__(
        self, driver: AsyncDriver, sandbox_id: str, start: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(sandbox_id, start)
        self._driver = driver

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._driver.iterate(self._events())
