"""Signed links to files: what it costs to find out which sandbox a link is of."""

from __future__ import annotations

import pytest

from capsule.edge.e2b import links
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.links import Link, Links, Signed
from capsule.edge.errors import RateError
from tests.support.turns import turns_of_others

ADDRESS = "192.0.2.1"
IDS = [f"sandbox{n}" for n in range(1000)]


class Counting(Access):
    """Counts how many sandboxes were tried."""

    def __init__(self) -> None:
        super().__init__(b"s" * 32)
        self.tried = 0
        plain = self.token

        def token(id: str) -> str:
            self.tried += 1
            return plain(id)

        self.token = token  # type: ignore[assignment]  # outside of its cache


@pytest.fixture
def access() -> Counting:
    return Counting()


@pytest.fixture
def known(access: Counting) -> Links:
    return Links(access, lambda: IDS)


def link(access: Counting, id: str, path: str = "/a") -> Link:
    unsigned = Link(path, "read", "", None, "")
    made = unsigned._replace(signature="v1_" + Signed(unsigned).digest(access.token(id)))
    access.tried = 0
    return made


def guess(n: int) -> Link:
    return Link("/a", "read", "", None, f"v1_{n:043}")


async def test_guesses_are_limited_for_their_address_alone(
    access: Counting, known: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 6000.0
    monkeypatch.setattr(links, "TRIES", 10_000)
    monkeypatch.setattr("capsule.edge.e2b.links.time.monotonic", lambda: now)
    assert await known.owner(guess(1), ADDRESS) is None
    for id in IDS[: 2 * links.TRIES // len(IDS)]:  # good links cost nothing
        assert await known.owner(link(access, id), ADDRESS) == id
    for n in range(links.TRIES // len(IDS) - 1):
        assert await known.owner(guess(n), ADDRESS) is None
    with pytest.raises(RateError, match="too many signed links from this address") as refused:
        await known.owner(guess(0), ADDRESS)
    assert refused.value.retry_after == 60
    assert await known.owner(link(access, IDS[1]), "192.0.2.2") == IDS[1]
    assert await known.owner(link(access, IDS[1], "/b"), ADDRESS) == IDS[1]  # a sandbox in use
    now += 60
    assert await known.owner(link(access, IDS[2]), ADDRESS) == IDS[2]


@pytest.mark.parametrize(
    "wrong",
    [
        *(guess(1)._replace(signature=text) for text in ("", "v1_", "x" * 43 + "!", "A" * 44)),
        guess(1)._replace(path="/" + "ä" * 2048),
        guess(1)._replace(expiration="1000"),
    ],
)
async def test_a_link_that_cannot_be_good_costs_nothing(
    access: Counting, known: Links, wrong: Link
) -> None:
    assert await known.owner(wrong, ADDRESS) is None
    assert access.tried == 0


async def test_a_search_does_not_block_the_loop() -> None:
    async with turns_of_others() as turns:
        await Links(Counting(), lambda: 10 * IDS).owner(guess(1), ADDRESS)
    assert turns.count >= 10_000 // links.SLICE
