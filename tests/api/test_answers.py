"""Answers that are streams close what they read from, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.responses import Response
from starlette.types import Message

from capsule.edge.download import Download, begun
from capsule.edge.sse import EventStream


class Source:
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


async def answer_from(kind: str, source: Source) -> Response:
    if kind == "events":
        return EventStream(source.parts(), held=source)
    if kind == "download":
        return Download(source.parts(), {}, held=source)
    return await begun(source.parts(), {})  # a download whose first part was read


@pytest.mark.parametrize("kind", ["events", "download", "begun"])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_client_that_is_gone_closes_the_source(kind: str, failing: int) -> None:
    source, sent = Source(), 0
    answer = await answer_from(kind, source)

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
    assert not source.open
