"""The async client does what the sync one does, without blocking the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule_sdk import (
    AsyncCapsule,
    AsyncCapsuleClient,
    AsyncExecStream,
    AsyncTerminal,
    Capsule,
    CapsuleClient,
    ExecStream,
    Exit,
    Output,
    Terminal,
)

RENAMED = {"aclose": "close"}


def public(cls: type) -> set[str]:
    names = {name for name in dir(cls) if not name.startswith("_")}
    return {RENAMED.get(name, name) for name in names}


@pytest.mark.parametrize(
    ("plain", "awaited"),
    [
        (CapsuleClient, AsyncCapsuleClient),
        (Capsule, AsyncCapsule),
        (ExecStream, AsyncExecStream),
        (Terminal, AsyncTerminal),
    ],
)
def test_both_have_the_same_methods(plain: type, awaited: type) -> None:
    assert public(plain) == public(awaited)


async def test_run_files_and_streams(async_capsule: AsyncCapsule, tmp_path: Path) -> None:
    assert (await async_capsule.run("print(6 * 7)")).stdout == "42\n"
    await async_capsule.write_file("big", b"x" * 1_000_000)
    assert len(await async_capsule.read_file("big")) == 1_000_000
    assert [entry.name for entry in await async_capsule.list_dir()] == ["big"]
    chunks = [chunk async for chunk in async_capsule.read_stream("big")]
    assert sum(map(len, chunks)) == 1_000_000
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("hi")
    await async_capsule.upload(tmp_path / "d")
    await async_capsule.download("d", tmp_path / "copy")
    assert (tmp_path / "copy" / "f").read_text() == "hi"


async def test_a_stream_is_an_async_iterator(async_capsule: AsyncCapsule) -> None:
    events = [event async for event in async_capsule.stream("echo a; echo b >&2; exit 2")]
    assert [e.data for e in events if isinstance(e, Output)] == [b"a\n", b"b\n"]
    assert isinstance(events[-1], Exit)
    assert events[-1].exit_code == 2


async def test_a_cancelled_call_leaves_the_client_usable(async_capsule: AsyncCapsule) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await async_capsule.exec(["sleep", "30"])
    assert (await async_capsule.exec(["echo", "on"])).stdout == "on\n"
