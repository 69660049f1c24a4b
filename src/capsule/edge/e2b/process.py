"""`process.Process`: programs and terminals of a sandbox, as E2B's SDKs run them.

A process is an exec whose output flows: whoever follows gets all of it, nobody else does. It goes
on when its client leaves, until its own end or that of the time the client gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.body import chunks, unhurried
from capsule.edge.e2b.connect import STREAM, RpcError, decode, end, envelope, envelopes
from capsule.edge.e2b.control_views import template_id
from capsule.edge.e2b.guests import Guest
from capsule.edge.e2b.process_table import Known, Selector, Table
from capsule.edge.e2b.rpc import (
    Call,
    Last,
    Opened,
    is_stream,
    other_type,
    refusal,
    streaming,
    timeout_of,
    unary,
)
from capsule.edge.errors import understand
from capsule.errors import (
    CapsuleError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    WrongStateError,
)
from capsule.link.exec_stream import Output
from capsule.model import Exit, Reason
from capsule.service import LiveExec, Service
from capsule.service.values import ExecCall, Sandbox, Terminal

PATH = "/process.Process/"
PING: dict[str, Any] = {"event": {"keepalive": {}}}
_AGAIN = 0.05  # seconds until a program that takes no input is offered it again; then longer, to
_SELDOM = 1.0
_INPUT_PATIENCE = 60.0  # seconds for a program to take its input, if the client says nothing
_MOST_PATIENCE = 600.0  # and whatever it says: nobody knows whether it still waits

# As Go calls them, and so E2B; others are "signal N".
_SIGNALS = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    5: "trace/breakpoint trap",
    6: "aborted",
    7: "bus error",
    8: "floating point exception",
    9: "killed",
    10: "user defined signal 1",
    11: "segmentation fault",
    12: "user defined signal 2",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
}


def told_of(sandbox: Sandbox) -> dict[str, str]:
    """Where they are, for programs that want to know."""
    ids = {"E2B_SANDBOX_ID": sandbox.id, "E2B_TEMPLATE_ID": template_id(sandbox)}
    return {"E2B_SANDBOX": "true", **ids}


class Config(msgspec.Struct):
    cmd: str = ""
    args: list[str] | None = None
    envs: dict[str, str] | None = None
    cwd: str | None = None


class Size(msgspec.Struct):
    cols: int = 80
    rows: int = 24


class Pty(msgspec.Struct):
    size: Size | None = None


class Start(msgspec.Struct):
    process: Config
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None  # unset: yes, as in SDKs that do not know it


class Input(msgspec.Struct):
    stdin: bytes | None = None
    pty: bytes | None = None


class Named(msgspec.Struct):
    process: Selector


class Update(Named):
    pty: Pty | None = None


class SendInput(Named):
    input: Input


class SendSignal(Named):
    signal: Literal["SIGNAL_SIGTERM", "SIGNAL_SIGKILL", 9, 15]


class InputData(msgspec.Struct):
    input: Input


class InputFrame(msgspec.Struct):
    """Of StreamInput: one of them is set. What is none of these keeps the connection alive."""

    start: Named | None = None
    data: InputData | None = None


class Nothing(msgspec.Struct):
    pass


class Processes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._table = Table(service)

    def calls(self) -> dict[tuple[str, str], Call]:
        found = {
            "List": unary(Nothing, self.list),
            "Start": streaming(Start, self.start, PING, ends=False),
            "Connect": streaming(Named, self.connect, PING),
            "Update": unary(Update, self.update),
            "SendInput": unary(SendInput, self.send_input),
            "StreamInput": self.stream_input,
            "SendSignal": unary(SendSignal, self.send_signal),
            "CloseStdin": unary(Named, self.close_stdin),
        }
        return {("POST", PATH + name): call for name, call in found.items()}

    async def list(self, guest: Guest, asked: Nothing, request: Request) -> Any:
        return {"processes": await self._table.running(guest.id)}

    async def start(self, guest: Guest, asked: Start, request: Request) -> Opened:
        config = asked.process
        args, envs = config.args or [], config.envs or {}
        size = None if asked.pty is None else asked.pty.size or Size()
        cwd = guest.path(config.cwd or "")
        call = ExecCall(
            cmd=(config.cmd, *args),
            env={**told_of(guest.sandbox), **guest.sandbox.env, **envs},
            user=guest.user,
            cwd=cwd,
            timeout=timeout_of(request),
        )
        try:
            live = await self._service.start(
                guest.id,
                call,
                stdin_open=size is None and asked.stdin is not False,
                tty=None if size is None else Terminal(size.rows or 24, size.cols or 80),
                flow=True,
            )
        except (NotFoundError, InvalidError) as error:
            if error.details.get("stage") == "chdir":
                raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist") from None
            raise RpcError("invalid_argument", error.message) from None
        except TooLargeError as error:
            more = (
                ": write it to a file, and run that" if error.details.get("field") == "cmd" else ""
            )
            raise RpcError("invalid_argument", error.message + more) from None
        told: dict[str, Any] = {"cmd": config.cmd, "args": args, "envs": envs}
        if config.cwd:
            told["cwd"] = config.cwd
        self._table.note(guest.id, Known(live.exec_id, live.pid, told, asked.tag))
        return Opened(_events(live, timed=True), held=live)

    async def connect(self, guest: Guest, asked: Named, request: Request) -> Opened:
        found = await self._table.find(guest.id, asked.process, ended=True)
        if found.exit is not None:
            replay = _replayed(found.pid, found.exit)
            return Opened(replay, held=replay)
        try:
            live = await self._service.attach(
                guest.id, found.id, stdout=found.stdout_bytes, stderr=found.stderr_bytes
            )
        except InvalidError:  # it has written more than is kept, and nothing of the rest will be
            live = await self._service.attach(guest.id, found.id)
            return Opened(_events(live, silent=True), held=live)
        return Opened(_events(live), held=live)

    async def update(self, guest: Guest, asked: Update, request: Request) -> Any:
        size = None if asked.pty is None else asked.pty.size

        async def resize(exec_id: str) -> None:
            if size is None:
                return
            try:
                await self._service.resize(guest.id, exec_id, size.rows, size.cols)
            except InvalidError as error:
                raise RpcError("internal", f"error resizing tty: {error.message}") from None

        return await self._on(guest, asked.process, resize)

    async def send_input(self, guest: Guest, asked: SendInput, request: Request) -> Any:
        within = timeout_of(request)
        return await self._on(
            guest, asked.process, lambda exec_id: self._type(guest, exec_id, asked.input, within)
        )

    async def close_stdin(self, guest: Guest, asked: Named, request: Request) -> Any:
        async def close(exec_id: str) -> None:
            info = await self._table.find(guest.id, asked.process)
            if info.tty:
                raise RpcError("unknown", "error closing stdin: tty assigned to process")
            try:
                await self._service.send_input(guest.id, exec_id, b"", eof=True)
            except InvalidError as error:
                raise RpcError("unknown", f"error closing stdin: {error.message}") from None

        return await self._on(guest, asked.process, close)

    async def send_signal(self, guest: Guest, asked: SendSignal, request: Request) -> Any:
        name = "KILL" if asked.signal in ("SIGNAL_SIGKILL", 9) else "TERM"

        async def send(exec_id: str) -> None:
            if not await self._service.kill(guest.id, exec_id, signal=name):
                raise NotFoundError("it has ended")

        return await self._on(guest, asked.process, send)

    async def stream_input(self, guest: Guest, request: Request) -> Response:
        """Input as it comes, and one answer at its end."""
        if not is_stream(request):
            return other_type(STREAM)
        unhurried(request)
        try:
            async with asyncio.timeout(timeout_of(request)):
                await self._take_input(guest, request)
        except TimeoutError:
            return refusal(RpcError("deadline_exceeded", "the stream's time is over"))
        except GoneError:
            raise
        except CapsuleError as error:
            return refusal(RpcError.of(understand(error)))
        except RpcError as error:
            return refusal(error)
        return Response(envelope({}) + end(), media_type=STREAM.decode())

    async def _take_input(self, guest: Guest, request: Request) -> None:
        to: Selector | None = None
        async for message in envelopes(chunks(request.receive)):
            frame = decode(message, InputFrame)
            if frame.start is not None:
                to = frame.start.process
                await self._table.find(guest.id, to)
            elif frame.data is not None:
                if to is None:
                    raise RpcError("invalid_argument", "the first message must be a start")
                input = frame.data.input
                await self._on(guest, to, lambda id, input=input: self._type(guest, id, input))  # type: ignore[misc]

    async def _type(
        self, guest: Guest, exec_id: str, input: Input, within: float | None = None
    ) -> None:
        """Waits for a program that takes its time to read."""
        where, data = ("tty", input.pty) if input.pty is not None else ("stdin", input.stdin)
        pause = _AGAIN
        try:
            async with asyncio.timeout(min(within or _INPUT_PATIENCE, _MOST_PATIENCE)):
                while True:
                    try:
                        return await self._service.send_input(guest.id, exec_id, data or b"")
                    except ConflictError:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _SELDOM)
        except InvalidError as error:
            raise RpcError("internal", f"error writing to {where}: {error.message}") from None
        except TimeoutError:
            raise RpcError("deadline_exceeded", "the program does not read its input") from None

    async def _on(
        self, guest: Guest, wanted: Selector, do: Callable[[str], Awaitable[None]]
    ) -> dict[str, Any]:
        """With the exec that is remembered, or else with the one the agent knows."""
        known = self._table.recall(guest.id, wanted)
        if known is not None:
            try:
                await do(known.exec_id)
                return {}
            except (NotFoundError, GoneError, WrongStateError):
                self._table.forget(guest.id, known.pid)
        found = await self._table.find(guest.id, wanted)
        try:
            await do(found.id)
        except (NotFoundError, GoneError):
            raise RpcError("not_found", f"{wanted} not found") from None
        return {}


async def _events(
    live: LiveExec, *, timed: bool = False, silent: bool = False
) -> AsyncGenerator[bytes, None]:
    """`timed`: its timeout is that of this very stream. `silent`: only its start and end."""
    async with live:
        yield envelope({"event": {"start": {"pid": live.pid}}})
        async for item in live:
            if isinstance(item, Output) and not silent:
                yield envelope({"event": {"data": {item.stream.value: item.data}}})
        assert live.exit is not None  # the iteration ends with it, or raises
        if timed and live.exit.reason is Reason.TIMED_OUT:
            raise RpcError("deadline_exceeded", "the process did not end in time")
        yield Last(envelope({"event": {"end": ending(live.exit)}}) + end())


async def _replayed(pid: int, exit: Exit) -> AsyncGenerator[bytes, None]:
    yield envelope({"event": {"start": {"pid": pid}}})
    yield envelope({"event": {"end": ending(exit)}})


def ending(exit: Exit) -> Mapping[str, Any]:
    """What is zero or false is left out, as in all of Connect's JSON."""
    if exit.signal:
        status = f"signal: {_SIGNALS.get(exit.signal, f'signal {exit.signal}')}"
        return {"exitCode": -1, "status": status, "error": status}
    status = f"exit status {exit.exit_code}"
    if exit.exit_code == 0:
        return {"exited": True, "status": status}
    return {"exitCode": exit.exit_code, "exited": True, "status": status, "error": status}
