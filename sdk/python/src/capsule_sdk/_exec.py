"""Programs in a sandbox: their options, and the handle of one that runs."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self, TypedDict

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, drain, method
from ._follow import Follower
from ._rpc import rpc
from .values import Event, ExecResult, Exit, Output


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


class ExecMethods:
    """A program in a sandbox: iterate for its output, `wait` for its end. It runs on without us.

    `exec_id` is known as soon as it has started, and `attach(exec_id)` finds it again later.
    """

    _driver: SyncDriver | AsyncDriver
    _sandbox_id: str
    _follower: Follower

    @property
    def exec_id(self) -> str:
        """ "" until it has started."""
        return self._follower.exec_id

    @property
    def exit(self) -> Exit | None:
        """How it ended, once that has been read."""
        return self._follower.exit

    @method
    def wait(self) -> Flow[ExecResult]:
        """Read on to its end. `stdout` and `stderr` hold what was not read before."""
        parts: dict[str, list[str]] = {"stdout": [], "stderr": []}

        def take(event: Event) -> None:
            if isinstance(event, Output):
                parts["stderr" if event.stream == "stderr" else "stdout"].append(event.text)

        yield from drain(self._follower.follow(), take)
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
        """Start it without listening. The key is the stream's own: it cannot start twice."""
        if self.exec_id:
            return
        params = {"id": self._sandbox_id, **self._follower.start}
        reply = yield from rpc("sandbox.v1.start", params, retries=self._driver.target.retries)
        self._follower.begun(reply["exec_id"])

    def _resume(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Self:
        self._follower.begun(exec_id, stdout=stdout, stderr=stderr)
        return self


def _fields(exit: Exit | None) -> dict[str, Any]:
    assert exit is not None, "the stream ends with an exit or an error"
    return {name: getattr(exit, name) for name in Exit.__dataclass_fields__}


class ExecStream(ExecMethods):
    _driver: SyncDriver

    def __init__(
        self, driver: SyncDriver, sandbox_id: str, start: Mapping[str, Any] | None = None
    ) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self._follower = Follower(sandbox_id, start, retries=driver.target.retries)

    def __iter__(self) -> Iterator[Event]:
        return self._driver.iterate(self._follower.follow())


class AsyncExecStream(ExecMethods):
    _driver: AsyncDriver

    def __init__(
        self, driver: AsyncDriver, sandbox_id: str, start: Mapping[str, Any] | None = None
    ) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self._follower = Follower(sandbox_id, start, retries=driver.target.retries)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._driver.iterate(self._follower.follow())
