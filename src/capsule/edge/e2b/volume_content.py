"""E2B's `/volumecontent/{volume_id}/…`: the files of a volume, for who has its token.

GET, PATCH, DELETE  …/path?path=     about a file or folder; {"mode"}; with all that is below it
GET, POST           …/dir?path=      what is in a folder (depth); a new one (mode, force: parents)
GET, PUT            …/file?path=     what is in a file; instead of what is in it (mode, force)

Nothing here opens a path of the host: see `service.volume_files`. Files belong to the user that
programs are; nobody can give them to another one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.config import Config
from capsule.edge.body import chunks, lift, read_json
from capsule.edge.download import open_download
from capsule.edge.drain import Gate
from capsule.edge.e2b.access import Access, same
from capsule.edge.e2b.control_shapes import Body
from capsule.edge.e2b.control_views import View
from capsule.edge.e2b.doors import Place
from capsule.edge.e2b.listing import encoded, listed
from capsule.edge.errors import (
    encode,
    http_headers,
    invalid_field,
    status_of,
    told,
    understand,
    wrong_method,
)
from capsule.edge.identity import CALLER
from capsule.edge.routing import reply
from capsule.errors import CapsuleError, ConflictError, NotFoundError, UnauthenticatedError
from capsule.model import FileStat
from capsule.service import Service
from capsule.service.caller import Caller
from capsule.service.files import Files
from capsule.service.values import Volume

PREFIX = "/volumecontent/"
ROUTE = Place("volumecontent")
OWNER = 1000
_TYPES = {"file": "file", "dir": "directory", "symlink": "symlink"}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}

Id = Annotated[int, Meta(ge=0, lt=2**32)]


class Changes(Body, kw_only=True, frozen=True):
    uid: Id | None = None
    gid: Id | None = None
    mode: Annotated[int, Meta(ge=0, le=0o7777)] | None = None


class VolumeEntry(View, frozen=True, kw_only=True):
    name: str
    type: str
    path: str
    size: int
    mode: int
    uid: int
    gid: int
    atime: datetime
    mtime: datetime
    ctime: datetime
    target: str | UnsetType = field(default=UNSET)


class Visitor:
    """One request, and the volume that it is about."""

    def __init__(self, request: Request, files: Files, root: str) -> None:
        self.request = request
        self.files = files
        self._root = root
        given = request.query_params.get("path", "")
        if not given:
            raise invalid_field("path", "is missing")
        self.path = "/" + posixpath.normpath("/" + given).lstrip("/")

    @property
    def place(self) -> str:
        """The path as the sandbox has it."""
        return self._root + self.path.rstrip("/")

    def number(self, name: str, most: int) -> int | None:
        text = self.request.query_params.get(name)
        if text is None:
            return None
        if not text.isdecimal() or len(text) > 12 or int(text) > most:
            raise invalid_field(name, f"{text[:40]!r} is no number, allowed: 0 to {most}")
        return int(text)

    def truth(self, name: str) -> bool | None:
        text = self.request.query_params.get(name)
        if text is None:
            return None
        if text.lower() not in _TRUTH:
            raise invalid_field(name, f"{text[:40]!r} is neither true nor false")
        return _TRUTH[text.lower()]

    def changes(self) -> Changes:
        """In the query, of what is new."""
        most = 2**32 - 1
        found = Changes(
            uid=self.number("uid", most),
            gid=self.number("gid", most),
            mode=self.number("mode", 0o7777),
        )
        check_owner(found)
        return found

    async def entry(self) -> VolumeEntry:
        return entry(await self.files.stat(self.place), self.path)


Call = Callable[[Visitor], Awaitable[Response]]


class VolumeContent:
    """An app beside the site: what it asks for is no key."""

    def __init__(self, service: Service, config: Config, gate: Gate, access: Access) -> None:
        self._service = service
        self._gate = gate
        self._max_upload = config.max_upload
        self._access = access
        self.calls: dict[str, dict[str, Call]] = {
            "path": {"GET": about, "PATCH": change, "DELETE": remove},
            "dir": {"GET": list_dir, "POST": make_dir},
            "file": {"GET": download, "PUT": self._upload},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = ROUTE
        try:
            answer = await self._answer(Request(scope, receive))
        except Exception as error:  # the edge: whatever it is becomes an answer
            answer = refusal(understand(error))
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        id, _, what = request.scope["path"].removeprefix(PREFIX).partition("/")
        volume = self._opened(request, id)
        calls = self.calls.get(what)
        if calls is None:
            raise NotFoundError(f"no such path: {request.scope['path'][:100]}")
        call = calls.get("GET" if request.method == "HEAD" else request.method)
        if call is None:
            raise wrong_method(request.method, sorted(calls))
        self._gate.admit()
        async with self._service.volume_files.open(volume) as look:
            visitor = Visitor(request, look.files, look.root)
            try:
                return await call(visitor)
            except NotFoundError:
                raise NotFoundError(f"path {visitor.path!r} does not exist") from None

    def _opened(self, request: Request, id: str) -> Volume:
        """Raises UnauthenticatedError: also for who has no token to say what does not exist."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not same(token.strip(), self._access.volume_token(id)):
            raise UnauthenticatedError(
                "not the token of this volume", hint="Volume.connect(id) gets it anew"
            )
        volume = self._service.volumes.by_id(id)
        request.scope[CALLER] = Caller(volume.tenant, frozenset(), "volume-token")
        return volume

    async def _upload(self, at: Visitor) -> Response:
        lift(at.request, self._max_upload)
        wanted = at.changes()
        if at.path == "/":
            raise invalid_field("path", "'/' is the volume itself")
        mode = 0o644 if wanted.mode is None else wanted.mode
        exclusive = at.truth("force") is False
        found = await at.files.write(
            at.place, chunks(at.request.receive), mode=mode, parents=False, exclusive=exclusive
        )
        if found.mode != mode:
            await at.files.chmod(at.place, mode)
        return reply(await at.entry(), 201)


async def about(at: Visitor) -> Response:
    return reply(await at.entry())


async def change(at: Visitor) -> Response:
    wanted = await read_json(at.request, Changes)
    await at.files.stat(at.place)
    check_owner(wanted)
    if wanted.mode is not None:
        await at.files.chmod(at.place, wanted.mode)
    return reply(await at.entry())


async def remove(at: Visitor) -> Response:
    if at.path == "/":
        raise invalid_field("path", "'/' is the volume itself: delete that")
    await at.files.remove(at.place, recursive=True)
    return Response(status_code=204)


async def list_dir(at: Visitor) -> Response:
    depth = at.number("depth", 2**32 - 1) or 1
    there = await at.files.stat(at.place, follow=True)
    if there.type != "dir":
        raise invalid_field("path", f"{at.path!r} is no folder")
    found = await listed(at.files, at.place, depth=depth)
    return reply(await encoded(found, lambda each: entry(each, posixpath.join(at.path, each.path))))


async def make_dir(at: Visitor) -> Response:
    """Without `force` it is new, and in a folder that there is."""
    wanted = at.changes()
    mode = 0o755 if wanted.mode is None else wanted.mode
    force = at.truth("force") or False
    if not force:
        await _must_be_new(at)
    await at.files.mkdir(at.place, parents=force, mode=mode)
    found = await at.files.stat(at.place, follow=True)
    if wanted.mode is not None and found.mode != mode:
        await at.files.chmod(at.place, mode)
    return reply(await at.entry(), 201)


async def _must_be_new(at: Visitor) -> None:
    try:
        await at.files.stat(at.place)
    except NotFoundError:
        return
    raise ConflictError(f"path {at.path!r} exists already", hint="take another, or force it")


async def download(at: Visitor) -> Response:
    answer = await open_download(at.files, at.place, at.request)
    if "content-length" not in answer.headers:
        answer.headers["content-length"] = "0"
    return answer


def check_owner(wanted: Changes) -> None:
    for name, id in (("uid", wanted.uid), ("gid", wanted.gid)):
        if id is not None and id != OWNER:
            raise invalid_field(
                name,
                f"{id} cannot own files: in a volume they belong to the sandbox's user, {OWNER}",
                hint=f"leave out {name}",
            )


def entry(found: FileStat, path: str) -> VolumeEntry:
    """Of times only the last change is known."""
    when = datetime.fromtimestamp(found.mtime, UTC)
    return VolumeEntry(
        name=posixpath.basename(path) or "/",
        type=_TYPES.get(found.type, "unknown"),
        path=path,
        size=found.size,
        mode=found.mode,
        uid=found.uid,
        gid=found.gid,
        atime=when,
        mtime=when,
        ctime=when,
        target=UNSET if found.target is None else found.target,
    )


def refusal(error: CapsuleError) -> Response:
    """As this API has it: the code is a text."""
    said: dict[str, Any] = told(error)
    message = f"{said['message']}; {said['hint']}" if "hint" in said else said["message"]
    status = status_of(error, e2b=True)
    body = encode({"code": str(status), "message": message})
    answer = Response(body, status_code=status)
    answer.raw_headers = http_headers(error, body, e2b=True)
    return answer
