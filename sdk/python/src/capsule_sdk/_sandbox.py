"""A sandbox, as users hold it: what both `Capsule` and `AsyncCapsule` can do, written once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from . import _contexts
from ._arguments import millis, whole, wrong
from ._contexts import AsyncContext, Context, ContextOptions, RunOptions
from ._drivers import AsyncDriver, SyncDriver
from ._exec import AsyncExecStream, ExecOptions, ExecStream, exec_params, input_params
from ._files import FileMethods
from ._flow import Flow, method
from ._follow import Follower
from ._rpc import new_key
from ._runs import ContextInfo, RunResult
from .errors import CapsuleError, GoneError, InvalidError, NotFoundError
from .terminal import AsyncTerminal, Terminal
from .values import (
    ExecInfo,
    ExecResult,
    FileChange,
    Metrics,
    SandboxInfo,
    SnapshotInfo,
    StepInfo,
)

Command = Sequence[str] | str  # an argv, or a line for the sandbox's shell

# An exec without a timeout of its own gets the server's, which we do not know: up to an hour.
_SLACK = 30.0
_LONGEST_EXEC = 3600.0 + _SLACK


class StartOptions(ExecOptions, total=False):
    stdin_open: bool  # keep its standard input open for `send_input`
    tty: tuple[int, int] | None  # rows and columns: give it a terminal


class SandboxMethods(FileMethods):
    """`info` is the sandbox as it was when it was last asked about; `refresh` asks again."""

    def __init__(self, info: SandboxInfo) -> None:
        super().__init__(info.id)
        self.info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} ({self.info.template}, {self.info.state})>"

    @method
    def run(
        self, code: str, *, language: str | None = None, **options: Unpack[ExecOptions]
    ) -> Flow[ExecResult]:
        """Run code in one of the template's languages and wait for its end.

        What the program did (exit code, timeout, out of memory) is in the result; see `check`.
        """
        return (yield from self._execute("run", options, code=code, language=language))

    @method
    def exec(self, cmd: Command, **options: Unpack[ExecOptions]) -> Flow[ExecResult]:
        """Run a program and wait for its end. A string goes to the sandbox's shell."""
        return (yield from self._execute("exec", options, cmd=_command(cmd)))

    def _execute(self, name: str, options: ExecOptions, **what: Any) -> Flow[ExecResult]:
        params = {**what, **exec_params(options)}
        if params.get("idempotency_key") is None:
            params["idempotency_key"] = new_key()
        timeout = options.get("timeout")
        patience = _LONGEST_EXEC if timeout is None else timeout + _SLACK
        given = {**what, **options}
        return ExecResult.from_json(
            (yield from self._rpc(name, params, timeout=patience, arguments=given))
        )

    @method
    def run_code(
        self, code: str, *, language: str | None = None, **options: Unpack[RunOptions]
    ) -> Flow[RunResult]:
        """Run code in the default context of a language, whose variables live on from call to
        call; see `context` for one of your own."""
        call = _contexts.run(self._driver, self.id, code, options, language=language)
        return (yield from call)

    def _list_contexts(self) -> Flow[list[ContextInfo]]:
        body = yield from _contexts.ask(self._driver, "list", {"id": self.id})
        return [ContextInfo.from_json(each) for each in body["contexts"]]

    @method
    def batch(
        self,
        commands: Iterable[Command | Mapping[str, Any]],
        *,
        stop_on_error: bool = True,
    ) -> Flow[list[ExecResult]]:
        """Run several commands one after the other; fewer results where it stopped at a failure.

        A command is what `exec` takes, or a mapping with `cmd` (or `code`) and its options.
        """
        calls = [_batch_entry(command, f"commands[{n}].") for n, command in enumerate(commands)]
        params = {"commands": calls, "stop_on_error": stop_on_error}
        body = yield from self._rpc("batch", params, timeout=0, repeatable=False)
        return [ExecResult.from_json(result) for result in body["results"]]

    @method
    def execs(self) -> Flow[list[ExecInfo]]:
        """Programs that run now or ran lately."""
        body = yield from self._rpc("execs", {})
        return [ExecInfo.from_json(info) for info in body["execs"]]

    @method
    def kill(self, exec_id: str, signal: str = "KILL", *, grace: float = 0.0) -> Flow[bool]:
        """End a program and all it started; True if it was still running."""
        given = {"exec_id": exec_id, "signal": signal, "grace": grace}
        wait = millis("grace", grace, least=0)
        params = {"exec_id": exec_id, "signal": signal, "grace_ms": wait}
        body = yield from self._rpc("kill", params, arguments=given)
        return bool(body["running"])

    @method
    def send_input(self, exec_id: str, data: str | bytes, *, eof: bool = False) -> Flow[None]:
        """Write to a program's standard input."""
        params = {"exec_id": exec_id, **input_params(data, eof=eof)}
        yield from self._rpc("sendInput", params, repeatable=False)

    @method
    def refresh(self) -> Flow[SandboxInfo]:
        """Ask how the sandbox is now, and keep it as `info`."""
        return (yield from self._inform("get", {}))

    @method
    def set_timeout(self, ttl: float) -> Flow[SandboxInfo]:
        """End the sandbox `ttl` seconds from now."""
        return (yield from self._inform("setTimeout", {"ttl_ms": millis("ttl", ttl)}, ttl=ttl))

    @method
    def keep_alive(self) -> Flow[SandboxInfo]:
        """Let it live for its whole TTL from now on."""
        return (yield from self._inform("keepAlive", {}))

    @method
    def pause(self) -> Flow[SandboxInfo]:
        """Let everything in it stand still; memory and processes are kept until `resume`."""
        return (yield from self._inform("pause", {}))

    @method
    def resume(self) -> Flow[SandboxInfo]:
        """Let a paused sandbox go on."""
        return (yield from self._inform("resume", {}))

    @method
    def reset(self) -> Flow[SandboxInfo]:
        """As new, under the same id: programs, files and sessions are gone when this returns.

        Its TTL goes on. When it raises, `info` and the sandbox are as they were.
        """
        return (yield from self._inform("reset", {}))

    @method
    def snapshot(
        self, name: str, *, metadata: Mapping[str, str] | None = None
    ) -> Flow[SnapshotInfo]:
        """Keep its files, as they are at one moment, under a name: `create(snapshot=name)`."""
        params = {"name": name, "metadata": metadata}
        body = yield from self._rpc("snapshot", params, timeout=0, repeatable=False)
        return SnapshotInfo.from_json(body)

    @method
    def steps(self) -> Flow[list[StepInfo]]:
        """The restore points that execs have left (`create(checkpoint="each")`), oldest first."""
        body = yield from self._rpc("steps", {})
        return [StepInfo.from_json(step) for step in body["steps"]]

    @method
    def diff(self, old: int, new: int | None = None) -> Flow[list[FileChange]]:
        """What changed from one step to another; to the last, if none is named."""
        params = {"from": whole("old", old, 0, 2**31), "to": new}
        body = yield from self._rpc("diff", params)
        return [FileChange.from_json(change) for change in body["changes"]]

    @method
    def undo(self, to: int) -> Flow[SandboxInfo]:
        """Go back to the files of a step. Programs are ended, and later steps forgotten."""
        return (yield from self._inform("undo", {"to": whole("to", to, 0, 2**31)}))

    def _fork(self, count: int, at: int | None) -> Flow[list[SandboxInfo]]:
        params = {"count": whole("count", count, 1, 20), "at": at}
        body = yield from self._rpc("fork", params, timeout=0, repeatable=False)
        return [SandboxInfo.from_json(info) for info in body["sandboxes"]]

    @method
    def metrics(self) -> Flow[Metrics]:
        """What it uses: CPU time, memory, disk, processes."""
        return Metrics.from_json((yield from self._rpc("metrics", {})))

    @method
    def delete(self) -> Flow[None]:
        """End it and everything in it. Deleting one that is gone already is no error."""
        with contextlib.suppress(NotFoundError, GoneError):
            yield from self._rpc("delete", {})

    def _inform(self, name: str, params: Mapping[str, Any], **given: Any) -> Flow[SandboxInfo]:
        self.info = SandboxInfo.from_json((yield from self._rpc(name, params, arguments=given)))
        return self.info

    def _follower(
        self, start: Mapping[str, Any] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> Follower:
        retries = self._driver.target.retries
        return Follower(self.id, start or {}, arguments or {}, retries=retries)


def _command(cmd: Command) -> str | list[str]:
    return cmd if isinstance(cmd, str) else list(cmd)


def _batch_entry(command: Command | Mapping[str, Any], of: str) -> dict[str, Any]:
    if not isinstance(command, Mapping):
        return {"cmd": _command(command)}
    what = {key: command[key] for key in ("cmd", "code", "language") if key in command}
    options: Any = {key: value for key, value in command.items() if key not in what}
    params = {**what, **exec_params(options, of)}
    return {key: value for key, value in params.items() if value is not None}


def start_params(
    cmd: Command | None, code: str | None, language: str | None, options: StartOptions
) -> dict[str, Any]:
    if (cmd is None) == (code is None):
        raise InvalidError("give either a command or code=…")
    params = exec_params(options)
    if (tty := options.get("tty")) is not None:
        params["tty"] = _size(tty)
    what = {"code": code, "language": language} if cmd is None else {"cmd": _command(cmd)}
    return {**what, **params}


def _size(tty: Any) -> dict[str, int]:
    if not isinstance(tty, Sequence) or len(tty) != 2:
        raise wrong("tty", tty, "is no pair of rows and columns")
    return {"rows": whole("tty[0]", tty[0], 1, 4096), "cols": whole("tty[1]", tty[1], 1, 4096)}


class Capsule(SandboxMethods):
    """A sandbox on the server. As a context manager it is deleted at the end."""

    _driver: SyncDriver

    def __init__(self, driver: SyncDriver, info: SandboxInfo) -> None:
        super().__init__(info)
        self._driver = driver

    def stream(
        self,
        cmd: Command | None = None,
        *,
        code: str | None = None,
        language: str | None = None,
        **options: Unpack[StartOptions],
    ) -> ExecStream:
        """Output while it comes: `for event in capsule.stream([...])`. Starts when iterated."""
        params = start_params(cmd, code, language, options)
        given = {"cmd": cmd, "code": code, "language": language, **options}
        return ExecStream(self._driver, self._follower(params, given))

    def start(
        self,
        cmd: Command | None = None,
        *,
        code: str | None = None,
        language: str | None = None,
        **options: Unpack[StartOptions],
    ) -> ExecStream:
        """Start a program and go on; it keeps running whether or not anybody reads its output."""
        stream = self.stream(cmd, code=code, language=language, **options)
        self._driver.run(stream._begin())
        return stream

    def attach(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> ExecStream:
        """Read a program's output from these offsets on, whoever started it."""
        stream = ExecStream(self._driver, self._follower())
        return stream._resume(exec_id, stdout=stdout, stderr=stderr)

    def fork(self, count: int = 1, *, at: int | None = None) -> list[Capsule]:
        """So many sandboxes with its files, of now or of a step; all of them or none.

        Programs are not copied.
        """
        return [Capsule(self._driver, info) for info in self._driver.run(self._fork(count, at))]

    def context(self, language: str | None = None, **options: Unpack[ContextOptions]) -> Context:
        """A live interpreter of its own; `with` ends it at the end."""
        made = self._driver.run(_contexts.create(self._driver, self.id, language, options))
        return Context(self._driver, self.id, made)

    def contexts(self) -> list[Context]:
        """Every context of this sandbox, oldest first."""
        found = self._driver.run(self._list_contexts())
        return [Context(self._driver, self.id, info) for info in found]

    def connect_terminal(self, *, name: str = "main", rows: int = 24, cols: int = 80) -> Terminal:
        """A shell in the sandbox; the same `name` leads back to the same shell."""
        return Terminal.open(self._driver.target, self.id, name=name, rows=rows, cols=cols)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.delete()
            return
        with contextlib.suppress(CapsuleError):  # the TTL ends it; do not hide the first error
            self.delete()


class AsyncCapsule(SandboxMethods):
    """A sandbox on the server. As an async context manager it is deleted at the end."""

    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver, info: SandboxInfo) -> None:
        super().__init__(info)
        self._driver = driver

    def stream(
        self,
        cmd: Command | None = None,
        *,
        code: str | None = None,
        language: str | None = None,
        **options: Unpack[StartOptions],
    ) -> AsyncExecStream:
        """Output while it comes: `async for event in capsule.stream(…)`. Starts when iterated."""
        params = start_params(cmd, code, language, options)
        given = {"cmd": cmd, "code": code, "language": language, **options}
        return AsyncExecStream(self._driver, self._follower(params, given))

    async def start(
        self,
        cmd: Command | None = None,
        *,
        code: str | None = None,
        language: str | None = None,
        **options: Unpack[StartOptions],
    ) -> AsyncExecStream:
        """Start a program and go on; it keeps running whether or not anybody reads its output."""
        stream = self.stream(cmd, code=code, language=language, **options)
        await self._driver.run(stream._begin())
        return stream

    def attach(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> AsyncExecStream:
        """Read a program's output from these offsets on, whoever started it."""
        stream = AsyncExecStream(self._driver, self._follower())
        return stream._resume(exec_id, stdout=stdout, stderr=stderr)

    async def fork(self, count: int = 1, *, at: int | None = None) -> list[AsyncCapsule]:
        """So many sandboxes with its files, of now or of a step; all of them or none.

        Programs are not copied.
        """
        found = await self._driver.run(self._fork(count, at))
        return [AsyncCapsule(self._driver, info) for info in found]

    async def context(
        self, language: str | None = None, **options: Unpack[ContextOptions]
    ) -> AsyncContext:
        """A live interpreter of its own; `async with` ends it at the end."""
        made = await self._driver.run(_contexts.create(self._driver, self.id, language, options))
        return AsyncContext(self._driver, self.id, made)

    async def contexts(self) -> list[AsyncContext]:
        """Every context of this sandbox, oldest first."""
        found = await self._driver.run(self._list_contexts())
        return [AsyncContext(self._driver, self.id, info) for info in found]

    async def connect_terminal(
        self, *, name: str = "main", rows: int = 24, cols: int = 80
    ) -> AsyncTerminal:
        """A shell in the sandbox; the same `name` leads back to the same shell."""
        target = self._driver.target
        return await AsyncTerminal.open(target, self.id, name=name, rows=rows, cols=cols)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.delete()
            return
        with contextlib.suppress(CapsuleError):
            await self.delete()
