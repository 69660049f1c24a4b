"""Sessions, on the server: `client.sessions`. A session is a sandbox with a name that outlives it,
with a log, artifacts, and files that are kept while it has no sandbox."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self
from urllib.parse import quote, urlencode

from ._arguments import millis
from ._drivers import AsyncDriver, SyncDriver
from ._files import successful
from ._flow import Answer, Call, Emit, Emitting, Flow, Handle, Open, Read, iterator, method
from ._rpc import JSON_HEADERS, accepted, naming, parse, persist, to_json
from ._runs import Result, RunError
from .values import Written, _known

WORKSPACE = "/workspace"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it was when the server was asked. `state` is opening, open, closed or deleted;
    `sandbox_id` is "" while it has no sandbox; `workspace` says how its files are kept."""

    session_id: str
    sandbox_id: str
    provider: str
    url: str
    state: str
    environment: str
    template: str
    created_at: datetime
    active_at: datetime
    agent: str = ""
    idle_timeout_ms: int = 0
    executions: int = 0
    artifacts: int = 0
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    sandboxes: tuple[str, ...] = ()
    workspace: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        times = {name: datetime.fromisoformat(body[name]) for name in ("created_at", "active_at")}
        return _known(cls, {**body, **times, "sandboxes": tuple(body.get("sandboxes", ()))})


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """A file that an execution left. `source` is file or result."""

    id: str
    name: str
    mime: str
    size: int
    sha256: str
    source: str
    created_at: datetime
    url: str

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return _known(cls, {**body, "created_at": datetime.fromisoformat(body["created_at"])})


@dataclass(frozen=True, slots=True)
class Execution:
    """What code or a tool did. `status` is ok, error, timed_out, interrupted or died; `skipped`
    are files that were not kept as artifacts, each with the reason."""

    stdout: str
    stderr: str
    results: tuple[Result, ...]
    artifacts: tuple[ArtifactInfo, ...]
    status: str
    execution: int
    exit_code: int | None = None
    error: RunError | None = None
    reason: str = ""
    duration_ms: float = 0.0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    skipped: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        error = body.get("error")
        parts = {
            "results": tuple(Result.from_json(each) for each in body["results"]),
            "artifacts": tuple(ArtifactInfo.from_json(each) for each in body["artifacts"]),
            "error": RunError.from_json(error) if error else None,
            "skipped": tuple(body.get("skipped", ())),
        }
        return _known(cls, {**body, **parts})

    @property
    def text(self) -> str | None:
        """Of the last expression's value."""
        return next((each.text for each in self.results if each.is_main), None)


@dataclass(frozen=True, slots=True)
class SessionFile:
    """An entry of a session's folder."""

    name: str
    path: str
    type: str
    size: int
    modified_at: datetime

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return _known(cls, {**body, "modified_at": datetime.fromisoformat(body["modified_at"])})


class SessionMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def create(
        self,
        environment: str | None = None,
        *,
        provider: str | None = None,
        agent: str | None = None,
        session_id: str | None = None,
        limits: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        idle_timeout: float | None = None,
    ) -> Flow[SessionInfo]:
        """Begin one; its sandbox runs when this returns. `environment` says what it has, or `agent`
        names environment, tools and limits of the server's registry."""
        idle = None if idle_timeout is None else millis("idle_timeout", idle_timeout)
        given = {
            "environment": environment,
            "provider": provider,
            "agent": agent,
            "session_id": session_id,
            "limits": limits,
            "env": env,
            "metadata": metadata,
        }
        params = {**given, "idle_timeout_ms": idle}
        began = yield from self._post(
            "/api/sessions", params, {**given, "idle_timeout": idle_timeout}
        )
        return (yield from self._state(began["session_id"]))

    @method
    def get(self, session_id: str) -> Flow[SessionInfo]:
        """One, also one that is closed or deleted."""
        return (yield from self._state(session_id))

    @method
    def execute(
        self,
        session_id: str,
        code: str,
        *,
        language: str | None = None,
        timeout: float | None = None,
    ) -> Flow[Execution]:
        """Run code as in a notebook: variables live on. What it did is in the result."""
        given = {"session_id": session_id, "code": code, "language": language}
        bound = None if timeout is None else millis("timeout", timeout)
        body = {**given, "timeout_ms": bound}
        done = yield from self._post("/api/e2b/execute", body, {**given, "timeout": timeout})
        return Execution.from_json(done)

    @method
    def tools(
        self, session_id: str, *, format: str = "capsule"
    ) -> Flow[Sequence[Mapping[str, Any]]]:
        """What a model may call in it; `format` is capsule, openai or anthropic."""
        body = yield from self._get(_path(session_id, "tools"), {"format": format})
        tools: Sequence[Mapping[str, Any]] = body["tools"]
        return tools

    @method
    def call_tool(
        self, session_id: str, name: str, arguments: Mapping[str, Any] | None = None
    ) -> Flow[Execution]:
        """Call a tool of the registry; arguments that do not fit its schema are refused."""
        given = {"name": name, "arguments": dict(arguments or {})}
        body = {"arguments": given["arguments"]}
        done = yield from self._post(_path(session_id, "tools", name), body, given)
        return Execution.from_json(done)

    @method
    def files(
        self, session_id: str, path: str = WORKSPACE, *, recursive: bool = False
    ) -> Flow[list[SessionFile]]:
        """The entries of a folder; with `recursive`, of those below it too."""
        body = yield from self._get_files(session_id, path, recursive)
        return [SessionFile.from_json(each) for each in body["files"]]

    @method
    def read_file(self, session_id: str, path: str) -> Flow[bytes]:
        """The content of a file."""
        body = yield from self._get_files(session_id, path, False)
        content, encoding = body.get("content", ""), body.get("encoding")
        return base64.b64decode(content) if encoding == "base64" else content.encode()

    @method
    def write_file(self, session_id: str, path: str, content: str | bytes) -> Flow[Written]:
        """Write a file, replacing it in one step; missing folders are made."""
        text = content if isinstance(content, str) else base64.b64encode(content).decode()
        how = "text" if isinstance(content, str) else "base64"
        given = {"session_id": session_id, "path": path, "content": text, "encoding": how}
        body = yield from self._post("/api/e2b/files", given, given, repeatable=True)
        return Written(body["files"][0]["path"], body["files"][0]["size"])

    @method
    def artifacts(self, session_id: str) -> Flow[list[ArtifactInfo]]:
        """What it left, oldest first."""
        body = yield from self._get(_path(session_id, "artifacts"), {})
        return [ArtifactInfo.from_json(each) for each in body["artifacts"]]

    @method
    def read_artifact(self, session_id: str, artifact_id: str) -> Flow[bytes]:
        """The whole content of one; see `stream_artifact` for large ones."""
        call = Call("GET", _path(session_id, "artifacts", artifact_id))
        answer = yield from self._send(call, {}, repeatable=True)
        return answer.body

    @iterator
    def stream_artifact(self, session_id: str, artifact_id: str) -> Emitting[bytes]:
        """The content of one, chunk by chunk."""
        handle: Handle = yield Open(Call("GET", _path(session_id, "artifacts", artifact_id)))
        yield from accepted(handle)
        while chunk := (yield Read(handle)):
            yield Emit(chunk)

    @method
    def executions(
        self, session_id: str, *, after: int = 0, limit: int = 100
    ) -> Flow[Sequence[Mapping[str, Any]]]:
        """The log, oldest first: what was run, when, how it ended, and the hash of each entry."""
        query = {"after": after, "limit": limit}
        body = yield from self._get(_path(session_id, "executions"), query)
        entries: Sequence[Mapping[str, Any]] = body["executions"]
        return entries

    @method
    def close(self, session_id: str) -> Flow[SessionInfo]:
        """End its sandbox and keep its files."""
        body = yield from self._post(_path(session_id, "close"), None, {}, repeatable=True)
        return SessionInfo.from_json(body)

    @method
    def reopen(self, session_id: str) -> Flow[SessionInfo]:
        """A new sandbox with its files; nothing, if it is open."""
        body = yield from self._post(_path(session_id, "reopen"), None, {}, repeatable=True)
        return SessionInfo.from_json(body)

    @method
    def delete(self, session_id: str, *, purge: bool = False) -> Flow[None]:
        """End its sandbox and remove its files; with `purge` its artifacts and the text of its log
        as well."""
        call = Call("DELETE", _path(session_id) + ("?purge=true" if purge else ""), timeout=0)
        yield from self._send(call, {"session_id": session_id}, repeatable=False)

    @method
    def list(
        self, *, state: str | None = None, after: str | None = None, limit: int = 100
    ) -> Flow[list[SessionInfo]]:
        """Oldest first, those made after `after`; deleted ones only if `state` asks for them."""
        query = {"state": state, "after": after, "limit": limit}
        body = yield from self._get("/api/sessions", query)
        return [SessionInfo.from_json(each) for each in body["sessions"]]

    def _state(self, session_id: str) -> Flow[SessionInfo]:
        return SessionInfo.from_json((yield from self._get(_path(session_id), {})))

    def _get_files(self, session_id: str, path: str, recursive: bool) -> Flow[dict[str, Any]]:
        where = f"/api/e2b/files/{quote(session_id, safe='')}"
        return (yield from self._get(where, {"path": path, "recursive": str(recursive).lower()}))

    def _get(self, path: str, query: Mapping[str, Any]) -> Flow[dict[str, Any]]:
        given = {key: value for key, value in query.items() if value is not None}
        call = Call("GET", f"{path}?{urlencode(given)}" if given else path)
        return parse((yield from self._send(call, query, repeatable=True)))

    def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        given: Mapping[str, Any],
        *,
        repeatable: bool = False,
    ) -> Flow[dict[str, Any]]:
        said = {key: value for key, value in (body or {}).items() if value is not None}
        content = b"" if body is None else to_json(said, given)
        # 0: however long it takes; code and sandboxes have limits of their own.
        call = Call("POST", path, content, JSON_HEADERS, timeout=0)
        return parse((yield from self._send(call, given, repeatable=repeatable)))

    def _send(self, call: Call, given: Mapping[str, Any], *, repeatable: bool) -> Flow[Answer]:
        retries = self._driver.target.retries
        once = persist(lambda: successful(call), retries=retries, repeatable=repeatable)
        return (yield from naming(once, given))


def _path(session_id: str, *rest: str) -> str:
    return "/".join(["/api/sessions", *(quote(part, safe="") for part in (session_id, *rest))])


class Sessions(SessionMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncSessions(SessionMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
