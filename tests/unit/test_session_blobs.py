"""Contents of artifacts, stored by hash: once, complete, and as long as a record has them."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from capsule.errors import NotFoundError, TooLargeError
from capsule.model import FileStat
from capsule.service import Files
from capsule.sessions.blobs import Blobs, Recorded
from capsule.sessions.harvest import Harvest, mime_of
from capsule.sessions.records import Phase, Session
from capsule.sessions.retention import Item, giving_way


@pytest.fixture
async def blobs(tmp_path: Path) -> Blobs:
    made = Blobs(tmp_path / "artifacts")
    await made.open()
    return made


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_the_same_content_is_there_once(blobs: Blobs, tmp_path: Path) -> None:
    one = await blobs.add(pieces(b"hel", b"lo"), 100)
    two = await blobs.add_bytes(b"hello", 100)
    assert one == two and one.size == 5
    assert one.sha256 == hashlib.sha256(b"hello").hexdigest()
    assert files(tmp_path) == [one.sha256]
    with await blobs.open_file(one.sha256) as file:
        assert file.read() == b"hello"


async def test_an_incomplete_content_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise NotFoundError("gone")

    with pytest.raises(TooLargeError, match="more than 4 bytes"):
        await blobs.add(pieces(b"abc", b"de"), 4)
    with pytest.raises(NotFoundError):
        await blobs.add(broken(), 100)
    assert files(tmp_path) == []
    (tmp_path / "artifacts" / ".new-abc").write_text("of a server that was killed")
    await Blobs(tmp_path / "artifacts").open()
    assert files(tmp_path) == []


def having(*hashes: str) -> Recorded:

    async def recorded(asked: list[str]) -> set[str]:
        return set(asked) & set(hashes)

    return recorded


async def test_a_sweep_removes_what_no_record_has(blobs: Blobs, tmp_path: Path) -> None:
    kept, held, gone = [await blobs.add_bytes(text, 9) for text in (b"a", b"b", b"c")]
    blobs.release([kept.sha256, gone.sha256])
    assert await blobs.sweep(having(kept.sha256)) == 1
    assert files(tmp_path) == sorted([kept.sha256, held.sha256])
    blobs.release([held.sha256])
    assert await blobs.sweep(having(kept.sha256)) == 1
    with pytest.raises(NotFoundError, match="is gone"):
        await blobs.open_file(held.sha256)


@pytest.mark.parametrize(
    ("name", "mime"),
    [
        ("a.csv", "text/csv"),
        ("deep/b.PNG", "image/png"),
        ("noending", "application/octet-stream"),
        (".hidden", "application/octet-stream"),
        ("x.tar.gz/evil\n.html", "text/html"),
        ("data:text/html,x", "application/octet-stream"),
    ],
)
def test_types_come_from_the_ending_alone(name: str, mime: str) -> None:
    assert mime_of(name) == mime


class Growing:
    """Files that grow between the listing and the read."""

    async def list(self, path: str, *, recursive: bool, limit: int) -> SimpleNamespace:
        entries = [FileStat(f"f{n}", f"f{n}", "file", 1, 0o644, 1.0, 1000, 1000) for n in range(9)]
        return SimpleNamespace(entries=entries)

    @asynccontextmanager
    async def read(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        yield pieces(*[path.encode() * 10] * 10)


class Budget:
    """The quota of a tenant, and what is reserved of it."""

    def __init__(self, most: int) -> None:
        self.most, self.expected = most, 0

    def left(self, tenant: str) -> int:
        return self.most - self.expected

    def expect(self, tenant: str, size: int) -> None:
        self.expected += size

    def settle(self, tenant: str, size: int) -> None:
        self.expected -= size


async def test_growing_files_stay_within_the_quota(blobs: Blobs) -> None:
    session = Session("u", "s", Phase.OPEN, "bash", "bash", 0.0, 0.0, 0.0)
    budget = Budget(5_000)
    harvest = Harvest(blobs, budget, most=100_000, most_together=8_000)
    await asyncio.to_thread(mimetypes.init)
    found = await harvest.gather(session, cast(Files, Growing()), (), [], 0.0)
    assert [each.size for each in found.artifacts] == [2_300] * 2
    assert budget.expected == 4_600, "until they are recorded"
    harvest.release(session, found.artifacts)
    assert budget.expected == 0


def test_the_oldest_content_of_the_largest_tenant_is_removed_first() -> None:
    items = [
        Item("red", "r1", "a", 40),
        *(Item("blue", f"b{n}", f"x{n}", 30) for n in range(4)),
        Item("red", "r2", "b", 10),
        Item("blue", "same", "b", 10),
    ]
    assert giving_way(items, 170) == []
    assert giving_way(items, 110) == ["b0", "b1"]
    assert giving_way(items, 60) == ["b0", "b1", "b2", "r1"]
    assert giving_way(items, 0) == ["b0", "b1", "b2", "r1", "b3", "r2", "same"]
