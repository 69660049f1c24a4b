"""Quotas of tenants, over boxes that live in memory. For real ones see tests/api."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capsule.errors import CapacityError, ForbiddenError, InvalidError
from capsule.model import MIB, ExecId, Exit, Reason, SandboxId, State
from capsule.service import CreateRequest, ExecCall
from capsule.service.caller import Caller
from capsule.service.happenings import Ended, Happening, Kind
from capsule.service.usages import by_tenant
from tests.unit.service_double import Bench, TurnedClock, bench

BLUE, RED = Caller("blue"), Caller("red")


async def one(b: Bench, who: Caller = BLUE, **fields: Any) -> str:
    return (await b.service.create(CreateRequest(**fields), who)).id


async def test_sandboxes_at_once_are_each_tenants_own(tmp_path: Path) -> None:
    async with bench(tmp_path, tenant_sandboxes=2) as b:
        first, _ = await one(b), await one(b)
        with pytest.raises(CapacityError, match="blue has 2 sandboxes, its quota is 2") as full:
            await one(b)
        details = full.value.details
        assert (details["quota"], details["used"], details["limit"]) == ("sandboxes", 2, 2)
        assert 1 <= full.value.retry_after <= 60
        await one(b, RED)
        await b.service.delete(first)
        await one(b)


async def test_a_burst_does_not_slip_through(tmp_path: Path) -> None:
    async with bench(tmp_path, tenant_sandboxes=3) as b:
        made = await asyncio.gather(*(one(b) for _ in range(10)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in made) == 3
    assert sum(isinstance(each, CapacityError) for each in made) == 7


async def test_memory_of_live_sandboxes(tmp_path: Path) -> None:
    async with bench(tmp_path, tenant_memory=300 * MIB) as b:
        first = await one(b, limits={"memory": 200 * MIB})
        with pytest.raises(CapacityError, match=f"{200 * MIB} bytes of memory") as full:
            await one(b, limits={"memory": 200 * MIB})
        assert full.value.details["asked"] == 200 * MIB
        await one(b, limits={"memory": 100 * MIB})
        await b.service.delete(first)
        await one(b, limits={"memory": 200 * MIB})
        with pytest.raises(ForbiddenError, match="its quota is"):  # to wait would not help
            await one(b, limits={"memory": 400 * MIB})


async def test_execs_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, tenant_execs=2) as b:
        ids = [await one(b), await one(b), await one(b, RED)]
        streams = [await b.service.start(id, ExecCall(("wait",))) for id in ids]
        with pytest.raises(CapacityError, match="blue runs 2 execs, its quota is 2"):
            await b.service.exec(ids[0], ExecCall(("true",)))
        await b.service.exec(ids[2], ExecCall(("true",)))
        await b.service.kill(ids[0], streams[0].exec_id)
        async for _ in streams[0]:
            pass
        await b.service.exec(ids[1], ExecCall(("true",)))
        for stream in streams:
            await stream.aclose()
        assert b.service.quotas.used("blue").execs == 0


def used(b: Bench, id: str, cpu_ms: float) -> None:
    """An exec of this sandbox ends, and has used so much CPU time."""
    ended = Ended(ExecId("e"), ("true",), Exit(Reason.EXITED, 0, cpu_ms=cpu_ms))
    event = Happening(Kind.FINISHED, 0.0, SandboxId(id), "python", "fake", "blue", exec=ended)
    b.service.happenings.tell(event)


@pytest.mark.parametrize(
    ("period", "free_at", "hours"),
    [("month", "2027-02-01T00:00:00Z", 16 * 24 + 16), ("day", "2027-01-16T00:00:00Z", 16)],
)
async def test_cpu_seconds_of_a_period(
    tmp_path: Path, period: str, free_at: str, hours: int
) -> None:
    clock = TurnedClock()  # 2027-01-15T08:00:00Z
    options: dict[str, Any] = {"tenant_cpu_seconds": 10.0, "tenant_cpu_period": period}
    async with bench(tmp_path, clock=clock, **options) as b:
        id, other = await one(b), await one(b, RED)
        used(b, id, 9_000)
        await b.service.exec(id, ExecCall(("true",)))
        used(b, id, 1_000)
        for refused in (
            functools.partial(b.service.exec, id, ExecCall(("true",))),
            functools.partial(b.service.terminal, id),
            functools.partial(one, b),
        ):
            with pytest.raises(CapacityError, match=f"this {period}, its quota is 10") as full:
                await refused()
            assert full.value.details["free_at"] == free_at
            assert full.value.retry_after == pytest.approx(hours * 3600)
        await b.service.exec(other, ExecCall(("true",)))
    async with bench(tmp_path, clock=clock, **options) as b:  # a restarted server knows it
        with pytest.raises(CapacityError, match=f"this {period}"):
            await one(b)
        clock.pass_time(hours * 3600 + 1)
        await one(b)


def test_only_the_largest_tenants_are_shown_by_name() -> None:
    small = [SimpleNamespace(tenant=f"t{n}", state=State.RUNNING) for n in range(5)]
    big = [SimpleNamespace(tenant="big", state=State.PAUSED)] * 3
    shown: Any = by_tenant([*small, *big], 2)  # type: ignore[list-item]
    assert shown == {("big", "paused"): 3, ("t0", "running"): 1, ("", "running"): 4}


async def test_a_tenant_may_have_quotas_of_its_own(tmp_path: Path) -> None:
    async with bench(tmp_path, tenant_sandboxes=1) as b:
        tenants = b.service.quotas.tenants
        await tenants.set("blue", {"sandboxes": 2, "memory": 4096 * MIB})
        await one(b), await one(b)
        await tenants.set("blue", {"sandboxes": 0})
        await one(b)
        assert tenants.quota("blue").memory == 4096 * MIB
        await tenants.set("blue", {}, reset=True)
        assert tenants.quota("blue") == tenants.default
        with pytest.raises(CapacityError, match="its quota is 1"):
            await one(b)
        for wrong in ({"sandboxes": -1}, {"wheels": 4}, {"execs": 1.5}, {"memory": True}):
            with pytest.raises(InvalidError, match="is no quota"):
                await tenants.set("blue", wrong)
