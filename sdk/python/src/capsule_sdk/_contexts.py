"""Contexts: interpreters that live on between runs. Written once, for both kinds of drivers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import quote

from ._arguments import millis
from ._drivers import AsyncDriver, SyncDriver
from ._flow import Call, Emit, Emitting, Flow, Handle, Open, Read, drain, iterator, method
from ._rpc import JSON_HEADERS, accepted, naming, rpc, to_json
from ._runs import ContextInfo, Printed, Result, RunEnd, RunError, RunEvent, RunResult
from ._sse import Decoder, ServerEvent
from .errors import CapsuleError, GoneError, NotFoundError, UnavailableError, from_json


class ContextOptions(TypedDict, total=False):
    cwd: str | None  # where the interpreter starts
    env: Mapping[str, str] | None
    imports: Sequence[str] | None  # modules to load before it is ready
    user: str | None  # "root", or the name of the sandbox's user, who it is otherwise


class RunOptions(TypedDict, total=False):
    timeout: float | None  # seconds; the server's default is 30
    on_stdout: Callable[[str], object] | None
    on_stderr: Callable[[str], object] | None
    on_result: Callable[[Result], object] | None


def ask(
    driver: SyncDriver | AsyncDriver,
    name: str,
    params: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    repeatable: bool = True,
) -> Flow[Any]:
    """A method of contexts. A run may wait in line, and then take its time."""
    return rpc(
        f"context.v1.{name}",
        params,
        retries=driver.target.retries,
        timeout=0 if name in ("run", "create") else None,
        repeatable=repeatable,
        arguments=arguments,
    )


def create(
    driver: SyncDriver | AsyncDriver,
    sandbox: str,
    language: str | None,
    options: ContextOptions,
) -> Flow[ContextInfo]:
    params: dict[str, Any] = {"language": language, **options}
    if (imports := params.get("imports")) is not None:
        params["imports"] = list(imports)
    call = ask(driver, "create", {"id": sandbox, **params}, params, repeatable=False)
    return ContextInfo.from_json((yield from call))


def run(
    driver: SyncDriver | AsyncDriver,
    sandbox: str,
    code: str,
    options: RunOptions,
    **where: str | None,
) -> Flow[RunResult]:
    """In one message each way; or as events, where somebody wants to hear of them."""
    for name in set(options) - set(RunOptions.__annotations__):
        # Python itself says so for plain parameters; a timeout that is dropped in silence is none.
        raise TypeError(f"run got an unexpected keyword argument {name!r}")
    told = {name: options.get(name) for name in ("on_stdout", "on_stderr", "on_result")}
    timeout = options.get("timeout")
    given = {"code": code, "timeout": timeout, **where}
    if any(told.values()):
        return (yield from _listen(follow(sandbox, code, timeout, **where), told))
    params = {"id": sandbox, "code": code, "timeout_ms": _timeout(timeout), **where}
    return RunResult.from_json((yield from ask(driver, "run", params, given, repeatable=False)))


def _timeout(timeout: float | None) -> int | None:
    return None if timeout is None else millis("timeout", timeout)


def _listen(events: Emitting[RunEvent], told: Mapping[str, Any]) -> Flow[RunResult]:
    seen: dict[str, list[Any]] = {"stdout": [], "stderr": [], "results": [], "error": []}
    ends: list[RunEnd] = []

    def take(event: RunEvent) -> None:
        match event:
            case Printed():
                seen[event.stream].append(event.text)
                if callback := told.get(f"on_{event.stream}"):
                    callback(event.text)
            case Result():
                seen["results"].append(event)
                if callback := told.get("on_result"):
                    callback(event)
            case RunError():
                seen["error"].append(event)
            case _:
                ends.append(event)

    yield from drain(events, take)
    (end,) = ends
    return RunResult(
        **{name: getattr(end, name) for name in RunEnd.__dataclass_fields__},
        results=tuple(seen["results"]),
        error=seen["error"][-1] if seen["error"] else None,
        stdout="".join(seen["stdout"]),
        stderr="".join(seen["stderr"]),
    )


def follow(
    sandbox: str, code: str, timeout: float | None, **where: str | None
) -> Emitting[RunEvent]:
    """Events up to the end. A broken connection is an error: a run is not repeated by itself."""
    body = {"code": code, "timeout_ms": _timeout(timeout)}
    context = where.get("context")
    if context is None:
        body["language"] = where.get("language")
    inner = f"/{quote(context, safe='')}" if context is not None else ""
    path = f"/v1/sandboxes/{sandbox}/contexts{inner}/run"
    given = {"code": code, "timeout": timeout, **where}
    content = to_json({k: v for k, v in body.items() if v is not None}, given)
    headers = {"Accept": "text/event-stream", **JSON_HEADERS}
    call = Call("POST", path, content, headers, timeout=0)
    yield from naming(_events(call), given)


def _events(call: Call) -> Emitting[RunEvent]:
    handle: Handle = yield Open(call)
    yield from accepted(handle)
    decoder = Decoder()
    while chunk := (yield Read(handle)):
        for event in decoder.feed(chunk):
            for said in _hear(event):
                yield Emit(said)
                if isinstance(said, RunEnd):
                    return
    raise UnavailableError(
        "the server ended the stream before the run ended",
        hint="what the run did is unknown: look before you repeat it",
    )


def _hear(event: ServerEvent) -> Iterator[RunEvent]:
    match event.event:
        case "stdout" | "stderr":
            yield Printed(event.event, event.json()["data"])
        case "display" | "result":
            yield Result.from_json(event.json())
        case "error":
            yield RunError.from_json(event.json())
        case "end":
            yield RunEnd.from_json(event.json())
        case "failed":
            raise from_json(event.json())


class ContextMethods:
    """An interpreter that lives on between runs: variables, imports and functions stay.

    `info` is how it was when it was last asked about; `refresh` asks again.
    """

    _driver: SyncDriver | AsyncDriver

    def __init__(self, sandbox_id: str, info: ContextInfo) -> None:
        self._sandbox_id = sandbox_id
        self.info = info

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def language(self) -> str:
        return self.info.language

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} ({self.language}, {self.info.state})>"

    @method
    def run(self, code: str, **options: Unpack[RunOptions]) -> Flow[RunResult]:
        """Run code and wait for its end; `text` of the result is the last expression's value.

        `on_stdout`, `on_stderr` and `on_result` are called while it runs. What the code raises is
        in the result; see `check`.
        """
        return (yield from run(self._driver, self._sandbox_id, code, options, context=self.id))

    @iterator
    def stream(self, code: str, *, timeout: float | None = None) -> Emitting[RunEvent]:
        """Run code, and iterate over what it prints and shows as it comes; the last is a RunEnd.

        Leaving the loop does not end the run.
        """
        return (yield from follow(self._sandbox_id, code, timeout, context=self.id))

    @method
    def interrupt(self) -> Flow[bool]:
        """End the run under way, as Ctrl-C would; True if there was one."""
        return bool((yield from self._ask("interrupt"))["interrupted"])

    @method
    def restart(self) -> Flow[ContextInfo]:
        """Begin again with a fresh interpreter, also when the old one is dead."""
        self.info = ContextInfo.from_json((yield from self._ask("restart")))
        return self.info

    @method
    def refresh(self) -> Flow[ContextInfo]:
        """Ask how it is now, and keep it as `info`."""
        body = yield from ask(self._driver, "list", {"id": self._sandbox_id})
        for each in body["contexts"]:
            if each["id"] == self.id:
                self.info = ContextInfo.from_json(each)
                return self.info
        raise NotFoundError(f"no such context: {self.id}")

    @method
    def delete(self) -> Flow[None]:
        """End the interpreter and all it started. Deleting one that is gone is no error."""
        with contextlib.suppress(NotFoundError, GoneError):
            yield from self._ask("delete")

    def _ask(self, name: str) -> Flow[Any]:
        return ask(self._driver, name, {"id": self._sandbox_id, "context": self.id})


class Context(ContextMethods):
    """As a context manager it is deleted at the end."""

    _driver: SyncDriver

    def __init__(self, driver: SyncDriver, sandbox_id: str, info: ContextInfo) -> None:
        super().__init__(sandbox_id, info)
        self._driver = driver

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
        with contextlib.suppress(CapsuleError):  # it ends with its sandbox; keep the first error
            self.delete()


class AsyncContext(ContextMethods):
    """As an async context manager it is deleted at the end."""

    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver, sandbox_id: str, info: ContextInfo) -> None:
        super().__init__(sandbox_id, info)
        self._driver = driver

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
