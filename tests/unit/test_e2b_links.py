"""Which sandbox a signed link is of, and what it costs to ask."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import pytest

from capsule.edge.e2b import links
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.links import Link, Links, Signed
from capsule.edge.errors import RateError
from tests.support.turns import turns_of_others

ADDRESS = "192.0.2.1"
IDS = [f"sandbox{n}" for n in range(1000)]


class Counting(Access):
    """How often somebody was tried."""

    def __init__(self) -> None:
        super().__init__(b"s" * 32)
        self.tried = 0
        plain = self.token

        def token(id: str) -> str:
            self.tried += 1
            return plain(id)

        self.token = token  # type: ignore[assignment]  # not the cache of it, which is further in


def link(access: Access, id: str, path: str = "/a") -> Link:
    unsigned = Link(path, "read", "", None, "")
    return unsigned._replace(signature="v1_" + Signed(unsigned).digest(access.token(id)))


def guess(n: int) -> Link:
    return Link("/a", "read", "", None, f"v1_{n:043}")


async def test_it_is_found_among_all_and_then_at_once() -> None:
    access = Counting()
    known = Links(access, lambda: IDS)
    assert await known.owner(link(access, IDS[700]), ADDRESS) == IDS[700]
    for n in range(20):
        wanted = link(access, IDS[700], f"/{n}")
        access.tried = 0
        assert await known.owner(wanted, ADDRESS) == IDS[700]
        assert access.tried == 1


async def test_who_guesses_is_stopped_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 6000.0
    monkeypatch.setattr("capsule.edge.e2b.links.time.monotonic", lambda: now)
    access = Counting()
    known = Links(access, lambda: IDS)
    for n in range(links.TRIES // len(IDS)):
        assert await known.owner(guess(n), ADDRESS) is None
    spent = access.tried
    with pytest.raises(RateError, match="too many signed links from this address") as refused:
        await known.owner(guess(0), ADDRESS)
    assert refused.value.retry_after == 60
    assert access.tried == spent <= links.TRIES
    assert await known.owner(link(access, IDS[1]), "192.0.2.2") == IDS[1]
    # What is in use costs nothing, from wherever it is asked for.
    assert await known.owner(link(access, IDS[1], "/b"), ADDRESS) == IDS[1]
    now += 60
    assert await known.owner(link(access, IDS[2]), ADDRESS) == IDS[2]


async def test_good_links_cost_their_sender_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsule.edge.e2b.links.time.monotonic", lambda: 6000.0)
    access = Counting()
    known = Links(access, lambda: IDS)
    assert await known.owner(guess(1), ADDRESS) is None
    for id in IDS[: 2 * links.TRIES // len(IDS)]:  # far more of them than are remembered
        assert await known.owner(link(access, id), ADDRESS) == id
    for n in range(links.TRIES // len(IDS) - 1):
        assert await known.owner(guess(n), ADDRESS) is None
    with pytest.raises(RateError):
        await known.owner(guess(1), ADDRESS)


async def test_what_comes_back_is_of_its_own_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 6000.0
    monkeypatch.setattr("capsule.edge.e2b.links.time.monotonic", lambda: now)
    access = Counting()
    known = Links(access, lambda: IDS)
    slow = asyncio.create_task(known.owner(link(access, IDS[-1]), ADDRESS))
    await asyncio.sleep(0)
    now += 60
    for n in range(links.TRIES // len(IDS)):
        assert await known.owner(guess(n), ADDRESS) is None
    assert await slow == IDS[-1]
    with pytest.raises(RateError):
        await known.owner(guess(1), ADDRESS)


async def test_a_path_is_hashed_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access = Counting()
    wanted, begun = link(access, IDS[-1], "/" + "a" * 4095), list[int]()

    def sha256(begin: bytes) -> hashlib._Hash:
        begun.append(len(begin))
        return hashlib.new("sha256", begin)

    monkeypatch.setattr("capsule.edge.e2b.links.hashlib.sha256", sha256)
    assert await Links(access, lambda: IDS).owner(wanted, ADDRESS) == IDS[-1]
    assert begun == [4096 + len(":read::")]


def test_what_is_signed_is_as_e2b_has_it() -> None:
    raw = hashlib.sha256(b"/a:read:user:token:99999999999").digest()
    signature = "v1_" + base64.b64encode(raw).decode().rstrip("=")
    good = Link("/a", "read", "user", "99999999999", signature)
    assert good.problem("token") is None
    assert good._replace(expiration="99999999998").problem("token") == "invalid signature"


async def test_a_path_that_no_file_has_costs_nothing() -> None:
    access = Counting()
    long = link(access, IDS[0], "/" + "ä" * 2048)
    access.tried = 0
    assert await Links(access, lambda: IDS).owner(long, ADDRESS) is None
    assert access.tried == 0


@pytest.mark.parametrize("signature", ["", "v1_", "x" * 43 + "!", "A" * 44, "v1_" + "\0" * 43])
async def test_what_is_no_signature_costs_nothing(signature: str) -> None:
    access = Counting()
    wrong = Link("/a", "read", "", None, signature)
    assert await Links(access, lambda: IDS).owner(wrong, ADDRESS) is None
    assert access.tried == 0


async def test_what_is_late_costs_nothing() -> None:
    access = Counting()
    late = guess(1)._replace(expiration="1000")
    assert late.late() == "signature is already expired"
    assert await Links(access, lambda: IDS).owner(late, ADDRESS) is None
    assert access.tried == 0


async def test_others_have_their_turn_meanwhile() -> None:
    async with turns_of_others() as turns:
        await Links(Counting(), lambda: 10 * IDS).owner(guess(1), ADDRESS)
    assert turns.count >= 10_000 // links.SLICE


async def test_those_in_use_are_few() -> None:
    access = Counting()
    known = Links(access, lambda: IDS)
    for id in IDS[: links.RECENT + 10]:
        assert await known.owner(link(access, id), ADDRESS) == id
    access.tried = 0
    assert await known.owner(guess(1), "192.0.2.3") is None
    assert access.tried == links.RECENT + len(IDS)
