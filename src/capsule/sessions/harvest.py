"""What an execution left: files below /workspace/artifacts, and pictures and documents that its
results carry. Nothing in here trusts a name, a size or a type that comes from a sandbox.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import structlog

from capsule.errors import CapsuleError, NotFoundError
from capsule.model import WORKSPACE, FileStat
from capsule.service import Files
from capsule.service.kernel_wire import Shown
from capsule.sessions.blobs import Blob, Blobs
from capsule.sessions.records import Artifact, Session, Skipped, new_uid

log = structlog.get_logger(__name__)

FOLDER = f"{WORKSPACE}/artifacts"
MAX_ARTIFACTS = 1000  # per session
MAX_AT_ONCE = 200  # per execution; the others come with the next
MAX_SEEN = 10_000  # entries of the folder that are looked at
MORE = f"more than {MAX_AT_ONCE} at once; the next execution takes some of them"
FULL = f"the session has {MAX_ARTIFACTS} artifacts, which is the limit"
UNKNOWN = "application/octet-stream"
# The forms of a result that are files of their own.
CARRIED = {
    "png": ("png", "image/png", True),
    "jpeg": ("jpg", "image/jpeg", True),
    "pdf": ("pdf", "application/pdf", True),
    "svg": ("svg", "image/svg+xml", False),
}
# What the machine's own tables may lack, or say differently.
_TYPES = {
    ".csv": "text/csv",
    ".json": "application/json",
    ".md": "text/markdown",
    ".parquet": "application/vnd.apache.parquet",
    ".py": "text/x-python",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}


class Budget(Protocol):
    """What each tenant may store."""

    def left(self, tenant: str) -> int | None: ...

    def expect(self, tenant: str, size: int) -> None: ...

    def settle(self, tenant: str, size: int) -> None: ...


class Found(NamedTuple):
    artifacts: tuple[Artifact, ...]
    skipped: tuple[Skipped, ...]


class _Room:
    """What one execution may still add to its session."""

    def __init__(self, files: int, size: int, stored: Budget, tenant: str) -> None:
        self._files, self._at_once, self._size = files, MAX_AT_ONCE, size
        self._stored, self._tenant = stored, tenant
        self.expected = 0  # bytes of its tenant's quota

    @property
    def left(self) -> int:
        quota = self._stored.left(self._tenant)
        return max(min(self._size, self._size if quota is None else quota), 0)

    def grow(self, more: int) -> None:
        """What was taken is larger than was said, or smaller."""
        self._size -= more
        self.expected += more
        self._stored.expect(self._tenant, more)

    def refuses(self, size: int) -> str:
        """Why not; "" takes the room."""
        if self._files <= 0:
            return FULL
        if self._at_once <= 0:
            return MORE
        if size > self._size:
            most = max(self._size, 0)
            return f"{size} bytes, and the session's artifacts may have {most} more"
        quota = self._stored.left(self._tenant)
        if quota is not None and size > quota:
            return f"{size} bytes, and tenant {self._tenant} may store {quota} more: its quota"
        self._files, self._at_once = self._files - 1, self._at_once - 1
        self.grow(size)
        return ""


class Harvest:
    def __init__(self, blobs: Blobs, stored: Budget, *, most: int, most_together: int) -> None:
        """`most` bytes in one file, `most_together` in all of a session's."""
        self._blobs = blobs
        self._stored = stored
        self._most = most
        self._most_together = most_together

    async def gather(
        self,
        session: Session,
        files: Files | None,
        results: Iterable[Shown],
        known: list[Artifact],
        now: float,
    ) -> Found:
        """What is new since `known`; contents are held until they are released. `files` None: its
        sandbox is over."""
        kept: list[Artifact] = []
        together = self._most_together - _size(known)
        room = _Room(MAX_ARTIFACTS - len(known), together, self._stored, session.tenant)
        try:
            skipped = await self._gather(session, files, results, known, now, kept, room)
        except BaseException:
            self.release(session, kept)
            raise
        finally:
            missed = room.expected - sum(each.size for each in kept)
            self._stored.settle(session.tenant, missed)
        return Found(tuple(kept), skipped)

    def release(self, session: Session, artifacts: Iterable[Artifact]) -> None:
        """They are recorded, or nobody wants them."""
        for artifact in artifacts:
            self._blobs.release([artifact.sha256])
            self._stored.settle(session.tenant, artifact.size)

    async def _gather(
        self,
        session: Session,
        files: Files | None,
        results: Iterable[Shown],
        known: list[Artifact],
        now: float,
        kept: list[Artifact],
        room: _Room,
    ) -> tuple[Skipped, ...]:
        skipped: list[Skipped] = []
        for name, mime, data in carried(results, len(known)):
            if reason := room.refuses(len(data)):
                skipped.append(Skipped(name, len(data), reason))
                continue
            blob = await self._blobs.add_bytes(data, len(data))
            kept.append(_artifact(session, name, "result", mime, blob, now))
        for stat in await self._new_files(files, known) if files else ():
            assert files is not None
            got = room.refuses(stat.size) or await self._take(files, stat, room)
            if isinstance(got, Blob):
                name = name_of(stat)
                kept.append(_artifact(session, name, "file", mime_of(name), got, now, stat.mtime))
            elif len(skipped) < MAX_AT_ONCE:
                skipped.append(Skipped(name_of(stat), stat.size, got))
        return tuple(skipped)

    async def _take(self, files: Files, stat: FileStat, room: _Room) -> Blob | str:
        """Its content, or why it is not kept. It may be larger by now than when it was listed."""
        if stat.size > self._most:
            return f"{stat.size} bytes, limit {self._most}"
        try:
            async with files.read(f"{FOLDER}/{stat.path}") as reader:
                blob = await self._blobs.add(reader, min(self._most, stat.size + room.left))
        except CapsuleError as error:  # it went, grew, or may not be read
            return error.message
        room.grow(blob.size - stat.size)
        return blob

    async def _new_files(self, files: Files, known: list[Artifact]) -> list[FileStat]:
        try:
            listing = await files.list(FOLDER, recursive=True, limit=MAX_SEEN)
        except NotFoundError:
            return []
        except CapsuleError as error:  # the execution itself was fine
            log.warning("artifacts not looked for", reason=error.message)
            return []
        last = {each.name: (each.size, each.mtime) for each in known if each.source == "file"}
        found = [each for each in listing.entries if each.type == "file"]
        return [
            each
            for each in sorted(found, key=lambda each: each.path)
            if last.get(name_of(each)) != (each.size, each.mtime)
        ]


def _size(known: Iterable[Artifact]) -> int:
    return sum({each.sha256: each.size for each in known}.values())


def name_of(stat: FileStat) -> str:
    """Its path below the folder, and always text."""
    return stat.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def carried(results: Iterable[Shown], before: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, type and content of each file that the results carry."""
    number = before
    for shown in results:
        for form, (ending, mime, encoded) in CARRIED.items():
            text = getattr(shown, form)
            if not isinstance(text, str) or not text:
                continue
            try:
                data = base64.b64decode(text, validate=False) if encoded else text.encode()
            except (binascii.Error, ValueError):
                continue
            number += 1
            yield f"result-{number}.{ending}", mime, data


def mime_of(name: str) -> str:
    ending = "." + name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name else ""
    guessed = _TYPES.get(ending) or mimetypes.guess_type(f"x{ending}", strict=True)[0]
    return guessed or UNKNOWN


def _artifact(
    session: Session,
    name: str,
    source: str,
    mime: str,
    blob: Blob,
    now: float,
    mtime: float = 0.0,
) -> Artifact:
    return Artifact(
        id=new_uid(),
        session=session.uid,
        execution=0,  # told when it is logged
        name=name,
        source=source,
        mime=mime,
        size=blob.size,
        sha256=blob.sha256,
        created=now,
        mtime=mtime,
    )
