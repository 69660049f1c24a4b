"""What a client can do with contexts, once for JSON-RPC and REST: shapes in, views out."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

from msgspec import UNSET, UnsetType, structs

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.drain import Gate
from capsule.edge.errors import told, understand
from capsule.edge.sse import event
from capsule.edge.text import show
from capsule.model import Stream
from capsule.service import ContextCall, ContextInfo, ContextRun, LiveRun, RunResult, Service
from capsule.service.kernel_wire import Raised, Shown, words
from capsule.service.live_run import RunEnd, Text
from capsule.service.text import Utf8Decoder

PIECE = 64 * 1024
_JSON = ("json", "data", "chart")
_TEXT = ("text", "html", "markdown", "svg", "png", "jpeg", "latex", "pdf", "javascript")


class ContextView(v.View, frozen=True, kw_only=True):
    id: str
    language: str
    state: str
    reason: str
    cwd: str
    created_at: datetime
    runs: int
    waiting: int
    lost_run: int | None
    exec_id: str

    @classmethod
    def of(cls, info: ContextInfo) -> ContextView:
        return cls(
            id=info.id,
            language=info.language,
            state=info.state,
            reason=info.reason,
            cwd=info.cwd,
            created_at=info.created_at,
            runs=info.runs,
            waiting=info.waiting,
            lost_run=info.lost_run,
            exec_id=info.exec_id,
        )


class ContextsView(v.View, frozen=True, kw_only=True):
    contexts: list[ContextView]


class InterruptedView(v.View, frozen=True, kw_only=True):
    interrupted: bool  # whether a run was under way


class ShownView(v.View, frozen=True, kw_only=True):
    """A value, with the forms that it has."""

    is_main: bool
    text: str | UnsetType = UNSET
    html: str | UnsetType = UNSET
    markdown: str | UnsetType = UNSET
    svg: str | UnsetType = UNSET
    png: str | UnsetType = UNSET
    jpeg: str | UnsetType = UNSET
    latex: str | UnsetType = UNSET
    json: Any = UNSET
    pdf: str | UnsetType = UNSET
    javascript: str | UnsetType = UNSET
    data: Any = UNSET
    chart: Any = UNSET
    errors: dict[str, str] | UnsetType = UNSET

    @classmethod
    def of(cls, shown: Shown) -> ShownView:
        forms: dict[str, Any] = {name: getattr(shown, name) for name in _TEXT}
        forms |= {name: raw for name in _JSON if len(raw := getattr(shown, name))}
        return cls(is_main=shown.main, errors=words(shown.errors) or UNSET, **forms)


class RunErrorView(v.View, frozen=True, kw_only=True):
    name: str
    value: str
    traceback: str

    @classmethod
    def of(cls, raised: Raised) -> RunErrorView:
        return cls(name=raised.name, value=raised.value, traceback=raised.traceback)


class RunEndView(v.View, frozen=True, kw_only=True):
    run: int
    context: str
    status: str
    duration_ms: float
    exit_code: int | None
    state: str
    reason: str
    dropped: int
    lost_bytes: int

    @classmethod
    def of(cls, end: RunEnd) -> RunEndView:
        return cls(**_end_fields(end))


class RunView(v.View, frozen=True, kw_only=True):
    status: str
    results: list[ShownView]
    error: RunErrorView | None
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    run: int
    context: str
    duration_ms: float
    exit_code: int | None
    state: str
    reason: str
    dropped: int
    lost_bytes: int

    @classmethod
    def of(cls, result: RunResult) -> RunView:
        return cls(
            results=[ShownView.of(each) for each in result.results],
            error=RunErrorView.of(result.error) if result.error else None,
            stdout=show(result.stdout, "text"),
            stderr=show(result.stderr, "text"),
            stdout_truncated=result.stdout_truncated,
            stderr_truncated=result.stderr_truncated,
            **_end_fields(result.end),
        )


def _end_fields(end: RunEnd) -> dict[str, Any]:
    return {
        "run": end.run,
        "context": end.context,
        "status": end.status,
        "duration_ms": round(end.duration_ms, 3),
        "exit_code": end.exit_code,
        "state": end.state,
        "reason": end.reason,
        "dropped": end.dropped,
        "lost_bytes": end.lost_bytes,
    }


class ContextVerbs:
    def __init__(self, service: Service, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    async def create(self, id: str, p: s.CreateContext) -> ContextView:
        self._gate.admit()
        call = ContextCall(p.language, p.cwd, p.env, p.imports, p.user)
        return ContextView.of(await self._service.contexts.create(id, call))

    async def list(self, id: str, p: s.Nothing) -> ContextsView:
        found = await self._service.contexts.list(id)
        return ContextsView(contexts=[ContextView.of(info) for info in found])

    async def run(self, id: str, p: s.RunInContext) -> RunView:
        self._gate.admit()
        return RunView.of(await self._service.contexts.run(id, _call(p)))

    async def open(self, id: str, p: s.RunInContext) -> LiveRun:
        """Begin a run and stay with it; closing leaves the code running."""
        self._gate.admit()
        return await self._service.contexts.start(id, _call(p))

    async def interrupt(self, id: str, p: s.OfContext) -> InterruptedView:
        found = await self._service.contexts.interrupt(id, p.context)
        return InterruptedView(interrupted=found)

    async def restart(self, id: str, p: s.OfContext) -> ContextView:
        self._gate.admit()
        return ContextView.of(await self._service.contexts.restart(id, p.context))

    async def delete(self, id: str, p: s.OfContext) -> v.DeletedView:
        await self._service.contexts.delete(id, p.context)
        return v.DeletedView()


def _call(p: s.RunInContext) -> ContextRun:
    timeout = None if p.timeout_ms is None else p.timeout_ms / 1000
    return ContextRun(p.code, p.context, p.language, timeout)


def named(p: s.RunCode | s.RunDefault, context: str | None) -> s.RunInContext:
    return s.checked(s.RunInContext(context=context, **structs.asdict(p)))


async def run_events(live: LiveRun) -> AsyncGenerator[bytes, None]:
    """A run as Server-Sent Events; see docs/parts/rest.md for their names."""
    cuts = {Stream.STDOUT: Utf8Decoder(), Stream.STDERR: Utf8Decoder()}
    async with live:
        try:
            yield event("started", {"context": live.context, "run": live.run})
            async for item in live:
                for said in _format(item, cuts):
                    yield said
        except Exception as error:  # the response has begun: the stream itself must say it
            yield event("failed", told(understand(error)))


def _format(item: Any, cuts: dict[Stream, Utf8Decoder]) -> builtins.list[bytes]:
    match item:
        case Text():
            pieces = (item.data[at : at + PIECE] for at in range(0, len(item.data), PIECE))
            texts = (cuts[item.stream].feed(piece) for piece in pieces)
            return [event(item.stream, {"data": text}) for text in texts if text]
        case Shown():
            return [event("result" if item.main else "display", ShownView.of(item))]
        case Raised():
            return [event("error", RunErrorView.of(item))]
        case _:
            rest = [(stream, cut.finish()) for stream, cut in cuts.items()]
            said = [event(stream, {"data": text}) for stream, text in rest if text]
            return [*said, event("end", RunEndView.of(item))]
