"""Contexts over real boxes: interpreters that live, die, and outlive the server."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from capsule.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    WrongStateError,
)
from capsule.link.link import AgentLink
from capsule.model import Stream
from capsule.service import (
    ContextCall,
    ContextRun,
    CreateRequest,
    LiveRun,
    RunResult,
    Service,
    interpreters,
)
from capsule.service.context import MAX_WAITING, ContextRecord
from capsule.service.live_run import RunEnd, Text
from capsule.service.store import SqliteStore
from capsule.service.talk import Talk
from tests.support import eventually
from tests.unit.test_service_real import folder, serving

pytestmark = pytest.mark.real
__all__ = ["folder"]


class Box:
    """One sandbox and its contexts, in few words."""

    def __init__(self, service: Service, id: str) -> None:
        self.service = service
        self.id = id
        self.contexts = service.contexts

    @classmethod
    async def create(cls, service: Service, template: str = "python", **limits: int) -> Box:
        made = await service.create(CreateRequest(template, limits=limits))
        return cls(service, made.id)

    async def context(self, language: str | None = None) -> str:
        return (await self.contexts.create(self.id, ContextCall(language))).id

    async def run(
        self,
        code: str,
        context: str | None = None,
        *,
        language: str | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        call = ContextRun(code, context, language, timeout)
        return await self.contexts.run(self.id, call)

    async def start(self, code: str, context: str) -> LiveRun:
        return await self.contexts.start(self.id, ContextRun(code, context))

    async def state(self, context: str) -> str:
        (found,) = [each for each in await self.contexts.list(self.id) if each.id == context]
        return found.state


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with serving(folder) as service:
        yield await Box.create(service)


async def until_printed(live: LiveRun, text: bytes) -> None:
    seen = b""
    async for event in live:
        if isinstance(event, Text) and event.stream is Stream.STDOUT:
            seen += event.data
            if text in seen:
                return


async def sleeping(box: Box, context: str) -> LiveRun:
    """A run that is under way, for a minute."""
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
    return live


async def end_of(live: LiveRun) -> RunEnd:
    last = [event async for event in live][-1]
    assert isinstance(last, RunEnd)
    return last


def texts(result: RunResult) -> list[object]:
    return [shown.text for shown in result.results]


async def test_what_ignores_its_interrupt_is_killed(box: Box) -> None:
    context = await box.context()
    code = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))"
    ended = await box.run(f"{code}; time.sleep(60)", context, timeout=0.2)
    assert (ended.end.status, ended.end.state) == ("timed_out", "dead")
    assert ended.error is not None
    assert "after its timeout of 0.2 s, and was killed" in ended.error.value
    with pytest.raises(WrongStateError, match="is dead: a run did not stop"):
        await box.run("1", context)
    again = await box.contexts.restart(box.id, context)
    assert (again.id, again.state) == (context, "idle")
    assert texts(await box.run("1", context)) == ["1"]


@pytest.mark.parametrize(
    "language", ["python", "bash", pytest.param("node", marks=pytest.mark.needs("node"))]
)
async def test_interrupts_at_any_moment_leave_the_context_and_the_next_run_alone(
    folder: Path, language: str
) -> None:
    code = {
        "python": "import time; time.sleep(0.02)",
        "bash": "sleep 0.02",
        "node": "await 1; await new Promise((go) => setTimeout(go, 20))",
    }[language]
    pick, seen = random.Random(1), set()
    async with serving(folder) as service:
        box = await Box.create(service, "node" if language == "node" else "python")
        context = await box.context(language)
        for _ in range(40):
            live = await box.start(code, context)
            await asyncio.sleep(pick.choice((0, 0, 0.001, 0.004, 0.02)))  # any moment of a run
            for _ in range(pick.choice((1, 2))):
                await box.contexts.interrupt(box.id, context)
            seen.add((await end_of(live)).status)
            after = await box.run(":" if language == "bash" else "1", context)
            assert (after.end.status, after.end.state) == ("ok", "idle")
    assert seen == {"interrupted", "ok"}


SWALLOWS = {
    "in a loop": "while True:\n    try: time.sleep(60)\n    except: pass",
    "in silence": "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)",
}


@pytest.mark.parametrize("code", SWALLOWS.values(), ids=SWALLOWS.keys())
async def test_code_that_swallows_every_interrupt_is_ended_all_the_same(
    box: Box, code: str
) -> None:
    context = await box.context()
    await box.run("import signal, sys, time", context)
    ended = await box.run(f"x = 1\n{code}", context, timeout=0.2)
    assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
    assert ended.error is not None
    assert ended.error.name == "KeyboardInterrupt"
    after = await box.run("time.sleep(0.05); x, sys.gettrace(), signal.getitimer(0)", context)
    assert texts(after) == ["(1, None, (0.0, 0.0))"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(9)", "exited with code 9"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        pytest.param(
            *("x = bytearray(1 << 30)", "out of memory (oom_killed)"),
            marks=pytest.mark.needs("cgroup"),
        ),
    ],
)
async def test_a_death_says_why(box: Box, code: str, reason: str) -> None:
    context = await box.context()
    ended = await box.run(f"print('last words', flush=True)\n{code}", context)
    assert (ended.end.status, ended.end.state) == ("died", "dead")
    assert ended.stdout == b"last words\n"
    assert ended.error is not None
    assert reason in ended.error.value
    (info,) = await box.contexts.list(box.id)
    assert (info.state, reason in info.reason) == ("dead", True)
    await box.contexts.restart(box.id, context)
    assert texts(await box.run("2", context)) == ["2"]


async def test_the_line_has_an_end(box: Box) -> None:
    context = await box.context()
    await sleeping(box, context)
    waiting = [asyncio.create_task(box.run("1", context)) for _ in range(MAX_WAITING)]

    async def all_wait() -> bool:
        (info,) = await box.contexts.list(box.id)
        return info.waiting == MAX_WAITING

    await eventually(all_wait, what="they wait")
    with pytest.raises(CapacityError, match="runs in line, limit"):
        await box.run("1", context)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await box.contexts.interrupt(box.id, context)
    assert texts(await box.run("2", context)) == ["2"]


async def test_restart_and_delete_end_a_run_under_way(box: Box) -> None:
    context = await box.context()
    live = await sleeping(box, context)
    await box.contexts.restart(box.id, context)
    ended = await end_of(live)
    assert (ended.status, ended.reason) == ("died", "it was restarted")
    assert texts(await box.run("1", context)) == ["1"]
    live = await sleeping(box, context)
    await box.contexts.delete(box.id, context)
    assert (await end_of(live)).reason == "it was deleted"
    with pytest.raises(NotFoundError, match="no such context"):
        await box.run("1", context)
    running = [each for each in await box.service.execs(box.id) if each.running]
    assert running == []


@pytest.mark.parametrize("end", ["delete", "restart"])
async def test_a_run_in_line_learns_what_became_of_its_context(box: Box, end: str) -> None:
    context = await box.context()
    await sleeping(box, context)
    waiting = asyncio.create_task(box.run("1", context))

    async def waits() -> bool:
        return (await box.contexts.list(box.id))[0].waiting == 1

    await eventually(waits, what="it waits in line")
    if end == "delete":
        await box.contexts.delete(box.id, context)
        with pytest.raises(NotFoundError, match="was deleted"):
            await waiting
    else:
        await box.contexts.restart(box.id, context)
        with pytest.raises(WrongStateError, match="restarted before it was this run's turn"):
            await waiting


async def test_contexts_outlive_the_server(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        box = await Box.create(service)
        context = await box.context()
        await box.run("x = 9", context)
        await box.contexts.create(box.id, ContextCall("bash"))
    async with serving(folder) as service:
        box = Box(service, box.id)
        assert texts(await box.run("x", context)) == ["9"]
        found = await box.contexts.list(box.id)
        assert [(each.language, each.state, each.lost_run) for each in found] == [
            ("python", "idle", None),
            ("bash", "idle", None),
        ]


async def test_a_run_in_flight_when_the_server_stopped_is_lost(folder: Path) -> None:
    async with serving(folder, drain="keep", drain_timeout=0.05) as service:
        box = await Box.create(service)
        context = await box.context()
        await box.run("x = 9", context)
        await sleeping(box, context)
    async with serving(folder) as service:
        box = Box(service, box.id)
        (info,) = await box.contexts.list(box.id)
        assert (info.state, info.lost_run) == ("running", 2)
        with pytest.raises(ConflictError, match="busy with run 2, which was begun before"):
            await box.run("x", context, timeout=0.2)
        assert await box.contexts.interrupt(box.id, context)
        after = await box.run("x", context)
        assert (texts(after), after.stdout) == (["9"], b"")
        assert await box.state(context) == "idle"


async def test_output_beyond_the_limit_is_cut_and_the_run_goes_on(box: Box) -> None:
    most = box.service.config.output_limit
    done = await box.run(f"import sys; sys.stdout.write('x' * {most + 5}); 3")
    assert (len(done.stdout), done.stdout_truncated) == (most, True)
    assert texts(done) == ["3"]


HOSTILE = """
import os
marker = display.__self__.wire.marker
def say(flag, data): os.write(1, marker + flag + b"%04x" % len(data) + data)
"""


LIES = (
    "say(b'S', b'{')",
    "say(b'B', b'x' * 4000); [say(b'M', b'x' * 4000) for _ in range(3000)]",
    "say(b'S', b'{\"k\":\"result\",\"json\":' + b'[' * 4000)",
    "os.write(1, marker); os.write(1, marker + b'Sffff'); os.write(1, marker[:5])",
    "say(b'E', b'no beginning')",
    'say(b\'S\', b\'{"k":"end","run":99999,"status":"ok"}\')',
    'say(b\'S\', b\'{"k":"ready","failed":{"a":"b"}}\')',
)


async def test_a_kernel_that_lies_harms_itself_only(box: Box) -> None:
    context = await box.context()
    await box.run(HOSTILE, context)
    for lie in LIES:
        await box.run(lie, context)
        assert texts(await box.run("6 * 7", context)) == ["42"], lie


# Programs of a run that a Ctrl-C of a terminal does not reach: in other process groups.
APART = {
    "timeout": "timeout 60 sleep 50",
    "substitution": "x=$(timeout 60 sleep 50)",
    "session": "setsid -w sleep 50",
    "job control": "set -m; sleep 50; set +m",
    "deaf": "trap '' INT; sleep 50; trap - INT",
    "deaf loop": "trap '' INT; while :; do :; done",
}


@pytest.mark.parametrize("code", list(APART.values()), ids=list(APART))
async def test_a_shell_outlives_its_timeout(box: Box, code: str) -> None:
    context = await box.context("bash")
    await box.run("kept=1; f() { echo $kept; }", context)
    ended = await box.run(code, context, timeout=0.3)
    assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
    after = await box.run("f", context)
    assert (after.end.status, after.stdout) == ("ok", b"1\n")


@pytest.mark.parametrize("code", [APART["timeout"], APART["session"]])
async def test_an_interrupt_reaches_other_groups_when_it_is_not_heard(box: Box, code: str) -> None:
    context = await box.context("bash")
    live = await box.start(f"echo on; {code}", context)
    await until_printed(live, b"on")
    assert await box.contexts.interrupt(box.id, context)
    assert (await end_of(live)).status == "interrupted"


async def test_what_runs_beside_a_shell_is_spared_by_an_interrupt_that_is_heard(box: Box) -> None:
    context = await box.context("bash")
    await box.run("setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid", context)
    live = await box.start("echo on; sleep 50", context)
    await until_printed(live, b"on")
    await box.contexts.interrupt(box.id, context)
    assert [event async for event in live]
    assert (await box.run("kill -0 $(cat pid); echo $?", context)).stdout == b"0\n"


async def test_a_context_recorded_before_there_were_greetings_lives_on(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        box = await Box.create(service)
        await box.run("x = 9")
    with closing(sqlite3.connect(folder / "d" / "capsule.db")) as db, db:
        old = "json_remove(CAST(body AS TEXT), '$.greeted')"
        assert db.execute(f"UPDATE contexts SET body = {old}").rowcount == 1
    async with serving(folder) as service:
        assert texts(await Box(service, box.id).run("x")) == ["9"]


@pytest.mark.parametrize("moment", ["recorded", "started", "greeted"])
async def test_a_kill_while_an_interpreter_starts_leaves_its_context_usable(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, greet = asyncio.Event(), interpreters._greet

    async def stop(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def stop_greeted(record: ContextRecord, talk: Talk) -> None:
        assert await greet(record, talk)
        await stop()

    async def nothing(*_: object) -> None:
        pass

    async with serving(folder, drain="keep") as service:
        box = await Box.create(service)
        with monkeypatch.context() as patched:
            if moment == "recorded":
                patched.setattr(AgentLink, "exec", stop)
            else:
                patched.setattr(
                    interpreters, "_greet", stop if moment == "started" else stop_greeted
                )
            first = asyncio.create_task(box.run("x = 1"))
            await reached.wait()
            patched.setattr(AgentLink, "kill", nothing)  # a killed server clears nothing up
            patched.setattr(SqliteStore, "remove_context", nothing)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    async with serving(folder) as service:
        box = Box(service, box.id)
        assert await box.state("default-python") == "idle"
        assert texts(await box.run("x = 2; x")) == ["2"]
        assert texts(await box.run("x")) == ["2"]
        (left,) = [each.id for each in await service.execs(box.id) if each.running]
        assert left == (await box.contexts.list(box.id))[0].exec_id


@pytest.mark.parametrize("code", ["x = 1", "x = 1; import time; time.sleep(60)"])
async def test_a_kill_in_a_restart_leaves_its_context_usable(
    folder: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def stop(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with serving(folder, drain="keep") as service:
        box = await Box.create(service)
        context = await box.context()
        live = await box.start(code, context)
        if "sleep" not in code:
            await end_of(live)
        with monkeypatch.context() as patched:
            patched.setattr(interpreters.Interpreters, "renew", stop)  # the old one has ended
            restart = asyncio.create_task(box.contexts.restart(box.id, context))
            await reached.wait()
            restart.cancel()
            await asyncio.gather(restart, return_exceptions=True)
    async with serving(folder) as service:
        box = Box(service, box.id)
        assert texts(await box.run("'x' in globals()", context)) == ["False"]
