"""An answer's head and body leave together, and neither is lost or held back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from capsule.edge.joined import Joined


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> Any:
        return name


@pytest.fixture
def under() -> Transport:
    return Transport()


@pytest.fixture
def joined(under: Transport) -> Joined:
    return Joined(cast(asyncio.Transport, under))


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def test_a_head_leaves_with_its_body(joined: Joined, under: Transport) -> None:
    joined.write(HEAD)
    assert under.written == []
    joined.write(b"body")
    joined.write(b"more")
    assert under.written == [HEAD + b"body", b"more"]
    await asyncio.sleep(0)
    assert len(under.written) == 2


async def test_a_head_alone_leaves_soon(joined: Joined, under: Transport) -> None:
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert under.written == [HEAD]


async def test_a_large_body_is_not_copied(joined: Joined, under: Transport) -> None:
    body = bytes(100_000)
    joined.write(HEAD)
    joined.write(body)
    assert under.written == [HEAD, body]
    assert under.written[1] is body


async def test_what_is_closed_is_written_first(joined: Joined, under: Transport) -> None:
    joined.write(HEAD)
    joined.close()
    assert (under.written, under.closed) == ([HEAD], True)


async def test_everything_else_is_the_transports(joined: Joined) -> None:
    assert joined.get_extra_info("peername") == "peername"
