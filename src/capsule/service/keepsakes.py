"""What users keep (snapshots, volumes), a second time beside the data: one small file for each.

A database can be lost, replaced or put back from a copy; the data of others must not go with it.
data_dir/kept/KIND/NAME.json is on the disk before anybody hears that the thing is kept, and gone
before it is removed. `.ID.json` is of one that is being made or removed: a server that finds it
removes what there is of it. Whatever else has no record is found again by its file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from capsule.host_errors import host_errors

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_SUFFIX = ".json"
_DRAFT = ".new"


class Found(NamedTuple, Generic[T]):
    kept: list[T]
    unfinished: list[T]  # half made or half removed
    unreadable: int  # files of which nobody knows what they keep


class Keepsakes(Generic[T]):
    """Of one kind. Names are such as `validate.name` lets pass, others' as TENANT/NAME."""

    def __init__(self, folder: Path, type: type[T]) -> None:
        self._folder = folder
        self._type = type

    async def open(self) -> Found[T]:
        """As `load`, before anything else is done: drafts are of a server that was killed."""
        await self._do(self._drop_drafts)
        return await self.load()

    async def load(self) -> Found[T]:
        return await self._do(self._load)

    async def begin(self, name: str, id: str, body: T) -> None:
        """It is going to be made, or removed: until `keep` or `finish` it is unfinished."""
        await self._do(lambda: self._move(self._path(name), self._path(f".{id}"), body))

    async def withdraw(self, name: str, id: str) -> None:
        """Unfinished again, if it was kept. Needs no space."""
        await self._do(lambda: self._withdraw(self._path(name), self._path(f".{id}")))

    async def keep(self, name: str, id: str, body: T) -> None:
        await self._do(lambda: self._move(self._path(f".{id}"), self._path(name), body))

    async def forget(self, name: str) -> None:
        """Fine if it never was."""
        await self._do(lambda: self._remove(self._path(name)))

    async def finish(self, id: str) -> None:
        """Nothing is left of what was unfinished."""
        await self._do(lambda: self._remove(self._path(f".{id}")))

    async def _do(self, work: Callable[[], R]) -> R:
        with host_errors("what is kept cannot be noted"):
            return await asyncio.to_thread(work)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.replace('/', '@')}{_SUFFIX}"

    def _drop_drafts(self) -> None:
        for draft in self._folder.glob(f"*{_SUFFIX}{_DRAFT}"):
            draft.unlink()

    def _load(self) -> Found[T]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: Found[T] = Found([], [], 0)
        names = [name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)]
        for path in [self._folder / name for name in sorted(names)]:
            try:
                body = msgspec.json.decode(path.read_bytes(), type=self._type)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.warning("what is kept cannot be read", file=str(path), reason=str(error))
                found = found._replace(unreadable=found.unreadable + 1)
                continue
            place = found.unfinished if path.name.startswith(".") else found.kept
            place.append(body)
        return found

    def _move(self, source: Path, target: Path, body: T) -> None:
        """At no moment are there both, or neither."""
        try:
            os.rename(source, target)
        except FileNotFoundError:
            self._write(target, body)
        self._settle()

    def _withdraw(self, source: Path, target: Path) -> None:
        with suppress(FileNotFoundError):
            os.rename(source, target)
            self._settle()

    def _write(self, path: Path, body: T) -> None:
        draft = path.with_name(f"{path.name}{_DRAFT}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)

    def _remove(self, path: Path) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        self._settle()

    def _settle(self) -> None:
        """The names, too, are on the disk."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
