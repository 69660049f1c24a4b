"""Sandboxes for agents over plain REST: make a session, run commands in it, end it.

A session is a sandbox, and its id is the sandbox's: there is nothing to remember, so it outlives
the server as every sandbox does, and everything else of the API works with the same id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import Meta

from capsule.config import Config
from capsule.edge import shapes as s
from capsule.edge.drain import Gate
from capsule.edge.errors import invalid_field
from capsule.edge.files import absolute
from capsule.edge.multipart import Part
from capsule.edge.paths import inside_workspace
from capsule.edge.text import show
from capsule.errors import GoneError, NotFoundError
from capsule.model import MIB, Exit, Reason
from capsule.service import CreateRequest, ExecCall, Sandbox, Service
from capsule.service.caller import Caller
from capsule.service.template_names import resolve

MEMORY = 512 * MIB
CPUS = 0.5
TTL = 3600.0
TIMED_OUT = 124  # as timeout(1) has it, and the command line

# Both streams in one, in the order in which they were written.
_MERGED = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")


class CreateSession(s.Shape, kw_only=True, frozen=True):
    template: s.Word = "python"


class OfSession(s.Shape, kw_only=True, frozen=True):
    session_id: s.Id


class ExecuteCommand(OfSession, kw_only=True, frozen=True):
    command: Annotated[str, Meta(min_length=1)]
    timeout_ms: s.Millis | None = None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str


class CommandView(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    output: str


class CleanedView(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "removed"


class UploadedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int


class UploadedView(msgspec.Struct, frozen=True, kw_only=True):
    files: list[UploadedFile]


class AgentVerbs:
    def __init__(self, config: Config, service: Service, gate: Gate) -> None:
        self.config = config
        self.service = service
        self.gate = gate

    async def create(self, caller: Caller, p: CreateSession, key: str | None) -> SessionView:
        self.gate.admit()
        most = self.config.max_limits
        request = CreateRequest(
            template=p.template,
            ttl=min(TTL, self.config.max_ttl),
            limits={"memory": min(MEMORY, most.memory), "cpus": min(CPUS, most.cpus)},
            metadata={"surface": "session"},
            idempotency_key=key,
        )
        return SessionView(session_id=(await self.service.create(request, caller)).id)

    async def execute(self, caller: Caller, p: ExecuteCommand, key: str | None) -> CommandView:
        self.gate.admit()
        sandbox = self.find(caller, p.session_id)
        template = resolve(self.service.catalog, sandbox.template, sandbox.tenant)
        shell = template.shell[0] if template and template.shell else "/bin/sh"
        timeout = self.config.exec_timeout if p.timeout_ms is None else p.timeout_ms / 1000
        call = ExecCall(
            cmd=(*_MERGED, shell, "-c", "--", p.command), timeout=timeout, idempotency_key=key
        )
        done = await self.service.exec(sandbox.id, call)
        code = TIMED_OUT if done.exit.timed_out else done.exit.exit_code
        output = show(done.stdout, "text")
        notes = "".join(f"[capsule: {note}]\n" for note in _notes(done.exit, timeout, sandbox))
        gap = "\n" if notes and output and not output.endswith("\n") else ""
        return CommandView(exit_code=code, output=f"{output}{gap}{notes}")

    async def cleanup(self, caller: Caller, p: OfSession) -> CleanedView:
        await self.service.delete(self.find(caller, p.session_id).id)
        return CleanedView()

    async def upload(self, caller: Caller, form: AsyncIterator[Part]) -> UploadedView:
        """Fields are `session_id`, then files; `path` says where the file after it goes."""
        written: list[UploadedFile] = []
        session, path = "", None
        async for part in form:
            if part.filename is not None:
                sandbox = self._session_of_form(caller, session)
                field = "path" if path else part.name[:60]
                path = inside_workspace(path or part.filename, field=field)
                stat = await self.service.files(sandbox.id).write(path, part)
                written.append(UploadedFile(path=absolute(path), size=stat.size))
                path = None
            elif part.name == "session_id":
                session = await part.text(limit=64)
            elif part.name == "path":
                path = await part.text(limit=4096)
            else:
                raise invalid_field(part.name[:60], "unknown field")
        self._session_of_form(caller, session)
        if not written:
            raise invalid_field("file", "missing", hint="with curl: -F file=@NAME")
        return UploadedView(files=written)

    def _session_of_form(self, caller: Caller, session: str) -> Sandbox:
        if not session:
            raise invalid_field("session_id", "missing", hint="send it before the files")
        return self.find(caller, session)

    def find(self, caller: Caller, session: str) -> Sandbox:
        """Raises NotFoundError, GoneError."""
        hint = "POST /create_session makes a new one"
        try:
            self.service.own(caller, session)
            return self.service.get(session)
        except GoneError as error:
            raise GoneError(error.message, hint=hint, session_id=session) from None
        except NotFoundError:
            what = f"session {session[:64]!r} does not exist"
            raise NotFoundError(what, hint=hint, session_id=session) from None


def _notes(exit: Exit, timeout: float, sandbox: Sandbox) -> list[str]:
    """What the output alone does not tell."""
    notes: list[str] = []
    if exit.stdout_truncated:
        notes.append(f"output cut, it was {exit.stdout_bytes} bytes")
    if exit.timed_out:
        notes.append(f"timed out after {timeout:g} seconds")
    if exit.reason is Reason.OOM_KILLED:
        notes.append(f"out of memory, the limit is {sandbox.limits.memory // MIB} MiB")
    return notes
