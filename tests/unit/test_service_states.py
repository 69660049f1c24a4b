"""Creating, finding and deleting sandboxes, one at a time and all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from capsule.model import MIB, Isolation, Limits, SandboxId, State
from capsule.service import CreateRequest, ExecCall
from tests.unit.service_double import FakeProvider, Gate, World, bench, nothing

TRUE = ExecCall(("true",))


async def test_concurrent_deletes_destroy_once_and_all_succeed(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.provider.before_destroy = gate = Gate()
        deletes = [asyncio.create_task(b.service.delete(made.id)) for _ in range(5)]
        await gate.reached()
        assert b.service.get(made.id).state is State.STOPPING
        with pytest.raises(GoneError):
            await b.service.exec(made.id, TRUE)
        gate.open()
        await asyncio.gather(*deletes)
        assert gate.came == [made.id]


async def test_capacity_is_a_clear_error_with_a_time_to_retry(tmp_path: Path) -> None:
    async with bench(tmp_path, max_sandboxes=2) as b:
        first = await b.service.create(CreateRequest(ttl=20))
        await b.service.create(CreateRequest())
        with pytest.raises(CapacityError, match="2, limit 2") as caught:
            await b.service.create(CreateRequest())
        assert caught.value.retry_after == pytest.approx(20)
        await b.service.delete(first.id)
        await b.service.create(CreateRequest())


async def test_a_key_makes_one_sandbox(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        request = CreateRequest(idempotency_key="k", metadata={"a": "1"})
        made = await asyncio.gather(*(b.service.create(request) for _ in range(5)))
        assert {s.id for s in made} == {made[0].id}
        assert b.world.launched == 1
        with pytest.raises(ConflictError, match="another request"):
            await b.service.create(CreateRequest(idempotency_key="k"))


async def test_a_key_survives_the_server_and_its_sandbox(tmp_path: Path) -> None:
    request = CreateRequest(idempotency_key="k")
    async with bench(tmp_path) as b:
        made = await b.service.create(request)
    async with bench(tmp_path, world=b.world) as b:
        assert (await b.service.create(request)).id == made.id
        await b.service.delete(made.id)
        with pytest.raises(GoneError, match="made sandbox"):
            await b.service.create(request)
        assert b.world.launched == 1


BAD: list[tuple[dict[str, Any], type[CapsuleError], str]] = [
    ({"template": "cobol"}, NotFoundError, "'cobol' does not exist"),
    ({"provider": "docker"}, NotFoundError, "'docker' is not set up"),
    ({"ttl": 0}, InvalidError, "ttl: 0 is out of range, allowed: 1 to 86400"),
    ({"ttl": float("nan")}, InvalidError, "ttl: nan"),
    ({"idle_timeout": -1}, InvalidError, "idle_timeout: -1"),
    ({"limits": {"memory": 1}}, InvalidError, "limits.memory: 1 is out of range"),
    ({"limits": {"memroy": 1}}, InvalidError, "unknown limit: 'memroy'"),
    ({"env": {"A=B": "1"}}, InvalidError, "has a '='"),
    ({"env": {"A": "a\0b"}}, InvalidError, "env.A: 'a\\\\x00b' has a NUL"),
    ({"env": {f"A{i}": "x" * 100_000 for i in range(4)}}, TooLargeError, "env: 4000"),
    ({"metadata": {str(i): "" for i in range(65)}}, TooLargeError, "65 entries, limit 64"),
    ({"idempotency_key": "x" * 300}, TooLargeError, "limit 256"),
]


@pytest.mark.parametrize(("fields", "error", "text"), BAD)
async def test_bad_requests_are_refused_in_one_line(
    tmp_path: Path, fields: dict[str, Any], error: type[CapsuleError], text: str
) -> None:
    async with bench(tmp_path) as b:
        with pytest.raises(error, match=text) as caught:
            await b.service.create(CreateRequest(**fields))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
        assert b.world.launched == 0


async def test_limits_are_merged_and_templates_capped(tmp_path: Path) -> None:
    most = Limits(memory=256 * MIB, open_files=4096)
    async with bench(tmp_path, max_limits=most) as b:
        made = await b.service.create(CreateRequest(limits={"cpus": 0.25, "disk": "64MiB"}))
        assert made.limits.cpus == 0.25
        assert made.limits.disk == 64 * MIB
        assert made.limits.memory == 256 * MIB  # the template asks for 512
        assert made.limits.processes == 128


async def test_drain_keep_leaves_boxes_and_drain_delete_removes_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.service.create(CreateRequest())
    assert len(b.world.agents) == 1
    async with bench(tmp_path, world=b.world, drain="delete") as b:
        await b.service.create(CreateRequest())
    assert b.world.agents == {}


async def test_a_service_lets_go_of_everything_even_if_deleting_fails(tmp_path: Path) -> None:
    async def broken(_: SandboxId) -> None:
        raise RuntimeError("a bug of the provider's")

    provider = FakeProvider(World())
    with pytest.raises(RuntimeError, match="a bug"):
        async with bench(tmp_path, provider=provider, drain="delete") as b:
            await b.service.create(CreateRequest())
            provider.before_destroy = broken
    assert not provider.is_open
    provider.before_destroy = nothing
    async with bench(tmp_path, provider=provider):
        pass  # and its directories are not locked


async def test_isolation_below_the_minimum_refuses_to_open(tmp_path: Path) -> None:
    weak = FakeProvider(World(), Isolation.LANDLOCK)
    with pytest.raises(UnavailableError, match="isolates by landlock here, required: namespaces"):
        async with bench(tmp_path, provider=weak, min_isolation="namespaces"):
            pass
    assert not weak.is_open
    async with bench(tmp_path, provider=weak):
        pass
