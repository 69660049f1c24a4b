"""Stored keys: what is kept of them, their callers, and changes by another process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from capsule.errors import InvalidError, NotFoundError, UnauthenticatedError
from capsule.service.accounts import AccountFile, NewKey, split
from capsule.service.caller import Caller, KeyScope
from capsule.service.keys import Keys
from tests.support import eventually
from tests.unit.service_double import TurnedClock


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest_asyncio.fixture
async def keys(tmp_path: Path, clock: TurnedClock) -> AsyncIterator[Keys]:
    made = Keys(AccountFile(tmp_path), clock)
    await made.open()
    yield made
    await made.aclose()


async def new(keys: Keys, *scopes: str, ttl: float | None = None) -> NewKey:
    return await keys.create(tenant="blue", scopes=scopes or ("run",), name="ci", ttl=ttl)


@pytest.mark.parametrize(
    ("named", "may"),
    [
        (("read",), {"read"}),
        (("run",), {"read", "run"}),
        (("admin", "read"), {"read", "run", "admin"}),
    ],
)
async def test_a_scope_includes_the_smaller_ones(
    keys: Keys, named: tuple[str, ...], may: set[str]
) -> None:
    made = await new(keys, *named)
    scopes = frozenset(KeyScope(scope) for scope in may)
    assert keys.caller(made.token) == Caller("blue", scopes, made.key.id)


async def test_the_secret_is_not_kept(keys: Keys, tmp_path: Path) -> None:
    made = await new(keys)
    _, secret = split(made.token)
    assert len(secret) >= 43  # 256 bits
    for path in tmp_path.iterdir():
        assert secret.encode() not in path.read_bytes(), path
        assert path.stat().st_mode & 0o077 == 0, path
    assert secret not in repr(await keys.list())


async def test_a_token_that_is_no_key_has_no_caller(keys: Keys) -> None:
    made = await new(keys)
    id, secret = split(made.token)
    for token in ("", "x", "cap_", f"cap_{id}_", f"cap_{id}_x{secret}", f"cap__{secret}", "cap__"):
        assert keys.caller(token) is None, token
    assert keys.caller(f"CAP_{id}_{secret}") is None
    assert keys.caller(f"cap_{id.upper()}_{secret}") is None


async def test_a_revoked_key_is_refused_at_once_and_stays_listed(keys: Keys) -> None:
    made = await new(keys)
    revoked = await keys.revoke(made.key.id)
    with pytest.raises(UnauthenticatedError, match="is revoked"):
        keys.caller(made.token)
    assert revoked.state(0) == "revoked" and await keys.list() == [revoked]
    assert (await keys.revoke(made.key.id)).revoked == revoked.revoked
    assert keys.any  # the server stays closed for requests without a key
    with pytest.raises(NotFoundError, match="nosuch"):
        await keys.revoke("nosuch")


async def test_a_key_expires(keys: Keys, clock: TurnedClock) -> None:
    made = await new(keys, ttl=60.0)
    clock.pass_time(59)
    assert keys.caller(made.token) is not None
    clock.pass_time(2)
    with pytest.raises(UnauthenticatedError, match="is expired"):
        keys.caller(made.token)


async def test_another_process_is_noticed(keys: Keys, tmp_path: Path, clock: TurnedClock) -> None:
    """`capsule key` has a connection of its own."""
    assert not keys.any
    other = AccountFile(tmp_path)
    make = functools.partial(other.create_key, tenant="blue", scopes=("run",), now=clock.now())
    made = await asyncio.to_thread(make)
    await eventually(lambda: keys.caller(made.token), what="a key made elsewhere opens")
    await asyncio.to_thread(other.revoke_key, made.key.id, clock.now())

    def refused() -> bool:
        try:
            return keys.caller(made.token) is None
        except UnauthenticatedError:
            return True

    await eventually(refused, what="a key revoked elsewhere is refused", within=3.0)


async def test_last_use_is_kept(tmp_path: Path, clock: TurnedClock) -> None:
    keys = Keys(AccountFile(tmp_path), clock)
    await keys.open()
    made = await new(keys)
    assert (await keys.list())[0].used is None
    clock.pass_time(5)
    keys.caller(made.token)
    assert (await keys.list())[0].used == clock.now()
    clock.pass_time(5)
    keys.caller(made.token)
    await keys.aclose()
    (kept,) = await asyncio.to_thread(AccountFile(tmp_path).keys)
    assert kept.used == clock.now()


async def test_a_wrong_tenant_or_scope_is_refused(keys: Keys) -> None:
    for tenant, scopes, problem in (
        ("a/b", ("run",), "tenant: 'a/b' is no name"),
        ("", ("run",), "tenant: '' is no name"),
        ("blue", ("fly",), "scopes: 'fly' is no scope"),
        ("blue", (), "scopes: none is no scope"),
    ):
        with pytest.raises(InvalidError, match=problem):
            await keys.create(tenant=tenant, scopes=scopes)
    assert await keys.list() == []
