"""`filesystem.Filesystem`: a sandbox's files and folders, but for their content."""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec
from starlette.requests import Request

from capsule.edge.e2b.connect import RpcError
from capsule.edge.e2b.entries import DETAIL, entry
from capsule.edge.e2b.guests import Guest
from capsule.edge.e2b.listing import encoded, listed
from capsule.edge.e2b.rpc import Call, unary
from capsule.errors import ConflictError, NotFoundError
from capsule.service import Service

PATH = "/filesystem.Filesystem/"


class At(msgspec.Struct):
    path: str = ""


class ListDir(At):
    depth: int | None = None


class Move(msgspec.Struct):
    source: str
    destination: str


class Filesystem:
    def __init__(self, service: Service) -> None:
        self._service = service

    def calls(self) -> dict[tuple[str, str], Call]:
        found = {
            "Stat": unary(At, self.stat),
            "MakeDir": unary(At, self.make_dir),
            "Move": unary(Move, self.move),
            "ListDir": unary(ListDir, self.list_dir),
            "Remove": unary(At, self.remove),
        }
        return {("POST", PATH + name): call for name, call in found.items()}

    async def stat(self, guest: Guest, asked: At, request: Request) -> Any:
        return await self._entry(guest, guest.path(asked.path))

    async def make_dir(self, guest: Guest, asked: At, request: Request) -> Any:
        path = guest.path(asked.path)
        try:
            made = await self._service.files(guest.id).mkdir(path)
        except ConflictError:
            text = f"path exists and is not a directory: {path}"
            raise RpcError("invalid_argument", text) from None
        if not made:
            raise RpcError("already_exists", f"directory already exists: {path}")
        return await self._entry(guest, path)

    async def move(self, guest: Guest, asked: Move, request: Request) -> Any:
        source, target = guest.path(asked.source), guest.path(asked.destination)
        await self._service.files(guest.id).move(source, target, parents=True)
        return await self._entry(guest, target)

    async def list_dir(self, guest: Guest, asked: ListDir, request: Request) -> Any:
        path, files = guest.path(asked.path), self._service.files(guest.id)
        found = await listed(files, path, depth=asked.depth or 1, detail=DETAIL)
        told = await encoded(found, lambda each: entry(each, posixpath.join(path, each.path)))
        return {"entries": told}

    async def _entry(self, guest: Guest, path: str) -> Any:
        found = await self._service.files(guest.id).stat(path, detail=DETAIL)
        return {"entry": entry(found, path)}

    async def remove(self, guest: Guest, asked: At, request: Request) -> Any:
        files, path = self._service.files(guest.id), guest.path(asked.path)
        try:
            await files.remove(path, recursive=True)
        except NotFoundError:
            pass
        return {}
