"""Ports of sandboxes: who may use them, and that traffic counts as use of the sandbox."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
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


async def test_bytes_in_both_directions_are_use() -> None:
    uses: list[str] = []

    async def wake(entry: object) -> None:
        uses.append("woken")

    access = SimpleNamespace(touch=lambda entry: uses.append("touched"), wake=wake)
    stream = PortStream(Ends(), cast(Any, access), cast(Any, None))
    assert (await stream.receive(), uses) == (b"x", ["touched"])
    await stream.send(b"y")
    assert uses == ["touched", "woken", "touched"]


def test_the_host_that_programs_see_is_a_host() -> None:
    for host in ("", "localhost", "a.example:80", "[::1]:${PORT}", "x:${PORT}"):
        assert validate.request_host(host) == host
    for host in ("a b", "a\r\nX: y", "é", "${HOME}", "a" * 300):
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
