"""What a client can do with sessions and the registry: shapes in, views out.

`who` is the tenant; `base` the server's own address, as this client knows it.
"""

from __future__ import annotations

import builtins
import posixpath
from typing import Any, BinaryIO

from msgspec import UNSET, structs

from capsule.edge import session_shapes as ss
from capsule.edge import session_views as sv
from capsule.edge.drain import Gate
from capsule.edge.errors import invalid_field
from capsule.edge.files import absolute, decoded
from capsule.registry_file import Agent, Environment, Prompt, Tool
from capsule.service.caller import Caller
from capsule.sessions.plan import Wish
from capsule.sessions.records import Artifact, Phase, Session
from capsule.sessions.sessions import MAX_READ, Sessions

MAX_FILES = 10_000


class SessionVerbs:
    def __init__(self, sessions: Sessions, gate: Gate) -> None:
        self._sessions = sessions
        self._gate = gate

    async def create(self, who: str, p: ss.BeginSession, base: str) -> sv.StartedSessionView:
        self._gate.admit()
        limits = structs.asdict(p.limits) if p.limits else {}
        wish = Wish(
            environment=p.environment,
            provider=p.provider,
            agent=p.agent,
            session_id=p.session_id,
            limits={name: value for name, value in limits.items() if value is not UNSET},
            env=p.env,
            metadata=p.metadata,
            idle_timeout=None if p.idle_timeout_ms is None else p.idle_timeout_ms / 1000,
        )
        return sv.StartedSessionView.of(await self._sessions.create(who, wish), base)

    async def list(
        self, who: str, base: str, *, state: str | None, after: str | None, limit: int
    ) -> sv.SessionsView:
        phase = Phase(state) if state else None
        found = await self._sessions.list(who, phase, after=after, limit=limit)
        counts = await self._sessions.counts(*found)
        pairs = zip(found, counts, strict=True)
        return sv.SessionsView(sessions=[sv.SessionStateView.of(*each, base) for each in pairs])

    async def get(self, who: str, id: str, base: str) -> sv.SessionStateView:
        return await self._view(await self._sessions.get(who, id), base)

    async def close(self, who: str, id: str, base: str) -> sv.SessionStateView:
        return await self._view(await self._sessions.close(who, id), base)

    async def reopen(self, who: str, id: str, base: str) -> sv.SessionStateView:
        self._gate.admit()
        return await self._view(await self._sessions.reopen(who, id), base)

    async def delete(
        self, who: str, id: str, *, sandbox_id: str | None, purge: bool
    ) -> sv.DeletedSessionView:
        gone = await self._sessions.delete(who, id, sandbox_id=sandbox_id, purge=purge)
        kept = () if purge else ("log", "artifacts")
        return sv.DeletedSessionView(deleted=True, session_id=gone.id, kept=kept)

    async def execute(self, caller: Caller, p: ss.ExecuteInSession, base: str) -> sv.ExecutedView:
        self._gate.admit()
        timeout = None if p.timeout_ms is None else p.timeout_ms / 1000
        done = await self._sessions.execute(
            caller.tenant,
            p.session_id,
            p.code,
            language=p.language,
            timeout=timeout,
            actor=caller.key_id,
        )
        return sv.ExecutedView.of(done, p.session_id, base)

    async def call_tool(
        self, caller: Caller, id: str, tool: str, p: ss.CallTool, base: str
    ) -> sv.ExecutedView:
        self._gate.admit()
        done = await self._sessions.call_tool(
            caller.tenant, id, tool, p.arguments, actor=caller.key_id
        )
        return sv.ExecutedView.of(done, id, base)

    async def files(self, who: str, id: str, path: str, recursive: bool) -> sv.SessionFilesView:
        files, folder = await self._sessions.files(who, id), absolute(path)
        stat = await files.stat(path, follow=True)
        if stat.type != "dir":
            read = await files.read_bytes(path, limit=MAX_READ)
            content, encoding = sv.content_of(read.data)
            shown = [sv.SessionFileView.of(stat, folder)]
            return sv.SessionFilesView(
                session_id=id, path=folder, files=shown, content=content, encoding=encoding
            )
        found = await files.list(path, recursive=recursive, limit=MAX_FILES)
        listed = sorted(found.entries, key=lambda each: each.path)
        return sv.SessionFilesView(
            session_id=id,
            path=folder,
            files=[
                sv.SessionFileView.of(each, posixpath.join(folder, each.path)) for each in listed
            ],
            truncated=found.truncated,
        )

    async def write(self, who: str, p: ss.WriteSessionFiles) -> sv.WrittenFilesView:
        self._gate.admit()
        files = await self._sessions.files(who, p.session_id)
        written = []
        for each in _files(p):
            data = decoded("content", each.content, each.encoding)
            stat = await files.write(each.path, data)
            written.append(sv.WrittenFileView(path=absolute(each.path), size=stat.size))
        return sv.WrittenFilesView(session_id=p.session_id, files=written)

    async def log(self, who: str, id: str, *, after: int, limit: int) -> sv.LogView:
        found = await self._sessions.log(who, id, after=after, limit=limit)
        return sv.LogView(executions=[sv.LoggedView.of(each) for each in found])

    async def artifacts(self, who: str, id: str, base: str) -> sv.ArtifactsView:
        found = await self._sessions.artifacts(who, id)
        return sv.ArtifactsView(artifacts=[sv.ArtifactView.of(each, id, base) for each in found])

    async def artifact(self, who: str, id: str, name: str) -> tuple[Artifact, BinaryIO]:
        return await self._sessions.open_artifact(who, id, name)

    async def tools(self, who: str, id: str, form: str) -> dict[str, Any]:
        session = await self._sessions.get(who, id)
        return {"tools": [described(tool, form) for tool in await self._sessions.tools(session)]}

    async def registry(self, form: str = "capsule") -> dict[str, builtins.list[Any]]:
        registry = self._sessions.registry
        await registry.fresh()
        return {
            "environments": registry.all(Environment),
            "agents": registry.all(Agent),
            "tools": [described(tool, form) for tool in registry.all(Tool)],
            "prompts": registry.all(Prompt),
            "problems": registry.complaints(),
        }

    async def entry(self, kind: type[Any], name: str) -> Any:
        registry = self._sessions.registry
        await registry.fresh()
        if kind is Environment:
            name = found.name if (found := registry.environment(name)) else name
        return registry.get(kind, name)

    async def _view(self, session: Session, base: str) -> sv.SessionStateView:
        (counts,) = await self._sessions.counts(session)
        return sv.SessionStateView.of(session, counts, base)


def described(tool: Tool, form: str) -> Any:
    """As those who sell models want it."""
    if form == "openai":
        about = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        return {"type": "function", "function": about}
    if form == "anthropic":
        return {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.parameters,
        }
    return tool


def _files(p: ss.WriteSessionFiles) -> builtins.list[ss.SessionFile]:
    if (p.path is None) != (p.content is None):
        missing = "content" if p.content is None else "path"
        raise invalid_field(missing, "missing")
    if p.path is None or p.content is None:
        if not p.files:
            raise invalid_field("path", "missing", hint="send path and content, or files")
        return p.files
    return [ss.SessionFile(path=p.path, content=p.content, encoding=p.encoding), *p.files]
