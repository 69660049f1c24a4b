"""What moves through a sandbox's port is use of the sandbox; and sandboxes say who may."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from capsule.errors import InvalidError
from capsule.service import validate
from capsule.service.ports import PortStream
from capsule.service.values import CreateRequest
from tests.unit.service_double import World, bench


class Ends:
    """A stream of bytes that takes all and gives a little."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return b"x"

    async def send(self, data: bytes) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Noted:
    def __init__(self) -> None:
        self.told: list[str] = []

    def touch(self, entry: object) -> None:
        self.told.append("touched")

    async def wake(self, entry: object) -> None:
        self.told.append("woken")


async def test_bytes_in_both_directions_are_use() -> None:
    access = Noted()
    stream = PortStream(Ends(), cast(Any, access), cast(Any, None))
    assert await stream.receive() == b"x"
    assert access.told == ["touched"]
    await stream.send(b"y")
    assert access.told[1:] == ["woken", "touched"]


@pytest.mark.parametrize("host", ["", "localhost", "a.example:80", "[::1]:${PORT}", "x:${PORT}"])
def test_a_host_that_may_be_told(host: str) -> None:
    assert validate.request_host(host) == host


@pytest.mark.parametrize("host", ["a b", "a\r\nX: y", "é", "${HOME}", "a" * 300])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(InvalidError, match="request_host"):
        validate.request_host(host)


async def test_who_may_is_checked_and_outlives_a_restart(tmp_path: Path) -> None:
    world = World()
    async with bench(tmp_path, world=world) as desk:
        with pytest.raises(InvalidError, match="ports: 'all' is not one of private, public, token"):
            await desk.service.create(CreateRequest(ports="all"))
        made = await desk.service.create(CreateRequest(ports="public", request_host="a:${PORT}"))
    async with bench(tmp_path, world=world) as desk:
        found = desk.service.get(made.id)
        assert (found.ports, found.request_host) == ("public", "a:${PORT}")
