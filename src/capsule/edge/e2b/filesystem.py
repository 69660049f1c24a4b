"""`filesystem.Filesystem`: a sandbox's files and folders, but for their content."""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec
from starlette.requests import Request

from capsule.edge.e2b.connect import RpcError
from capsule.edge.e2b.entries import entry
from capsule.edge.e2b.guests import Guest
from capsule.edge.e2b.rpc import Call, unary
from capsule.errors import NotFoundError
from capsule.service import Service
from capsule.service.files import Files

PATH = "/filesystem.Filesystem/"
MAX_DEPTH = 128


class At(msgspec.Struct):
    path: str = ""


class ListDir(At):
    depth: int = 0


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
        files, path = self._service.files(guest.id), guest.path(asked.path)
        return {"entry": await entry(files, await files.stat(path), path)}

    async def make_dir(self, guest: Guest, asked: At, request: Request) -> Any:
        files, path = self._service.files(guest.id), guest.path(asked.path)
        try:
            there = await files.stat(path, follow=True)
        except NotFoundError:
            pass
        else:
            if there.type == "dir":
                raise RpcError("already_exists", f"directory already exists: {path}")
            raise RpcError("invalid_argument", f"path exists and is not a directory: {path}")
        await files.mkdir(path)
        return {"entry": await entry(files, await files.stat(path), path)}

    async def move(self, guest: Guest, asked: Move, request: Request) -> Any:
        files = self._service.files(guest.id)
        source, target = guest.path(asked.source), guest.path(asked.destination)
        await files.stat(source)
        await files.mkdir(posixpath.dirname(target))
        await files.move(source, target)
        return {"entry": await entry(files, await files.stat(target), target)}

    async def list_dir(self, guest: Guest, asked: ListDir, request: Request) -> Any:
        files, path = self._service.files(guest.id), guest.path(asked.path)
        depth = min(asked.depth or 1, MAX_DEPTH)
        await self._must_be_folder(files, path)
        listing = await files.list(path, recursive=depth > 1, depth=depth)
        # As Go walks: a folder, then what is in it.
        found = sorted(listing.entries, key=lambda s: s.path.split("/"))
        told = [await entry(files, s, posixpath.join(path, s.path)) for s in found]
        return {"entries": told}

    async def _must_be_folder(self, files: Files, path: str) -> None:
        there = await files.stat(path, follow=True)
        if there.type != "dir":
            raise RpcError("invalid_argument", f"path is not a directory: {path}")

    async def remove(self, guest: Guest, asked: At, request: Request) -> Any:
        files, path = self._service.files(guest.id), guest.path(asked.path)
        try:
            await files.remove(path, recursive=True)
        except NotFoundError:
            pass
        return {}
