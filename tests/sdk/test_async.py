"""The async client does what the sync one does; tests/meta compares their methods."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule_sdk import AsyncCapsule, Exit, Output


async def test_run_files_and_streams(async_capsule: AsyncCapsule, tmp_path: Path) -> None:
    assert (await async_capsule.run("print(6 * 7)")).stdout == "42\n"
    await async_capsule.write_file("big", iter([b"x", b"", b"y" * 999_999]))
    assert len(await async_capsule.read_file("big")) == 1_000_000
    assert [entry.name for entry in await async_capsule.list_dir()] == ["big"]
    chunks = [chunk async for chunk in async_capsule.read_stream("big")]
    assert sum(map(len, chunks)) == 1_000_000
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("hi")
    await async_capsule.upload(tmp_path / "d")
    await async_capsule.download("d", tmp_path / "copy")
    assert (tmp_path / "copy" / "f").read_text() == "hi"
    events = [event async for event in async_capsule.stream("echo a; echo b >&2; exit 2")]
    assert [e.data for e in events if isinstance(e, Output)] == [b"a\n", b"b\n"]
    assert isinstance(events[-1], Exit)
    assert events[-1].exit_code == 2


async def test_a_cancelled_call_leaves_nothing(async_capsule: AsyncCapsule, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await async_capsule.exec(["sleep", "30"])
    await async_capsule.write_file("big", bytes(8 << 20))
    begun = asyncio.Event()
    download = asyncio.ensure_future(
        async_capsule.download("big", tmp_path / "copy", progress=lambda _: begun.set())
    )
    await begun.wait()
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    assert list(tmp_path.iterdir()) == []
    assert (await async_capsule.exec(["echo", "on"])).stdout == "on\n"
