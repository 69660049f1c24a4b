"""`watch_dir` of E2B's SDK: by asking with the blocking one, as a stream with the other."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

import pytest
from e2b import (
    AsyncSandbox,
    FilesystemEventType,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from tests.e2b.wire import Wire
from tests.support import eventually, wait_for

pytestmark = pytest.mark.real

Kind = FilesystemEventType
WATCH = "/filesystem.Filesystem/WatchDir"


@pytest.fixture
def folder(shared: Sandbox) -> str:
    name = f"/tmp/{os.urandom(6).hex()}"
    shared.files.make_dir(name)
    return name


def test_a_write_is_seen_as_e2b_sees_it(shared: Sandbox, folder: str) -> None:
    handle = shared.files.watch_dir(folder)
    shared.files.write(f"{folder}/a.txt", "new")
    events = [(each.type, each.name) for each in handle.get_new_events()]
    assert events == [(Kind.CREATE, "a.txt"), (Kind.CHMOD, "a.txt"), (Kind.WRITE, "a.txt")]
    shared.files.write(f"{folder}/a.txt", "other")
    again = [(each.type, each.name) for each in handle.get_new_events()]
    assert again == [(Kind.WRITE, "a.txt"), (Kind.CHMOD, "a.txt"), (Kind.WRITE, "a.txt")]
    assert handle.get_new_events() == []
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_renames_and_removals_have_names(shared: Sandbox, folder: str) -> None:
    shared.files.write(f"{folder}/a", "x")
    handle = shared.files.watch_dir(folder)
    shared.commands.run(f"cd {folder}; mv a b; chmod 600 b; rm b")
    events = [(each.type, each.name) for each in handle.get_new_events()]
    assert events == [
        (Kind.RENAME, "a"),
        (Kind.CREATE, "b"),
        (Kind.CHMOD, "b"),
        (Kind.REMOVE, "b"),
    ]
    handle.stop()


def test_folders_below_are_watched_if_asked_for(shared: Sandbox, folder: str) -> None:
    shared.files.make_dir(f"{folder}/sub")
    shared.files.write(f"{folder}/file", "")
    with pytest.raises(InvalidArgumentException):
        shared.files.watch_dir(f"{folder}/file")
    with pytest.raises(NotFoundException):
        shared.files.watch_dir(f"{folder}/nothing")
    deep = shared.files.watch_dir(folder, recursive=True, include_entry=True)
    flat = shared.files.watch_dir(folder)
    shared.files.write(f"{folder}/sub/x", "123")
    found = [e for e in deep.get_new_events() if e.type == Kind.WRITE]
    assert found[0].name == "sub/x"
    assert found[0].entry is not None and found[0].entry.path == f"{folder}/sub/x"
    assert not [e for e in flat.get_new_events() if e.name.startswith("sub/")]
    shared.files.make_dir(f"{folder}/later")
    wait_for(lambda: "later" in [e.name for e in deep.get_new_events()], what="the new folder")
    shared.files.write(f"{folder}/later/y", "1")
    assert "later/y" in [e.name for e in deep.get_new_events()]
    deep.stop()
    flat.stop()


def test_watchers_have_a_limit(shared: Sandbox, folder: str) -> None:
    handles = [shared.files.watch_dir(folder) for _ in range(16)]
    with pytest.raises(RateLimitException, match="16 watchers"):
        shared.files.watch_dir(folder)
    for handle in handles:
        handle.stop()
    shared.files.watch_dir(folder).stop()


async def can_watch(wire: Wire) -> bool:
    async with wire.stream(WATCH, {"path": "/workspace"}) as watching:
        return (await watching.next()).flags == 0


async def test_streams_of_changes_have_a_limit(wire: Wire) -> None:
    async with AsyncExitStack() as stack:
        held = []  # a stream without a reference is closed
        for _ in range(25):
            watching = wire.stream(WATCH, {"path": "/workspace"})
            held.append(await stack.enter_async_context(watching))
            first = await held[-1].next()
    await eventually(lambda: can_watch(wire), what="to be watched again")
    assert first.body["error"] == {
        "code": "resource_exhausted",
        "message": "the sandbox has 24 watchers: stop one",
    }


async def test_a_stream_of_changes_comes_at_once_and_has_a_timeout(
    async_sandbox: AsyncSandbox,
) -> None:
    await async_sandbox.files.make_dir("w")
    seen: asyncio.Queue[tuple[Kind, str]] = asyncio.Queue()
    ended: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def watch(**options: Any) -> Any:
        return await async_sandbox.files.watch_dir(
            "w",
            on_event=lambda event: seen.put_nowait((event.type, event.name)),
            on_exit=ended.put_nowait,
            **options,
        )

    handle = await watch()
    await async_sandbox.files.write("w/x", "1")
    async with asyncio.timeout(10):
        while await seen.get() != (Kind.WRITE, "x"):
            pass
    await handle.stop()
    assert await asyncio.wait_for(ended.get(), 10) is None
    await watch(timeout=1)
    assert isinstance(await asyncio.wait_for(ended.get(), 10), TimeoutException)
