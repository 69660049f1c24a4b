"""Contents of artifacts, stored by hash: once, complete, and as long as a record has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule.errors import NotFoundError, TooLargeError
from capsule.sessions.blobs import Blobs, Recorded


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
