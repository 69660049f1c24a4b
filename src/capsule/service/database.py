"""A SQLite file that the event loop may use.

In WAL mode a row is written in tens of microseconds and without an fsync: what the kernel has taken
survives a `kill -9`. Checkpoints, which do fsync, run in a thread.

Nothing here waits on SQLite's locks, as that would stop the loop: a busy database is tried again
from the loop for `PATIENCE` seconds, then it is UnavailableError. A full disk is NoSpaceError.
Both pass by themselves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from capsule.errors import ConflictError, NoSpaceError, UnavailableError

PATIENCE = 2.0
TRIM_AFTER = 256  # changes, about 4 MiB of log
CHECKPOINTS = (*["PASSIVE"] * 4, "TRUNCATE")

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class Database:
    """`schema` makes a new file; `later` came after it, and an older server does not mind it.
    `oldest` is the first format that is as good as this one."""

    def __init__(
        self, path: Path, *, schema: str, version: int, later: str = "", oldest: int | None = None
    ) -> None:
        self.path = path
        self._schema = schema
        self._version = version
        self._later = later
        self._readable = (0, *range(oldest or version, version + 1))
        self._db: sqlite3.Connection | None = None
        self._used = 0  # since the last checkpoint

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        with translated(self.path):
            self.path.touch(mode=0o600)
            self._db = self._connect()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript("BEGIN IMMEDIATE;" + self._schema + "COMMIT;")
            if version in self._readable:
                self._db.executescript(f"{self._later};PRAGMA user_version = {self._version};")
        if version not in self._readable:
            raise ConflictError(
                f"{self.path} has format {version}, this version of Capsule knows {self._version}",
                hint="use that version, or another data_dir",
            )

    def _connect(self) -> sqlite3.Connection:
        # Used by one thread at a time: opened in one, used in the loop's, closed there.
        db = sqlite3.connect(self.path, timeout=0.0, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA journal_size_limit = 0")  # a log that is begun again is cut off first
        return db

    async def aclose(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            await asyncio.to_thread(db.close)

    async def trim(self) -> None:
        if self._used >= TRIM_AFTER:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        await asyncio.to_thread(self._checkpoint)

    def _checkpoint(self) -> None:
        # Its own connection: PASSIVE never waits for the loop's, nor keeps it waiting. The log
        # begins anew only when all of it was taken in, so it is tried until nothing came in
        # between; where that does not end, writers have to wait for once.
        self._used = 0
        before = -1
        with translated(self.path):
            db = self._connect()
            db.execute("PRAGMA busy_timeout = 200")  # for TRUNCATE, between two writes
            try:
                for mode in CHECKPOINTS:
                    _, written, _ = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
                    if written == before:
                        break
                    before = written
            finally:
                db.close()

    async def aside(self, read: Work[T]) -> T:
        """In a thread and on a connection of its own: for what reads a lot."""
        return await asyncio.to_thread(self._aside, read)

    def _aside(self, read: Work[T]) -> T:
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        with translated(self.path), closing(sqlite3.connect(address, uri=True)) as db:
            return read(db)

    async def run(self, work: Work[T]) -> T:
        give_up = time.monotonic() + PATIENCE
        self._used += 1
        while True:
            if self._db is None:
                raise UnavailableError("the store is closed")
            try:
                with translated(self.path):
                    return work(self._db)
            except UnavailableError as error:
                if not error.details.get("busy") or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(0.02)


def whole(write: Work[T]) -> Work[T]:
    """All that `write` does, or nothing."""

    def transaction(db: sqlite3.Connection) -> T:
        db.execute("BEGIN IMMEDIATE")
        try:
            result = write(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk has rolled back already
                db.execute("ROLLBACK")
            raise
        return result

    return transaction


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the class
        if code in _BUSY:
            raise UnavailableError("records are locked by another process", busy=True) from error
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise ConflictError("the idempotency key is taken") from error
        if code == sqlite3.SQLITE_FULL:
            raise NoSpaceError(
                "no space left for the server's records", hint="free some on the disk of data_dir"
            ) from error
        if code in _BROKEN:
            raise UnavailableError(
                f"{path} is damaged: {error}", hint="move it away; running sandboxes end then"
            ) from error
        raise UnavailableError(f"cannot use the records in {path}: {error}") from error
    except OSError as error:
        why = error.strerror
        raise UnavailableError(f"cannot use the records in {path}: {why}") from error
