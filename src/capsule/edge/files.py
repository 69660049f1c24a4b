"""The verbs on files: JSON in, JSON out. Contents of any size go through `rest_files` instead."""

from __future__ import annotations

import binascii
import posixpath

from capsule.config import Config
from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.errors import invalid_field
from capsule.edge.text import show
from capsule.errors import TooLargeError
from capsule.model import WORKSPACE, FileStat
from capsule.service import Service


class FileVerbs:
    def __init__(self, config: Config, service: Service) -> None:
        self.config = config
        self.service = service

    async def write(self, id: str, p: s.WriteFile) -> v.WrittenView:
        stat = await self.service.files(id).write(
            p.path,
            decoded("content", p.content, p.encoding),
            mode=s.mode_bits(p.mode),
            parents=p.parents,
            append=p.append,
            exclusive=p.exclusive,
        )
        return v.WrittenView(path=absolute(p.path), size=stat.size)

    async def read(self, id: str, p: s.ReadFile) -> v.ContentView:
        length = -1 if p.length is None else p.length
        limit = self.config.max_body
        try:
            found = await self.service.files(id).read_bytes(
                p.path, offset=p.offset, length=length, limit=limit
            )
        except TooLargeError as error:
            raise TooLargeError(
                f"too large for one JSON answer: {error.message}",
                hint=f"download it with GET /v1/sandboxes/{id}/files{absolute(p.path)}",
                **error.details,
            ) from None
        return v.ContentView(content=show(found.data, p.encoding), size=found.size)

    async def list(self, id: str, p: s.ListDir) -> v.ListingView:
        found = await self.service.files(id).list(p.path, recursive=p.recursive, limit=p.limit)
        folder = absolute(p.path)
        entries = [v.FileView.of(e, posixpath.join(folder, e.path)) for e in found.entries]
        return v.ListingView(entries=entries, truncated=found.truncated)

    async def stat(self, id: str, p: s.Stat) -> v.FileView:
        return view(await self.service.files(id).stat(p.path, follow=p.follow), p.path)

    async def mkdir(self, id: str, p: s.Mkdir) -> v.DoneView:
        await self.service.files(id).mkdir(p.path, parents=p.parents, mode=s.mode_bits(p.mode))
        return v.DoneView()

    async def move(self, id: str, p: s.Move) -> v.DoneView:
        await self.service.files(id).move(p.source, p.target, overwrite=p.overwrite)
        return v.DoneView()

    async def remove(self, id: str, p: s.Remove) -> v.DoneView:
        await self.service.files(id).remove(p.path, recursive=p.recursive)
        return v.DoneView()

    async def chmod(self, id: str, p: s.Chmod) -> v.DoneView:
        await self.service.files(id).chmod(p.path, s.mode_bits(p.mode))
        return v.DoneView()


def view(stat: FileStat, path: str) -> v.FileView:
    return v.FileView.of(stat, absolute(path))


def absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORKSPACE, path))


def decoded(field: str, text: str, encoding: str) -> bytes:
    if encoding == "text":
        return text.encode()
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        problem = str(error).lower()
        raise invalid_field(field, f"not valid base64: {problem}") from None
