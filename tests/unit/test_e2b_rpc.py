"""How streams of envd end: with a word, or cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from capsule.edge.drain import ABORT
from capsule.edge.e2b.connect import envelope
from capsule.edge.e2b.rpc import Events, Opened, Severed, told
from capsule.errors import CapsuleError, GoneError, InternalError, UnavailableError

EVENT = envelope({"event": {}})


async def failing(error: CapsuleError, *before: bytes) -> AsyncGenerator[bytes, None]:
    for part in before:
        yield part
    raise error


@pytest.mark.parametrize(
    ("error", "lives", "severed"),
    [
        (GoneError("sandbox a is over"), True, True),  # it is ending
        (GoneError("sandbox a was reset", reset=True), True, False),
        (UnavailableError("sandbox a died"), False, True),
        (UnavailableError("the link was lost"), True, False),
        (InternalError("bug"), False, False),
    ],
)
async def test_only_an_end_of_the_sandbox_cuts(
    error: CapsuleError, lives: bool, severed: bool
) -> None:
    parts = [part async for part in told(failing(error, EVENT), lambda: lives)]
    assert parts[0] == EVENT and len(parts) == 2
    assert isinstance(parts[1], Severed) is severed
    assert severed or error.message.encode() in parts[1]


@pytest.mark.parametrize("before", [[], [EVENT], [EVENT, EVENT]])
async def test_it_is_cut_wherever_it_stands(before: list[bytes]) -> None:
    sent: list[Any] = []

    async def abort() -> None:
        sent.append("cut")

    async def send(message: Any) -> None:
        sent.append(message.get("body", message["type"]))

    async def receive() -> Any:
        await asyncio.Event().wait()

    source = failing(UnavailableError("it died"), *before)
    events = Events(Opened(source, source), b"ping", every=60.0, lives=lambda: False)
    await events({"type": "http", ABORT: abort}, receive, send)
    assert sent == ["http.response.start", *before, "cut"]
