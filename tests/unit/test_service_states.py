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
    WrongStateError,
)
from capsule.model import MIB, Isolation, SandboxId, State
from capsule.service import CreateRequest, ExecCall
from capsule.service.entry import MOVES
from capsule.service.store import Claim, SqliteStore
from tests.support import eventually
from tests.unit.service_double import FakeProvider, World, bench

TRUE = ExecCall(("true",))


async def test_a_sandbox_runs_is_listed_and_goes(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest(metadata={"user": "ann"}, env={"A": "1"}))
        assert made.state is State.RUNNING
        assert made.isolation is Isolation.NAMESPACES
        assert made.unenforced[0].what == "disk"
        assert (made.expires_at - made.created_at).total_seconds() == 600
        assert b.service.get(made.id) == made
        assert b.service.list() == [made]
        await b.service.delete(made.id)
        assert b.service.list() == []
        assert b.world.agents == {}
        with pytest.raises(GoneError, match="it was deleted"):
            b.service.get(made.id)


async def test_list_filters_by_metadata_and_state(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        ann = await b.service.create(CreateRequest(metadata={"user": "ann", "job": "1"}))
        await b.service.create(CreateRequest(metadata={"user": "bob"}))
        assert [s.id for s in b.service.list(metadata={"user": "ann"})] == [ann.id]
        assert len(b.service.list(state=State.RUNNING)) == 2
        assert b.service.list(state=State.FAILED) == []


@pytest.mark.parametrize("id", ["nope", "", "../x", "a\0b", "x" * 5000])
async def test_unknown_ids_are_not_found(tmp_path: Path, id: str) -> None:
    async with bench(tmp_path) as b:
        for call in (b.service.get, b.service.files):
            with pytest.raises(NotFoundError):
                call(id)
        for use in (b.service.delete(id), b.service.exec(id, TRUE), b.service.keep_alive(id)):
            with pytest.raises(NotFoundError):
                await use


async def test_a_second_delete_says_that_it_is_gone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        await b.service.delete(made.id)
        with pytest.raises(GoneError):
            await b.service.delete(made.id)
        with pytest.raises(GoneError):
            await b.service.exec(made.id, TRUE)


async def test_concurrent_deletes_destroy_once_and_all_succeed(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        destroyed: list[str] = []
        go = asyncio.Event()

        async def slow(id: SandboxId) -> None:
            destroyed.append(id)
            await go.wait()

        made = await b.service.create(CreateRequest())
        b.provider.before_destroy = slow
        deletes = [asyncio.create_task(b.service.delete(made.id)) for _ in range(5)]
        await eventually(lambda: destroyed, what="destroying")
        assert b.service.get(made.id).state is State.STOPPING
        with pytest.raises(GoneError):
            await b.service.exec(made.id, TRUE)
        go.set()
        await asyncio.gather(*deletes)
        assert destroyed == [made.id]


async def test_a_deleters_leaving_does_not_stop_the_delete(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        go = asyncio.Event()
        made = await b.service.create(CreateRequest())
        b.provider.before_destroy = lambda _: _wait(go)
        delete = asyncio.create_task(b.service.delete(made.id))
        await eventually(lambda: b.service.get(made.id).state is State.STOPPING, what="stopping")
        delete.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delete
        go.set()
        await eventually(lambda: not b.world.agents, what="box gone")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_delete_during_create_ends_both(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.provider.after_launch = lambda _: _wait(asyncio.Event())
        create = asyncio.create_task(b.service.create(CreateRequest()))
        await eventually(lambda: b.world.agents, what="box made")
        (entry,) = b.service.list()
        assert entry.state is State.CREATING
        with pytest.raises(WrongStateError):
            await b.service.exec(entry.id, TRUE)
        await b.service.delete(entry.id)
        with pytest.raises(GoneError):
            await create
        assert b.world.agents == {}
        assert b.service.list() == []


async def test_delete_during_exec_ends_the_exec_with_gone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        running = asyncio.create_task(b.service.exec(made.id, ExecCall(("wait",))))
        await eventually(lambda: b.world.agents[made.id].execs, what="exec runs")
        await b.service.delete(made.id)
        with pytest.raises(GoneError, match="deleted"):
            await running


async def test_a_destroy_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())

        async def broken(_: SandboxId) -> None:
            raise UnavailableError("the engine is down")

        b.provider.before_destroy = broken
        with pytest.raises(UnavailableError, match="engine is down"):
            await b.service.delete(made.id)
        assert b.service.get(made.id).state is State.STOPPING
        b.provider.before_destroy = _fine
        await b.service.delete(made.id)
        assert b.world.agents == {}


async def _fine(_: SandboxId) -> None:
    pass


@pytest.mark.parametrize("stage", ["before_launch", "after_launch"])
async def test_a_launch_that_fails_leaves_nothing(tmp_path: Path, stage: str) -> None:
    async def broken(_: SandboxId) -> None:
        raise UnavailableError("no box today")

    async with bench(tmp_path, max_sandboxes=1) as b:
        setattr(b.provider, stage, broken)
        for _ in range(3):  # a leaked permit would make the second a CapacityError
            with pytest.raises(UnavailableError, match="no box today"):
                await b.service.create(CreateRequest(idempotency_key="k"))
        assert b.service.list() == []
        assert b.world.agents == {}
        setattr(b.provider, stage, _fine)
        await b.service.create(CreateRequest(idempotency_key="k"))
    async with bench(tmp_path, world=b.world) as again:
        assert len(again.service.list()) == 1


async def test_a_provider_that_cannot_expect_a_launch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise UnavailableError("not expected")

    async with bench(tmp_path, max_sandboxes=1) as b:
        monkeypatch.setattr(b.provider, "expect", broken)
        for _ in range(2):  # a place that was kept would make the second a CapacityError
            with pytest.raises(UnavailableError, match="not expected"):
                await b.service.create(CreateRequest())
        assert b.service.list() == []


async def test_a_creator_that_leaves_takes_its_sandbox_along(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.provider.after_launch = lambda _: _wait(asyncio.Event())
        create = asyncio.create_task(b.service.create(CreateRequest()))
        await eventually(lambda: b.world.agents, what="box made")
        create.cancel()
        with pytest.raises(asyncio.CancelledError):
            await create
        await eventually(lambda: not b.world.agents and not b.service.list(), what="nothing left")


async def test_cancelling_create_at_every_step_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:

        async def steps(_: SandboxId) -> None:
            for _step in range(3):
                await asyncio.sleep(0)

        b.provider.before_launch = b.provider.after_launch = steps
        for after in range(14):
            create = asyncio.create_task(b.service.create(CreateRequest()))
            for _ in range(after):
                await asyncio.sleep(0)
            create.cancel()
            try:
                await b.service.delete((await create).id)
            except asyncio.CancelledError:
                pass
        await eventually(lambda: not b.world.agents and not b.service.list(), what="nothing left")


async def test_capacity_is_a_clear_error_with_a_time_to_retry(tmp_path: Path) -> None:
    async with bench(tmp_path, max_sandboxes=2) as b:
        first = await b.service.create(CreateRequest(ttl=20))
        await b.service.create(CreateRequest())
        with pytest.raises(CapacityError, match="2, limit 2") as caught:
            await b.service.create(CreateRequest())
        assert caught.value.retry_after == pytest.approx(20)
        await b.service.delete(first.id)
        await b.service.create(CreateRequest())


async def test_a_burst_of_creates_and_deletes_balances(tmp_path: Path) -> None:
    async with bench(tmp_path, max_sandboxes=60) as b:
        made = await asyncio.gather(*(b.service.create(CreateRequest()) for _ in range(60)))
        assert len({s.id for s in made}) == 60
        await asyncio.gather(*(b.service.delete(s.id) for s in made))
        assert b.world.agents == {}
        assert b.service.stats().sandboxes == {}


async def test_a_key_makes_one_sandbox(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        request = CreateRequest(idempotency_key="k", metadata={"a": "1"})
        made = await asyncio.gather(*(b.service.create(request) for _ in range(5)))
        assert {s.id for s in made} == {made[0].id}
        assert b.world.launched == 1
        with pytest.raises(ConflictError, match="another request"):
            await b.service.create(CreateRequest(idempotency_key="k"))


async def test_two_creates_that_find_the_key_free_make_one_sandbox(tmp_path: Path) -> None:
    """As with a store that answers later: both have looked before either has written."""

    class Late(SqliteStore):
        async def find(self, scope: str, key: str) -> Claim | None:
            found = await super().find(scope, key)
            await asyncio.sleep(0)
            return found

    async with bench(tmp_path, store=Late(tmp_path / "d" / "late.db")) as b:
        request = CreateRequest(idempotency_key="k")
        made = await asyncio.gather(*(b.service.create(request) for _ in range(4)))
        assert {s.id for s in made} == {made[0].id}
        assert b.world.launched == 1
        assert len(b.service.list()) == 1


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


async def test_a_creator_with_a_key_may_leave_and_come_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        go = asyncio.Event()
        b.provider.before_launch = lambda _: _wait(go)
        request = CreateRequest(idempotency_key="k")
        create = asyncio.create_task(b.service.create(request))
        await eventually(lambda: b.service.list(), what="creating")
        create.cancel()
        retry = asyncio.create_task(b.service.create(request))
        go.set()
        assert (await retry).state is State.RUNNING
        assert b.world.launched == 1


BAD: list[tuple[dict[str, Any], type[CapsuleError], str]] = [
    ({"template": "cobol"}, NotFoundError, "'cobol' does not exist"),
    ({"template": "../python"}, NotFoundError, "does not exist"),
    ({"provider": "docker"}, NotFoundError, "'docker' is not set up"),
    ({"ttl": 0}, InvalidError, "ttl: 0 is out of range, allowed: 1 to 86400"),
    ({"ttl": 1e9}, InvalidError, "ttl"),
    ({"ttl": float("nan")}, InvalidError, "ttl: nan"),
    ({"ttl": "600"}, InvalidError, "ttl: '600'"),
    ({"idle_timeout": -1}, InvalidError, "idle_timeout: -1"),
    ({"limits": {"memory": 1}}, InvalidError, "limits.memory: 1 is out of range"),
    ({"limits": {"memory": 1 << 60}}, InvalidError, "limits.memory"),
    ({"limits": {"memory": True}}, InvalidError, "limits.memory: True is not a size"),
    ({"limits": {"memroy": 1}}, InvalidError, "unknown limit: 'memroy'"),
    ({"env": {"A=B": "1"}}, InvalidError, "has a '='"),
    ({"env": {"": "1"}}, InvalidError, "is empty"),
    ({"env": {"A": "a\0b"}}, InvalidError, "env.A: 'a\\\\x00b' has a NUL"),
    ({"env": {"A": "\udc80"}}, InvalidError, "lone surrogate"),
    ({"env": {"A": 1}}, InvalidError, "env.A: 1 is not a string"),
    ({"env": {"A": "x" * 200_000}}, TooLargeError, "limit"),
    ({"env": {f"A{i}": "x" * 100_000 for i in range(4)}}, TooLargeError, "env: 4000"),
    ({"metadata": {str(i): "" for i in range(65)}}, TooLargeError, "65 entries, limit 64"),
    ({"idempotency_key": ""}, InvalidError, "idempotency_key: is empty"),
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
    from capsule.model import Limits

    most = Limits(memory=256 * MIB, open_files=4096)
    async with bench(tmp_path, max_limits=most) as b:
        made = await b.service.create(CreateRequest(limits={"cpus": 0.25, "disk": "64MiB"}))
        assert made.limits.cpus == 0.25
        assert made.limits.disk == 64 * MIB
        assert made.limits.memory == 256 * MIB  # the template asks for 512
        assert made.limits.processes == 128


def test_every_state_leads_somewhere_but_gone() -> None:
    assert set(MOVES) == set(State)
    assert [state for state, to in MOVES.items() if not to] == [State.GONE]
    for state, to in MOVES.items():
        assert state not in to


async def test_illegal_moves_raise(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        sandboxes = b.service._sandboxes
        for to in (State.RUNNING, State.CREATING, State.GONE):
            with pytest.raises(WrongStateError):
                sandboxes.move(sandboxes.find(made.id), to)


async def test_draining_refuses_creates_and_serves_the_rest(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        made = await b.service.create(CreateRequest())
        b.service.drain(60.0)
        with pytest.raises(UnavailableError, match="stopping"):
            await b.service.create(CreateRequest())
        await b.service.exec(made.id, TRUE)
        assert b.service.stats().draining


async def test_drain_keep_leaves_boxes_and_drain_delete_removes_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.service.create(CreateRequest())
    assert len(b.world.agents) == 1
    async with bench(tmp_path, world=b.world, drain="delete") as b:
        await b.service.create(CreateRequest())
    assert b.world.agents == {}


async def test_closing_waits_for_execs_up_to_its_limit(tmp_path: Path) -> None:
    async with bench(tmp_path, drain_timeout=5.0) as b:
        made = await b.service.create(CreateRequest())
        running = asyncio.create_task(b.service.exec(made.id, ExecCall(("wait",))))
        (run,) = await eventually(lambda: b.world.agents[made.id].execs.values(), what="runs")
        asyncio.get_running_loop().call_later(0.05, run.end)
    assert (await running).exit.exit_code == 0


async def test_closing_waits_no_longer_than_since_the_drain_began(tmp_path: Path) -> None:
    async with asyncio.timeout(10):
        async with bench(tmp_path, drain_timeout=600.0) as b:
            made = await b.service.create(CreateRequest())
            running = asyncio.create_task(b.service.exec(made.id, ExecCall(("wait",))))
            await eventually(lambda: b.world.agents[made.id].execs, what="runs")
            b.service.drain(0.0)
    running.cancel()
    await asyncio.wait({running})


async def test_a_service_lets_go_of_everything_even_if_deleting_fails(tmp_path: Path) -> None:
    async def broken(_: SandboxId) -> None:
        raise RuntimeError("a bug of the provider's")

    provider = FakeProvider(World())
    with pytest.raises(RuntimeError, match="a bug"):
        async with bench(tmp_path, provider=provider, drain="delete") as b:
            await b.service.create(CreateRequest())
            provider.before_destroy = broken
    assert not provider.is_open
    provider.before_destroy = _fine
    async with bench(tmp_path, provider=provider):
        pass  # and its directories are not locked


async def test_a_record_that_two_remove_at_once_is_removed(tmp_path: Path) -> None:
    busy = asyncio.Event()

    class Slow(SqliteStore):
        async def remove(self, id: SandboxId) -> None:
            await busy.wait()
            await super().remove(id)

    async with bench(tmp_path, store=Slow(tmp_path / "records")) as b:
        made = await b.service.create(CreateRequest())
        deleting = asyncio.create_task(b.service.delete(made.id))
        await eventually(lambda: b.service._sandboxes.unremoved, what="its record is removed")
        tidying = asyncio.create_task(b.service.reaper.tidy())
        await asyncio.sleep(0)
        busy.set()
        await asyncio.gather(deleting, tidying)
        assert b.service._sandboxes.unremoved == {}


async def test_isolation_below_the_minimum_refuses_to_open(tmp_path: Path) -> None:
    weak = FakeProvider(World(), Isolation.LANDLOCK)
    with pytest.raises(UnavailableError, match="isolates by landlock here, required: namespaces"):
        async with bench(tmp_path, provider=weak, min_isolation="namespaces"):
            pass
    assert not weak.is_open
    async with bench(tmp_path, provider=weak):
        pass
