"""Answers that are streams let go of what they read from, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.responses import Response
from starlette.types import Message

from capsule.edge.download import Download, begun
from capsule.edge.sse import EventStream


class Source:
    """Something to read from that says whether it is still open."""

    def __init__(self) -> None:
        self.open = True

    async def aclose(self) -> None:
        self.open = False

    async def parts(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"part"
        finally:
            self.open = False


class Broken(Exception):
    pass


async def fail_at(answer: Response, failing: int) -> None:
    """Send it to somebody who is gone after some messages."""
    sent = 0

    async def send(message: Message) -> None:
        nonlocal sent
        sent += 1
        if sent > failing:
            raise Broken

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(Broken):
        await answer({"type": "http"}, receive, send)


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_events_close_what_they_come_from(failing: int) -> None:
    source = Source()
    await fail_at(EventStream(source.parts(), held=source), failing)
    assert not source.open


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_downloads_close_what_they_come_from(failing: int) -> None:
    source = Source()
    await fail_at(Download(source.parts(), {}, held=source), failing)
    assert not source.open


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_downloads_whose_first_part_was_read_do_so_too(failing: int) -> None:
    source = Source()
    await fail_at(await begun(source.parts(), {}), failing)
    assert not source.open
