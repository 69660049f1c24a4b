"""What a server finds when it starts, and boxes that die behind its back."""

from __future__ import annotations

import asyncio
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from capsule.errors import GoneError, UnavailableError
from capsule.model import (
    Isolation,
    Layer,
    Limits,
    SandboxId,
    Started,
    State,
    Step,
    Unenforced,
    VolumeMount,
)
from capsule.service import CreateRequest, ExecCall, RunCall
from capsule.service.entry import Entry, Record
from capsule.service.happenings import Kind
from capsule.service.store import SqliteStore
from tests.support import eventually
from tests.unit.service_double import (
    PYTHON,
    FakeProvider,
    Gate,
    TurnedClock,
    bench,
    nothing,
)

TRUE = ExecCall(("true",))


def test_all_that_is_recorded_of_a_sandbox_is_recorded_again() -> None:
    clock, layer = TurnedClock(), Layer("l", 1, 2)
    known = Record(
        id=SandboxId("one"),
        state=State.RUNNING,
        template=PYTHON,
        provider="docker",
        limits=Limits(memory=1 << 30),
        env={"A": "1"},
        metadata={"user": "ann"},
        ttl=600.0,
        idle_timeout=30.0,
        created=clock.now() - 500.0,
        expires=clock.now() + 100.0,
        deadline=clock.monotonic() + 100.0,
        boot=clock.boot_id(),
        handle={"dir": "/x"},
        isolation=Isolation.CONTAINER,
        unenforced=(Unenforced("disk", "why", "fix"),),
        key="k",
        reason="because",
        box_id=SandboxId("two"),
        on_timeout="pause",
        auto_resume=True,
        keep_memory=False,
        pause_kept="files",
        held=True,
        started=Started.WARM,
        runtime="runsc",
        layers=(layer,),
        snapshot="s",
        steps=(Step(1, (layer,), 5.0),),
        volumes=(VolumeMount("v", "/workspace/v"),),
        ports="public",
        request_host="example.org",
        tenant="acme",
        notes={"n": "1"},
    )
    plain = [f.name for f in fields(Record) if getattr(known, f.name) == f.default is not MISSING]
    assert plain == [], "a field that has its default proves nothing"
    assert Entry.of(known, clock, clock.boot_id()).record(clock.boot_id()) == known


async def rows(folder: Path) -> dict[str, State]:
    store = SqliteStore(folder / "d" / "capsule.db")
    await store.open()
    try:
        return {record.id: record.state for record in await store.load()}
    finally:
        await store.aclose()


async def change_record(folder: Path, id: str, **fields: object) -> None:
    store = SqliteStore(folder / "d" / "capsule.db")
    await store.open()
    (record,) = [r for r in await store.load() if r.id == id]
    await store.save(replace(record, **fields))  # type: ignore[arg-type]
    await store.aclose()


async def down(_: SandboxId) -> None:
    raise UnavailableError("the engine is down")


async def test_running_sandboxes_are_adopted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(metadata={"a": "1"}, env={"X": "y"}))
        left = await b.service.start(made.id, ExecCall(("wait",)))
        await left.aclose()
    async with bench(tmp_path, world=b.world) as b:
        assert b.service.get(made.id) == made
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        again = await b.service.attach(made.id, left.exec_id)
        b.world.agents[made.id].execs[left.exec_id].end(4)
        assert [item async for item in again] == []
        assert again.exit is not None
        assert again.exit.exit_code == 4


@pytest.mark.parametrize("state", [State.CREATING, State.STOPPING])
async def test_half_made_and_half_removed_ones_are_gone(tmp_path: Path, state: State) -> None:
    request = CreateRequest(idempotency_key="k")
    async with bench(tmp_path) as b:
        made = await b.service.create(request)
    await change_record(tmp_path, made.id, state=state)  # as a server leaves it that is killed
    async with bench(tmp_path, world=b.world) as b:
        assert b.world.agents == {}
        assert b.service.list() == []
        if state is State.CREATING:  # no client knows of it: the retry makes it
            assert (await b.service.create(request)).id != made.id
        else:
            with pytest.raises(GoneError):
                await b.service.create(request)


async def test_a_row_without_a_box_fails_and_a_box_without_a_row_goes(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        lost = await b.service.create(CreateRequest())
        kept = await b.service.create(CreateRequest())
    b.world.remove(lost.id)
    b.world.add("orphan")
    async with bench(tmp_path, world=b.world) as b:
        assert {s.id: s.state for s in b.service.list()} == {
            lost.id: State.FAILED,
            kept.id: State.RUNNING,
        }
        assert list(b.world.agents) == [kept.id]
        with pytest.raises(GoneError, match="failed: its box was gone"):
            await b.service.exec(lost.id, TRUE)
    assert await rows(tmp_path) == {lost.id: State.FAILED, kept.id: State.RUNNING}
    async with bench(tmp_path, world=b.world) as b:
        assert "its box was gone" in b.service.get(lost.id).reason
        await b.service.delete(lost.id)


async def test_a_box_being_made_is_no_orphan(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.provider.after_launch = gate = Gate()
        create = asyncio.create_task(b.service.create(CreateRequest()))
        await gate.reached()
        await b.service.reaper.tidy()
        gate.open()
        made = await create
        await b.service.exec(made.id, TRUE)


async def test_a_provider_that_is_down_at_the_start_is_asked_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())

    provider = FakeProvider(b.world)
    provider.before_adopt = down
    async with bench(tmp_path, world=b.world, provider=provider) as b:
        with pytest.raises(UnavailableError, match="not been reached"):
            await b.service.exec(made.id, TRUE)
        assert b.world.agents, "not being able to say is no reason to remove it"

        provider.before_adopt = nothing
        b.clock.pass_time(5)
        await b.service._pulse.round()
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_a_dead_box_fails_with_a_reason_and_can_be_deleted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.world.kill(made.id)
        b.clock.pass_time(4)
        await b.service._pulse.round()
        failed = b.service.get(made.id)
        assert failed.state is State.FAILED
        assert "gone" in failed.reason
        for use in (b.service.exec(made.id, TRUE), b.service.run(made.id, RunCall("1"))):
            with pytest.raises(GoneError, match="failed: its box is gone"):
                await use
        await eventually(lambda: not b.world.agents, what="its remains are cleared away")
        await b.service.delete(made.id)
        assert b.service.list() == []
    assert await rows(tmp_path) == {}


async def test_an_end_is_recorded_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a server that is killed in between leaves one that ends, and tells it, once more."""
    seen: list[str] = []
    save = SqliteStore.save

    async def saved(store: SqliteStore, *records: Record) -> None:
        await save(store, *records)
        seen.extend(record.state for record in records)

    async with bench(tmp_path) as b:
        deleted, failed = [await b.service.create(CreateRequest()) for _ in range(2)]
        monkeypatch.setattr(SqliteStore, "save", saved)
        b.service.happenings.listeners.append(lambda happening: seen.append(happening.kind))
        await b.service.delete(deleted.id)
        b.world.kill(failed.id)
        b.clock.pass_time(4)
        await b.service._pulse.round()
    assert seen == [State.STOPPING, Kind.DELETED, State.FAILED, Kind.FAILED]


async def test_trouble_of_our_own_fails_no_sandbox(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        agent = b.world.agents[made.id]
        b.provider.before_adopt = down
        agent.alive = False
        b.clock.pass_time(4)
        await b.service._pulse.round()
        assert b.service.get(made.id).state is State.RUNNING
        agent.alive = True
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
