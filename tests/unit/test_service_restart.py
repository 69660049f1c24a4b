"""What a server finds when it starts, and boxes that die behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from capsule.errors import CapsuleError, ConflictError, GoneError, UnavailableError
from capsule.model import (
    Handle,
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
from capsule.service import CreateRequest, ExecCall, RunCall, pulse, reaper
from capsule.service.entry import Entry, Record
from capsule.service.store import SqliteStore
from tests.support import eventually
from tests.unit.service_double import PYTHON, Bench, FakeProvider, TurnedClock, World, bench

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


async def record_as(folder: Path, id: str, state: State) -> None:
    """What a server that was killed in the middle of something left behind."""
    await change_record(folder, id, state=state)


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


async def test_a_record_from_before_boxes_had_ids_is_adopted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
    await change_record(tmp_path, made.id, box_id=None)
    async with bench(tmp_path, world=b.world) as b:
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        await b.service.reaper.tidy()
        await b.service.delete(made.id)
    assert b.world.agents == {}


async def test_a_box_with_another_id_than_its_sandbox_is_adopted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
    b.world.add("other")
    await change_record(tmp_path, made.id, box_id=SandboxId("other"))
    async with bench(tmp_path, world=b.world) as b:
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0
        assert list(b.world.agents) == ["other"]
        await b.service.reaper.tidy()
        assert list(b.world.agents) == ["other"]
        await b.service.delete(made.id)
    assert b.world.agents == {}


@pytest.mark.parametrize("state", [State.CREATING, State.STOPPING])
async def test_half_made_and_half_removed_ones_are_gone(tmp_path: Path, state: State) -> None:
    request = CreateRequest(idempotency_key="k")
    async with bench(tmp_path) as b:
        made = await b.service.create(request)
    await record_as(tmp_path, made.id, state)
    async with bench(tmp_path, world=b.world) as b:
        assert b.world.agents == {}
        assert b.service.list() == []
        if state is State.CREATING:  # nobody was told of it, so the retry makes the one
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


async def test_orphans_are_swept_while_the_server_runs(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.world.add("orphan")
        await b.service.reaper.tidy()
        assert list(b.world.agents) == [made.id]


async def test_a_box_being_made_is_no_orphan(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        go = asyncio.Event()

        async def hold(_: SandboxId) -> None:
            await go.wait()

        b.provider.after_launch = hold
        create = asyncio.create_task(b.service.create(CreateRequest()))
        await eventually(lambda: b.world.agents, what="box made")
        await b.service.reaper.tidy()
        go.set()
        made = await create
        await b.service.exec(made.id, TRUE)


async def test_one_that_is_deleted_while_boxes_are_listed_is_no_orphan(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        discarded: list[Handle] = []

        async def listing() -> AsyncIterator[Handle]:
            yield Handle("fake", made.id)
            await b.service.delete(made.id)

        async def discard(handle: Handle) -> None:
            discarded.append(handle)

        b.provider.owned = listing  # type: ignore[method-assign]
        b.provider.discard = discard  # type: ignore[method-assign]
        await b.service.reaper.tidy()
        assert not discarded


async def test_a_provider_that_is_down_at_the_start_is_asked_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())

    async def down(_: SandboxId) -> None:
        raise UnavailableError("the engine is down")

    provider = FakeProvider(b.world)
    provider.before_adopt = down
    async with bench(tmp_path, world=b.world, provider=provider) as b:
        with pytest.raises(UnavailableError, match="not been reached"):
            await b.service.exec(made.id, TRUE)
        assert b.world.agents, "not being able to say is no reason to remove it"

        async def up(_: SandboxId) -> None:
            pass

        provider.before_adopt = up
        b.clock.pass_time(5)
        await b.service._pulse.round()
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_one_that_has_just_begun_to_end_is_over(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        ending = asyncio.create_task(b.service.delete(made.id))
        entry = b.service._sandboxes.find(made.id)
        for _ in range(100):
            if entry.ending is None:
                await asyncio.sleep(0)
        assert entry.ending and entry.state is State.RUNNING, "its task has not begun"
        with pytest.raises(GoneError, match="is over"):
            await b.service.set_timeout(made.id, 60)
        await ending


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


async def test_the_pulse_finds_a_dead_box_by_itself(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.world.kill(made.id)
        b.clock.pass_time(4)
        await eventually(
            lambda: b.service.get(made.id).state is State.FAILED, what="failed", within=5
        )


async def test_a_round_of_the_pulse_asks_a_bounded_number_those_first_that_waited_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "A_ROUND", 2)
    monkeypatch.setattr(reaper, "_forever", lambda *_: asyncio.Event().wait())
    async with bench(tmp_path) as b:
        made = [(await b.service.create(CreateRequest())).id for _ in range(5)]
        entries = b.service._sandboxes.entries
        for age, id in enumerate(made):
            entries[id].checked -= 10 + age
        asked: list[list[SandboxId]] = []
        for _ in range(3):
            before = {id: entries[id].checked for id in made}
            await b.service._pulse.round()
            asked.append([id for id in made if entries[id].checked != before[id]])
        assert asked == [made[3:], made[1:3], made[:1]]


async def test_an_exec_in_a_dying_box_has_no_result(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        call = asyncio.create_task(b.service.exec(made.id, ExecCall(("wait",))))
        await eventually(lambda: b.world.agents[made.id].execs, what="runs")
        b.world.kill(made.id)
        with pytest.raises(UnavailableError, match="died during the call"):
            await call
        assert b.service.get(made.id).state is State.FAILED


async def test_trouble_of_our_own_fails_no_sandbox(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        agent = b.world.agents[made.id]

        async def cannot_say(_: SandboxId) -> None:
            raise UnavailableError("no file descriptors left")

        b.provider.before_adopt = cannot_say
        agent.alive = False
        b.clock.pass_time(4)
        await b.service._pulse.round()
        assert b.service.get(made.id).state is State.RUNNING
        agent.alive = True
        assert (await b.service.exec(made.id, TRUE)).exit.exit_code == 0


async def test_a_failed_sandbox_stays_failed_after_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.world.kill(made.id)
        b.clock.pass_time(4)
        await b.service._pulse.round()
        await eventually(lambda: not b.world.agents, what="cleared away")
    async with bench(tmp_path, world=b.world) as b:
        assert b.service.get(made.id).state is State.FAILED
        await b.service.delete(made.id)


async def test_failed_sandboxes_take_no_capacity(tmp_path: Path) -> None:
    async with bench(tmp_path, max_sandboxes=1) as b:
        made = await b.service.create(CreateRequest())
        b.world.kill(made.id)
        b.clock.pass_time(4)
        await b.service._pulse.round()
        await b.service.create(CreateRequest())


async def test_a_second_server_on_the_same_directories_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        with pytest.raises(ConflictError, match="another server uses"):
            async with bench(tmp_path, world=b.world):
                pass
        await b.service.exec(made.id, TRUE)
    async with bench(tmp_path, world=b.world) as b:
        assert b.service.list()


async def crash_at_every_step(folder: Path, act: str) -> None:
    """Stop the loop of a server in the middle of `act`, as kill -9 does: no finally, no cleanup."""
    for steps in range(0, 40):
        home, world = folder / str(steps), World()
        home.mkdir()
        victim = await _crashed(home, world, act, steps)
        async with bench(home, world=world) as b:
            await _consistent(b, victim)


async def _crashed(home: Path, world: World, act: str, steps: int) -> str | None:
    """Run `act` for some steps on a service that is then forgotten, its lock released."""
    context = bench(home, world=world, clock=TurnedClock())
    b = await context.__aenter__()
    made = await b.service.create(CreateRequest()) if act != "create" else None
    work = asyncio.create_task(_act(b, act, made.id if made else ""))
    for _ in range(steps):
        await asyncio.sleep(0)
    # What a killed process can no longer do: nobody's finally may touch the world or the store.
    store, provider = b.service._store, b.provider
    assert isinstance(store, SqliteStore)
    frozen = {"agents": dict(world.agents), "connections": dict(world.connections)}
    db, store._db._db = store._db._db, None
    assert db is not None
    db.close()
    provider.world = World()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await b.service._opened.aclose()
    world.agents, world.connections = frozen["agents"], frozen["connections"]  # type: ignore[assignment]
    return made.id if made else None


async def _act(b: Bench, act: str, id: str) -> None:
    async def steps(_: SandboxId) -> None:
        for _step in range(4):
            await asyncio.sleep(0)

    b.provider.before_launch = b.provider.after_launch = b.provider.before_destroy = steps
    if act == "create":
        await b.service.create(CreateRequest(idempotency_key="k"))
    elif act == "delete":
        await b.service.delete(id)
    else:
        await b.service.exec(id, ExecCall(("true",), idempotency_key="k"))


async def _consistent(b: Bench, victim: str | None) -> None:
    listed = {s.id for s in b.service.list()}
    assert listed == set(b.world.agents), "no box without a row, no row without a box"
    for id in listed:
        await b.service.exec(id, TRUE)
    if victim is None:
        before = len(listed)
        made = await b.service.create(CreateRequest(idempotency_key="k"))
        assert len(b.service.list()) == 1, "a retry makes no second sandbox"
        assert before == 0 or made.id in listed
    elif victim in listed:
        try:
            result = await b.service.exec(victim, ExecCall(("true",), idempotency_key="k"))
            assert result.exit.exit_code == 0
        except CapsuleError as error:
            assert error.details.get("lost")
        assert b.world.agents[SandboxId(victim)].runs[("true",)] <= 2


@pytest.mark.parametrize("act", ["create", "delete", "exec"])
async def test_a_server_killed_anywhere_leaves_a_consistent_world(tmp_path: Path, act: str) -> None:
    await crash_at_every_step(tmp_path, act)
