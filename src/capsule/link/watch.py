"""Changes below a directory of a box, as they happen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from capsule.link.conversation import Connect, Conversation, expect, request_bytes
from capsule.link.files import explain_path
from capsule.link.parse import field
from capsule.link.protocol import FrameType, dump, pack

_QUIET = 20.0


@dataclass(frozen=True, slots=True)
class Change:
    """`change` is create, write, remove, rename, chmod, or overflow: some changes were missed; or
    sync, if one was asked for."""

    change: str
    path: str
    dir: bool
    arrived: bool = False  # of a rename: it is the new name


class Watch:
    def __init__(self, talk: Conversation, alive: Callable[[], Awaitable[object]]) -> None:
        self._talk = talk
        self._alive = alive

    def __aiter__(self) -> Self:
        return self

    async def sync(self) -> None:
        """Ask for a change `sync`, which comes behind all that has happened by now."""
        await self._talk.send_within(pack(FrameType.CONTROL, dump({"sync": True})), _QUIET, "watch")

    async def __anext__(self) -> Change:
        frame = await self._talk.next_patiently(self._alive, _QUIET)
        body = expect(frame, FrameType.EVENT)
        return Change(
            change=field(body, "change", str),
            path=field(body, "path", str),
            dir=field(body, "dir", bool),
            arrived=body.get("arrived") is True,
        )


@asynccontextmanager
async def watch(
    connect: Connect,
    path: str,
    *,
    recursive: bool,
    alive: Callable[[], Awaitable[object]],
    timeout: float,
) -> AsyncIterator[Watch]:
    """Once entered, no change is missed."""
    wire = request_bytes({"op": "watch", "path": path, "recursive": recursive})
    what = f"watch {path}"
    explain = explain_path(path)
    talk = await Conversation.begin_within(timeout, connect, wire, what=what, explain=explain)
    async with talk:
        expect(await talk.next_within(timeout, what), FrameType.REPLY)
        yield Watch(talk, alive)
