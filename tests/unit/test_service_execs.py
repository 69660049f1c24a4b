"""Execs: limits, keys, streams, sessions. For real programs see test_service_real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    GoneError,
    InvalidError,
    TooLargeError,
)
from capsule.link.exec_stream import Output
from capsule.model import ExecId
from capsule.service import CreateRequest, ExecCall
from capsule.service.entry import Entry
from capsule.service.happenings import Happening
from tests.support import eventually
from tests.unit.service_double import Bench, bench


async def one(b: Bench, **fields: Any) -> str:
    return (await b.service.create(CreateRequest(**fields))).id


def agent(b: Bench, id: str) -> Any:
    return b.world.agents[id]  # type: ignore[index]


async def test_environment_is_made_of_template_sandbox_and_call(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await one(b, env={"A": "sandbox", "B": "sandbox"})
        await b.service.exec(id, ExecCall(("true",), env={"B": "call"}))
        env = agent(b, id).requests[-1]["env"]
        assert env["A"] == "sandbox"
        assert env["B"] == "call"
        assert env["HOME"] == "/workspace"
        await b.service.exec(id, ExecCall(("true",)))
        assert agent(b, id).requests[-1]["env"]["B"] == "sandbox"


BAD: list[tuple[dict[str, Any], type[CapsuleError], str]] = [
    ({"cmd": ()}, InvalidError, "cmd"),
    ({"cmd": "ls"}, InvalidError, "not a list"),
    ({"cmd": ("a\0b",)}, InvalidError, "NUL"),
    ({"cmd": ("a", "\ud800")}, InvalidError, "lone surrogate"),
    ({"cmd": ("a", "x" * 131_072)}, TooLargeError, "limit 131071"),
    ({"cmd": ("a",) * 5000}, TooLargeError, "5000 arguments, limit 4096"),
    ({"timeout": 0}, InvalidError, "timeout: 0 is out of range, allowed: 0.001 to 3600 seconds"),
    ({"timeout": float("nan")}, InvalidError, "timeout: nan"),
    ({"output_limit": 0}, InvalidError, "output_limit: 0"),
    ({"on_limit": "explode"}, InvalidError, "on_limit: 'explode' is not one of truncate, kill"),
    ({"cwd": "../etc"}, InvalidError, "'..' component"),
    ({"env": {"A=": ""}}, InvalidError, "'='"),
    ({"session": "a/b"}, InvalidError, "session: 'a/b' is no name"),
    ({"idempotency_key": "x" * 257}, TooLargeError, "idempotency_key"),
]


@pytest.mark.parametrize(("fields", "error", "text"), BAD)
async def test_bad_calls_never_reach_the_agent(
    tmp_path: Path, fields: dict[str, Any], error: type[CapsuleError], text: str
) -> None:
    async with bench(tmp_path) as b:
        id = await one(b)
        with pytest.raises(error, match=text) as caught:
            await b.service.exec(id, ExecCall(**{"cmd": ("true",), **fields}))
        assert len(str(caught.value)) < 300
        assert [r for r in agent(b, id).requests if r["op"] == "exec"] == []
        assert b.service.stats().execs == 0


async def test_execs_are_capped_per_sandbox_and_over_all(tmp_path: Path) -> None:
    async with bench(tmp_path, max_execs=3, max_execs_per_sandbox=2) as b:
        first, second = await one(b), await one(b)
        wait = ExecCall(("wait",))
        running = [await b.service.start(first, wait), await b.service.start(first, wait)]
        with pytest.raises(CapacityError, match="runs 2 execs, limit 2") as caught:
            await b.service.exec(first, ExecCall(("true",)))
        assert caught.value.retry_after > 0
        running.append(await b.service.start(second, wait))
        with pytest.raises(CapacityError, match="the server runs 3 execs, limit 3"):
            await b.service.exec(second, ExecCall(("true",)))
        for live in running:
            await live.aclose()
            await live.aclose()
        assert b.service.stats().execs == 0
        await b.service.exec(first, ExecCall(("true",)))


async def test_a_key_runs_once_and_every_retry_gets_the_result(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await one(b)
        call = ExecCall(("echo", "once"), idempotency_key="k")
        results = await asyncio.gather(*(b.service.exec(id, call) for _ in range(6)))
        assert {r.stdout for r in results} == {b"once\n"}
        assert {r.id for r in results} == {results[0].id}
        assert agent(b, id).runs == {("echo", "once"): 1}
        with pytest.raises(ConflictError, match="another exec"):
            await b.service.exec(id, ExecCall(("echo", "other"), idempotency_key="k"))
        other = await one(b)
        await b.service.exec(other, ExecCall(("echo", "other"), idempotency_key="k"))


async def test_a_retry_joins_an_exec_that_runs(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await one(b)
        call = ExecCall(("wait",), idempotency_key="k")
        first = asyncio.create_task(b.service.exec(id, call))
        (run,) = await eventually(lambda: agent(b, id).execs.values(), what="runs")
        first.cancel()
        retry = asyncio.create_task(b.service.exec(id, call))
        stream = await b.service.start(id, call)
        await eventually(
            lambda: sum(r["op"] == "attach" for r in agent(b, id).requests) == 2, what="attached"
        )
        run.output = b"late"
        run.end(5)
        assert (await retry).exit.exit_code == 5
        assert (await retry).stdout == b"late"
        assert [i.data async for i in stream if isinstance(i, Output)] == [b"late"]
        assert len(agent(b, id).execs) == 1


async def test_a_result_that_the_agent_dropped_is_lost_and_never_run_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await one(b)
        call = ExecCall(("echo", "x"), idempotency_key="k")
        first = await b.service.exec(id, call)
        agent(b, id).forgotten.add(first.id)
        with pytest.raises(GoneError, match="its result is lost") as caught:
            await b.service.exec(id, call)
        assert caught.value.details["lost"] is True
        with pytest.raises(GoneError, match="its result is lost"):
            await b.service.start(id, call)
        assert agent(b, id).runs == {("echo", "x"): 1}


async def test_the_end_of_an_exec_with_a_key_is_published_once(tmp_path: Path) -> None:
    told: list[Happening] = []
    marked: list[ExecId] = []

    async def mark(entry: Entry, exec_id: ExecId, argv: Sequence[str]) -> None:
        marked.append(exec_id)

    def listen(b: Bench) -> None:
        b.service.happenings.listeners.append(told.append)
        b.service._execs.mark = mark

    async def follow(b: Bench, id: str, call: ExecCall) -> None:
        async with await b.service.start(id, call) as live:
            assert [item async for item in live]

    call = ExecCall(("echo", "x"), idempotency_key="k")
    streamed = ExecCall(("echo", "x"), idempotency_key="streamed")
    async with bench(tmp_path) as b:
        id = await one(b)
        listen(b)
        results = await asyncio.gather(*(b.service.exec(id, call) for _ in range(3)))
        await follow(b, id, call)
        await follow(b, id, streamed)
        await b.service.exec(id, streamed)
    async with bench(tmp_path, world=b.world) as b:
        listen(b)
        await b.service.exec(id, call)
        await follow(b, id, streamed)
    assert [each.exec.id for each in told if each.exec] == marked
    assert len(marked) == len(set(marked)) == 2 and marked[0] == results[0].id


async def test_a_retry_publishes_the_end_that_no_call_before_it_saw(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        id = await one(b)
        told: list[Happening] = []
        b.service.happenings.listeners.append(told.append)
        call = ExecCall(("wait",), idempotency_key="k")
        first = asyncio.create_task(b.service.exec(id, call))
        (run,) = await eventually(lambda: agent(b, id).execs.values(), what="runs")
        first.cancel()
        await asyncio.wait({first})
        run.end(5)
        for _ in range(2):
            assert (await b.service.exec(id, call)).exit.exit_code == 5
        assert len(told) == 1
