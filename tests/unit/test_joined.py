"""The head and the body of an answer are written together."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from capsule.edge.joined import Joined

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.written.append(b"closed")

    def get_extra_info(self, name: str) -> Any:
        return name


@pytest.mark.parametrize("size", [4, 100_000])
async def test_nothing_is_lost_or_held_back(size: int) -> None:
    under = Transport()
    joined = Joined(cast(asyncio.Transport, under))
    joined.write(HEAD)
    assert under.written == []
    joined.write(bytes(size))
    assert b"".join(under.written) == HEAD + bytes(size)
    assert len(under.written) == (1 if size == 4 else 2)  # what is large is not copied
    del under.written[:]
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert under.written == [HEAD]
    joined.write(HEAD)
    joined.close()
    assert under.written == [HEAD, HEAD, b"closed"]
    assert joined.get_extra_info("peername") == "peername"
