"""Programs in a sandbox: their options, and the handle of one that runs."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, Self, TypedDict

from ._arguments import millis, whole, wrong
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
    user: str | None  # "root", or the name of the sandbox's user, who it is otherwise
    idempotency_key: str | None  # the same key and call: it runs once, and is answered twice


def exec_params(options: ExecOptions, of: str = "") -> dict[str, Any]:
    """The options in the wire's words: milliseconds, and base64 for what may not be text."""
    params: dict[str, Any] = dict(options)
    if (timeout := params.pop("timeout", None)) is not None:
        params["timeout_ms"] = millis(f"{of}timeout", timeout)
    if isinstance(stdin := params.get("stdin"), bytes):
        params["stdin"] = None
        params["stdin_base64"] = base64.b64encode(stdin).decode()
    return params


def input_params(data: str | bytes, *, eof: bool) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"data": base64.b64encode(data).decode(), "encoding": "base64", "eof": eof}
    return {"data": data, "eof": eof}


class ExecMethods:
    """A program in a sandbox: iterate for its output, `wait` for its end. It runs on without us.

    `exec_id` is known as soon as it has started, and `attach(exec_id)` finds it again later.
    """

    _driver: SyncDriver | AsyncDriver
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
        yield from self._ask("sendInput", input_params(data, eof=eof), repeatable=False)

    @method
    def close_input(self) -> Flow[None]:
        """End of its standard input."""
        yield from self._ask("sendInput", {"eof": True})

    @method
    def kill(self, signal: str = "KILL", *, grace: float = 0.0) -> Flow[bool]:
        """End it and all it started; True if it was still running.

        Another signal than KILL is only sent; what is left after `grace` seconds is killed.
        """
        params = {"signal": signal, "grace_ms": millis("grace", grace, least=0)}
        reply = yield from self._ask("kill", params, {"signal": signal, "grace": grace})
        return bool(reply["running"])

    @method
    def resize(self, rows: int, cols: int) -> Flow[None]:
        """Tell its terminal (`tty=…`) the new size."""
        yield from self._ask("resize", {"rows": rows, "cols": cols})

    def _ask(
        self,
        name: str,
        params: Mapping[str, Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        repeatable: bool = True,
    ) -> Flow[Any]:
        yield from self._begin()
        call = rpc(
            f"sandbox.v1.{name}",
            {"id": self._follower.sandbox_id, "exec_id": self.exec_id, **params},
            retries=self._driver.target.retries,
            repeatable=repeatable,
            arguments=arguments or params,
        )
        return (yield from call)

    def _begin(self) -> Flow[None]:
        """Start it without listening. The key is the stream's own: it cannot start twice."""
        if self.exec_id:
            return
        reply = yield from rpc(
            "sandbox.v1.start",
            {"id": self._follower.sandbox_id, **self._follower.start},
            retries=self._driver.target.retries,
            arguments=self._follower.arguments,
        )
        self._follower.begun(reply["exec_id"])

    def _resume(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Self:
        if not isinstance(exec_id, str) or not exec_id:
            raise wrong("exec_id", exec_id, "is no id of an exec", hint="`execs()` lists them")
        offsets = {"stdout": stdout, "stderr": stderr}
        checked = {name: whole(name, offset, 0, 2**62) for name, offset in offsets.items()}
        self._follower.begun(exec_id, **checked)
        return self


def _fields(exit: Exit | None) -> dict[str, Any]:
    assert exit is not None, "the stream ends with an exit or an error"
    return {name: getattr(exit, name) for name in Exit.__dataclass_fields__}


class ExecStream(ExecMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver, follower: Follower) -> None:
        self._driver = driver
        self._follower = follower

    def __iter__(self) -> Generator[Event, None, None]:
        return self._driver.iterate(self._follower.follow())


class AsyncExecStream(ExecMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver, follower: Follower) -> None:
        self._driver = driver
        self._follower = follower

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        return self._driver.iterate(self._follower.follow())
