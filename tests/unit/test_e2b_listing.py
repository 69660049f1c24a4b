"""A long list is made a few entries at a time, and others have their turn between."""

from __future__ import annotations

import msgspec

from capsule.edge.e2b.entries import entry
from capsule.edge.e2b.listing import FEW, encoded
from capsule.model import FileStat
from tests.support.turns import turns_of_others


def named(name: str) -> FileStat:
    return FileStat(name, name, "file", size=1, mode=0o644, mtime=0.0, uid=1000, gid=1000)


async def test_others_have_their_turn() -> None:
    found = [named(str(n)) for n in range(10 * FEW)]
    async with turns_of_others() as turns:
        told = await encoded(found, lambda each: entry(each, "/d/" + each.path))
    assert turns.count >= 9
    assert [each["path"] for each in msgspec.json.decode(msgspec.json.encode(told))] == [
        f"/d/{n}" for n in range(10 * FEW)
    ]


async def test_a_name_that_is_not_utf8_is_told_somehow() -> None:
    (told,) = await encoded([named("a\udcff")], lambda each: entry(each, each.path))
    assert msgspec.json.decode(told)["name"] == "a\ufffd"
