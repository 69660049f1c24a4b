"""The files of a session beyond its sandbox: kept at its end, and there again when it is reopened.

Where the provider can make snapshots it is one, with all that was written in the sandbox; elsewhere
an archive of /workspace. A snapshot has a name that its session alone uses, and is its tenant's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog

from capsule.errors import (
    CapsuleError,
    NotFoundError,
    NotSupportedError,
    TooLargeError,
    UnavailableError,
)
from capsule.host_errors import host_errors
from capsule.model import WORKSPACE
from capsule.service import Service
from capsule.sessions.records import Kept, Session, new_uid

log = structlog.get_logger(__name__)

PIECE = 256 * 1024
LOST = ("processes", "variables")  # of interpreters; no provider keeps them
_SNAPSHOT = re.compile(r"session-([a-z2-7]+)-[a-z2-7]{8}")
ARCHIVE_LOST = (*LOST, "files outside /workspace", "sockets, pipes and devices")


class Workspaces:
    def __init__(self, service: Service, folder: Path, *, most: int) -> None:
        self._service = service
        self._folder = folder
        self._most = most
        self.archives: dict[str, tuple[str, int]] = {}  # whose, and how large; by name

    async def open(self) -> None:
        await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)

    async def keep(self, session: Session, now: float) -> Kept:
        """What it has now, also over its tenant's quota: that keeps others from being made, and
        costs nobody what was written. What was kept before stays until `drop`.

        Raises what keeps the sandbox from being used, TooLargeError, NoSpaceError.
        """
        name = f"session-{session.uid}-{new_uid()[:8]}"
        try:
            made = await self._service.snapshots.make(
                session.sandbox_id, name, {"session": session.id}, over_quota=True
            )
            return Kept("snapshot", name, now, made.size, LOST)
        except NotSupportedError:
            size = await self._pack(session.sandbox_id, self._folder / f"{name}.tar")
            kept = Kept("archive", f"{name}.tar", now, size, ARCHIVE_LOST)
            self._count(session, kept)
            return kept

    def snapshot(self, kept: Kept | None) -> str | None:
        """What a new sandbox for these files has to start from."""
        return kept.name if kept is not None and kept.how == "snapshot" else None

    def has(self, session: Session) -> bool:
        """Whether nobody has removed the snapshot."""
        name = self.snapshot(session.kept)
        try:
            return name is None or bool(self._service.snapshots.find(name, session.tenant))
        except NotFoundError:
            return False

    async def restore(self, sandbox_id: str, kept: Kept | None) -> None:
        """Into a sandbox that started from `snapshot`."""
        if kept is None or kept.how == "snapshot":
            return
        file = await self._open(self._folder / kept.name)
        try:
            await self._service.files(sandbox_id).tar_in(WORKSPACE, _pieces(file))
        finally:
            await asyncio.to_thread(file.close)

    async def drop(self, session: Session, kept: Kept | None) -> None:
        """What cannot be removed now is left to `sweep`."""
        try:
            await self.remove(session, kept)
        except (CapsuleError, OSError) as error:
            log.warning(
                "files of a session not removed", name=kept and kept.name, reason=str(error)
            )

    async def remove(self, session: Session, kept: Kept | None) -> None:
        """Raises what keeps it from being removed."""
        if kept is not None and kept.how == "snapshot":
            with contextlib.suppress(NotFoundError):  # somebody else has removed it
                await self._service.snapshots.delete(kept.name, session.tenant)
        elif kept is not None:
            with host_errors(f"cannot remove files in {self._folder}"):
                await asyncio.to_thread((self._folder / kept.name).unlink, missing_ok=True)
            self.archives.pop(kept.name, None)

    async def sweep(self, sessions: Sequence[Session]) -> None:
        """Remove what none of them has, deleted ones among them: of a server that was killed in
        between, or had no space to do so. At the start, when nothing is being made."""
        kept = {each.kept.name for each in sessions if each.kept}
        await asyncio.to_thread(self._sweep, kept)
        known = {(each.tenant, each.uid): each for each in sessions}
        for tenant in {each.tenant for each in sessions}:
            for snapshot in self._service.snapshots.list(tenant):
                ours = _SNAPSHOT.fullmatch(snapshot.name)
                session = known.get((tenant, ours[1])) if ours else None
                if session is not None and snapshot.name not in kept:
                    stale = Kept("snapshot", snapshot.name, 0.0, 0, ())
                    await self.drop(session, stale)
        for session in sessions:
            self._count(session, session.kept)

    def _count(self, session: Session, kept: Kept | None) -> None:
        if kept is not None and kept.how == "archive":
            self.archives[kept.name] = (session.tenant, kept.size)

    def _sweep(self, names: set[str]) -> None:
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    async def _open(self, path: Path) -> BinaryIO:
        try:
            return await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise UnavailableError(
                "the files of this session are gone", hint="begin a new session"
            ) from None

    async def _pack(self, sandbox_id: str, path: Path) -> int:
        with host_errors(f"cannot write to {self._folder}"):
            fd, temporary = await asyncio.to_thread(tempfile.mkstemp, dir=self._folder)
            size = 0
            try:
                async with contextlib.aclosing(
                    self._service.files(sandbox_id).tar_out(WORKSPACE)
                ) as pieces:
                    async for piece in pieces:
                        size += len(piece)
                        if size > self._most:
                            raise TooLargeError(
                                f"the files of the session have more than {self._most} bytes",
                                hint="remove some, or raise CAPSULE_MAX_SNAPSHOT",
                                limit=self._most,
                            )
                        await asyncio.to_thread(_write, fd, piece)
                await asyncio.to_thread(os.fsync, fd)
                await asyncio.to_thread(os.rename, temporary, path)
            finally:
                os.close(fd)
                await asyncio.to_thread(Path(temporary).unlink, missing_ok=True)
        return size


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece
