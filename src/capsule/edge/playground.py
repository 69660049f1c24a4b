"""The API of a web playground: one container per session id, the editor's files in it, code run.

A container is a sandbox whose metadata name the session: the mapping lives as long as the sandbox
does, and there is no other record of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from capsule.config import Config
from capsule.edge import shapes as s
from capsule.edge.agents import CPUS, MEMORY
from capsule.edge.drain import Gate
from capsule.edge.errors import invalid_field
from capsule.edge.file_tree import FileNode, flatten
from capsule.edge.paths import inside_workspace
from capsule.edge.sync import sync
from capsule.edge.text import show
from capsule.edge.turns import Turns
from capsule.errors import ForbiddenError, GoneError, NotFoundError
from capsule.model import WORKSPACE, State, Template
from capsule.service import CreateRequest, ExecCall, ExecResult, Sandbox, Service
from capsule.service.caller import Caller, named
from capsule.service.template_names import resolve
from capsule.settings import brief

LABEL = "playground"  # in the metadata: the session's id
INSTALL_TIMEOUT = 120.0
MOST_REMEMBERED = 10_000
_LIVE = (State.CREATING, State.RUNNING, State.PAUSED)
_PACKAGE = re.compile(
    r"(@[a-z0-9~][a-z0-9._~-]{0,100}/)?[a-z0-9~][a-z0-9._~-]{0,200}(@[A-Za-z0-9._~^>=<*+-]{1,100})?",
    re.ASCII,
)

SessionId = Annotated[str, Meta(min_length=1, max_length=128)]

# What clients know by other names.
_NAMES = {
    "session_id": "sessionId",
    "box_id": "containerId",
    "created_at": "createdAt",
    "exit_code": "exitCode",
    "timed_out": "timedOut",
}


class OfPlayground(s.Shape, kw_only=True, frozen=True, rename=_NAMES):
    session_id: SessionId


class MakePlayground(OfPlayground, kw_only=True, frozen=True):
    template: s.Word = "node"


class SyncFiles(OfPlayground, kw_only=True, frozen=True):
    files: list[FileNode]
    partial: bool = False


class InstallPackages(OfPlayground, kw_only=True, frozen=True):
    packages: Annotated[list[str], Meta(min_length=1, max_length=50)]


class ExecuteFile(OfPlayground, kw_only=True, frozen=True):
    code: str
    filename: s.Path = "index.js"
    timeout_ms: s.Millis | None = None


class View(msgspec.Struct, frozen=True, kw_only=True, rename=_NAMES):
    pass


class PlaygroundView(View, frozen=True, kw_only=True):
    success: bool = True
    box_id: str
    message: str
    existing: bool
    timeout: int  # milliseconds


class PlaygroundStatusView(View, frozen=True, kw_only=True):
    exists: bool = True
    session_id: str
    box_id: str
    status: str
    created_at: datetime
    timeout: int


class RemovedView(View, frozen=True, kw_only=True):
    success: bool = True
    message: str = "container removed"


class SyncedView(View, frozen=True, kw_only=True):
    success: bool = True
    message: str
    written: list[str]
    deleted: list[str]
    unchanged: int


class RanView(View, frozen=True, kw_only=True):
    success: bool
    output: str
    error: str
    exit_code: int
    timed_out: bool


class PlaygroundVerbs:
    def __init__(self, config: Config, service: Service, gate: Gate) -> None:
        self.config = config
        self.service = service
        self.gate = gate
        # A session's container is made, filled and removed by one request at a time.
        self._turns = Turns()
        # Where each was found last, so that not all sandboxes are looked at; a guess, checked.
        self._last: OrderedDict[str, str] = OrderedDict()

    async def create(self, caller: Caller, p: MakePlayground) -> PlaygroundView:
        """The session's container: the one that is there, or a new one."""
        self.gate.admit()
        async with self._turns.take(named(caller.tenant, p.session_id)):
            found = self._find(caller, p.session_id)
            if found is not None and await self._in_use(found):
                return self._view(found, "container already exists", existing=True)
            made = await self.service.create(self._request(p), caller)
            return self._view(made, "container created", existing=False)

    async def _in_use(self, box: Sandbox) -> bool:
        """Let its time begin anew. False: it has just ended."""
        try:
            await self.service.keep_alive(box.id)
            await self.service.files(box.id).stat(WORKSPACE)
        except GoneError:
            return False
        return True

    def _request(self, p: MakePlayground) -> CreateRequest:
        most = self.config.max_limits
        return CreateRequest(
            template=p.template,
            ttl=self.config.max_ttl,
            idle_timeout=self.config.playground_idle_timeout,
            limits={"memory": min(MEMORY, most.memory), "cpus": min(CPUS, most.cpus)},
            metadata={"surface": "playground", LABEL: p.session_id},
        )

    def _view(self, box: Sandbox, message: str, *, existing: bool) -> PlaygroundView:
        return PlaygroundView(
            box_id=box.id, message=message, existing=existing, timeout=_millis(box)
        )

    async def status(self, caller: Caller, p: OfPlayground) -> PlaygroundStatusView:
        box = self.find(caller, p.session_id)
        return PlaygroundStatusView(
            session_id=p.session_id,
            box_id=box.id,
            status=str(box.state),
            created_at=box.created_at,
            timeout=_millis(box),
        )

    async def remove(self, caller: Caller, p: OfPlayground) -> RemovedView:
        async with self._turns.take(named(caller.tenant, p.session_id)):
            await self.service.delete(self.find(caller, p.session_id).id)
        return RemovedView()

    async def sync(self, caller: Caller, p: SyncFiles) -> SyncedView:
        self.gate.admit()
        tree = flatten(p.files)
        async with self._turns.take(named(caller.tenant, p.session_id)):
            files = self.service.files(self.find(caller, p.session_id).id)
            done = await sync(files, tree, partial=p.partial)
        return SyncedView(
            message=f"{len(done.written)} written, {len(done.deleted)} deleted",
            written=done.written,
            deleted=done.deleted,
            unchanged=done.unchanged,
        )

    async def install(self, caller: Caller, p: InstallPackages) -> RanView:
        self.gate.admit()
        box = self.find(caller, p.session_id)
        packages = [_package(each) for each in p.packages]
        offline = self._template(box).network == "none"
        fetched = [each for each in packages if not each.startswith("./")]
        if offline and fetched:
            raise ForbiddenError(
                f"packages: {brief(fetched[0])} must be fetched, and the template "
                f"{box.template} has no network: its setting `network` is none",
                hint="sync the package as a folder and install ./FOLDER, or use a template whose "
                "image has it (docs/images.md)",
                field="packages",
            )
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier"]
        call = ExecCall(
            cmd=(*command, *(["--offline"] if offline else []), "--", *packages),
            env={"npm_config_cache": "/tmp/.npm"},
            cwd=WORKSPACE,
            timeout=min(INSTALL_TIMEOUT, self.config.max_exec_timeout),
        )
        return _ran(await self.service.exec(box.id, call))

    async def execute(self, caller: Caller, p: ExecuteFile) -> RanView:
        """Writes the code where the editor has it, so that imports find their neighbours."""
        self.gate.admit()
        box = self.find(caller, p.session_id)
        path = f"{WORKSPACE}/{inside_workspace(p.filename, field='filename')}"
        command = _command(self._template(box), path)
        await self.service.files(box.id).write(path, p.code.encode())
        timeout = None if p.timeout_ms is None else p.timeout_ms / 1000
        call = ExecCall(cmd=command, cwd=WORKSPACE, timeout=timeout)
        return _ran(await self.service.exec(box.id, call))

    def find(self, caller: Caller, session: str) -> Sandbox:
        """Raises NotFoundError."""
        found = self._find(caller, session)
        if found is None:
            raise NotFoundError(
                f"session {brief(session)} has no container",
                hint="POST /api/playground/container makes one",
                session=session,
            )
        return found

    def _find(self, caller: Caller, session: str) -> Sandbox | None:
        name = named(caller.tenant, session)
        found = self._guess(self._last.pop(name, ""), caller, session)
        if found is None:
            theirs = self.service.list(metadata={LABEL: session}, tenant=caller.tenant)
            found = next((box for box in theirs if box.state in _LIVE), None)
        if found is not None:
            self._last[name] = found.id
            if len(self._last) > MOST_REMEMBERED:
                self._last.popitem(last=False)
        return found

    def _guess(self, id: str, caller: Caller, session: str) -> Sandbox | None:
        try:
            box = self.service.get(id)
        except (NotFoundError, GoneError):
            return None
        same = box.tenant == caller.tenant and box.metadata.get(LABEL) == session
        return box if same and box.state in _LIVE else None

    def _template(self, box: Sandbox) -> Template:
        found = resolve(self.service.catalog, box.template, box.tenant)
        return found or Template(name=box.template)


def _millis(box: Sandbox) -> int:
    return round(box.idle_timeout * 1000)


def _package(name: str) -> str:
    """A name for npm, perhaps with a version; or a folder of the workspace, as ./NAME."""
    if name.startswith("./"):
        return f"./{inside_workspace(name, field='packages')}"
    if not _PACKAGE.fullmatch(name):
        raise invalid_field("packages", f"{brief(name)} is no package's name")
    return name


def _command(template: Template, path: str) -> tuple[str, ...]:
    suffix = PurePosixPath(path).suffix
    how = template.languages.get(suffix.removeprefix("."))
    if how is None:
        known = ", ".join(sorted(f".{name}" for name in template.languages))
        raise invalid_field(
            "filename",
            f"{brief(suffix)} is nothing that template {template.name} can run",
            hint=f"it can run: {known}",
        )
    return tuple(word.replace("{file}", path) for word in how.command)


def _ran(done: ExecResult) -> RanView:
    return RanView(
        success=done.exit.exit_code == 0,
        output=show(done.stdout, "text"),
        error=show(done.stderr, "text"),
        exit_code=done.exit.exit_code,
        timed_out=done.exit.timed_out,
    )
