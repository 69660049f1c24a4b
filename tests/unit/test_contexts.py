"""Contexts over real boxes: interpreters that live, die, and outlive the server."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from capsule.catalog import load_catalog
from capsule.config import Config
from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
    TooLargeError,
    UnavailableError,
    WrongStateError,
)
from capsule.link.link import AgentLink
from capsule.model import Isolation, Stream
from capsule.providers.registry import make_provider
from capsule.service import (
    ContextCall,
    ContextRun,
    CreateRequest,
    ExecCall,
    LiveRun,
    RunResult,
    Service,
    interpreters,
)
from capsule.service.context import MAX_WAITING, ContextRecord
from capsule.service.context_calls import default_record
from capsule.service.contexts import MAX_CONTEXTS
from capsule.service.interpreters import start_ahead
from capsule.service.live_run import MAX_RESULTS, RunEnd, Text
from capsule.service.store import SqliteStore
from capsule.service.talk import Talk
from tests.support import component_missing, eventually
from tests.support.folders import server_folder

pytestmark = pytest.mark.real

CATALOG = load_catalog(None)


@pytest.fixture
def folder(agent_binary: Path) -> Iterator[Path]:
    with server_folder("cc-") as path:
        yield path


@asynccontextmanager
async def serving(
    folder: Path, *, drain: str = "delete", stop: float = 10.0
) -> AsyncIterator[Service]:
    config = Config(
        data_dir=folder / "d",
        run_dir=folder / "r",
        drain=drain,
        drain_timeout=stop,
        isolation=Isolation.NAMESPACES,
    )
    provider = await asyncio.to_thread(make_provider, "local", config, CATALOG)
    service = Service(config, {"local": provider}, CATALOG)
    try:
        await service.open()
    except UnavailableError as error:
        component_missing(f"no namespaces for contexts: {error.message}")
    try:
        yield service
    finally:
        await service.aclose()


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


def texts(result: RunResult) -> list[object]:
    return [shown.text for shown in result.results]


async def test_names_live_on_in_one_context_and_not_in_another(box: Box) -> None:
    first, second = await box.context(), await box.context()
    await box.run("x = 1", first)
    assert texts(await box.run("x + 1", first)) == ["2"]
    missing = await box.run("x", second)
    assert missing.error is not None
    assert (missing.end.status, missing.error.name) == ("error", "NameError")


async def test_the_default_contexts_are_made_on_first_use(box: Box) -> None:
    await box.run("x = 5")
    assert texts(await box.run("x")) == ["5"]
    shell = await box.run("cd /tmp; y=6", language="bash")
    assert shell.end.context == "default-bash"
    assert (await box.run("pwd; echo $y", language="shell")).stdout == b"/tmp\n6\n"
    found = await box.contexts.list(box.id)
    assert [(each.id, each.state) for each in found] == [
        ("default-python", "idle"),
        ("default-bash", "idle"),
    ]
    runs = await asyncio.gather(*(box.run("1", language="py") for _ in range(5)))
    assert {run.end.context for run in runs} == {"default-python"}


async def test_javascript(folder: Path) -> None:
    async with serving(folder) as service:
        box = await Box.create(service, "node")
        await box.run("const a = 20")
        assert texts(await box.run("const a = 21; await Promise.resolve(a * 2)")) == ["42"]
        for wait in ("", "await 1;", "await new Promise((go) => setTimeout(go, 5));"):
            ended = await box.run(f"console.log('on'); {wait} while (true) {{}}", timeout=0.5)
            assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
            assert ended.stdout == b"on\n"
            assert texts(await box.run("a")) == ["21"]


async def test_where_and_with_what_it_starts(box: Box) -> None:
    call = ContextCall("python", cwd="/tmp", env={"A": "1"}, imports=["decimal"])
    context = await box.contexts.create(box.id, call)
    code = "import os, sys; print(os.getcwd(), os.environ['A'], 'decimal' in sys.modules)"
    assert (await box.run(code, context.id)).stdout == b"/tmp 1 True\n"


async def test_a_folder_is_made_for_a_context_that_there_will_be(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ContextCall("bash", cwd="/tmp/made/deep", make_cwd=True)
    context = await box.contexts.create(box.id, call)
    assert (await box.run("pwd", context.id)).stdout == b"/tmp/made/deep\n"
    monkeypatch.setattr("capsule.service.contexts.MAX_CONTEXTS", 1)
    with pytest.raises(CapacityError):
        await box.contexts.create(box.id, ContextCall("bash", cwd="/tmp/other", make_cwd=True))
    assert (await box.run("ls /tmp", context.id)).stdout == b"made\n"


async def test_variables_that_are_for_one_run(box: Box) -> None:
    code = "import os; os.environ.get('A')"
    within = await box.contexts.run(box.id, ContextRun(code, env={"A": "1"}))
    assert texts(within) == ["'1'"]
    assert texts(await box.run(code)) == []
    shell = ContextRun("echo $A", language="bash", env={"A": "1"})
    assert (await box.contexts.run(box.id, shell)).stdout == b"1\n"
    with pytest.raises(InvalidError, match="is no name of a shell's variable"):
        bad = ContextRun("true", language="bash", env={"a-b": "1"})
        await box.contexts.run(box.id, bad)
    with pytest.raises(InvalidError, match="env"):
        await box.contexts.run(box.id, ContextRun("1", env={"A": "\0"}))


async def test_a_context_that_was_warmed_is_the_default_one(box: Box) -> None:
    warm = await box.contexts.warm(box.id, "python", imports=["decimal"])
    assert warm.id == "default-python"
    assert texts(await box.run("import sys; 'decimal' in sys.modules")) == ["True"]


async def test_an_interpreter_started_before_its_owner_is_taken_over(box: Box) -> None:
    """As a pool would: over the box's own link, and with nothing held open."""
    entry = box.service._sandboxes.find(box.id)
    record = default_record(entry.template, "python", ["decimal"], now=0.0)
    await start_ahead(entry.running(), entry.template, record, entry.environ)
    await box.contexts.take_over(box.id, record)
    done = await box.run("import sys; 'decimal' in sys.modules")
    assert (done.end.context, texts(done)) == ("default-python", ["True"])
    (info,) = await box.service.execs(box.id)
    assert info.id == record.exec_id
    bad = default_record(entry.template, "python", ["nope"], now=0.0)
    with pytest.raises(InvalidError, match="nope"):
        await start_ahead(entry.running(), entry.template, bad, entry.environ)
    assert [each.id for each in await box.service.execs(box.id) if each.running] == [info.id]


async def test_a_timeout_interrupts_and_the_context_goes_on(box: Box) -> None:
    await box.run("x = 3")
    slow = await box.run("print('on')\nwhile True: pass", timeout=0.3)
    assert (slow.end.status, slow.end.state, slow.stdout) == ("timed_out", "idle", b"on\n")
    assert slow.error is not None
    assert slow.error.name == "KeyboardInterrupt"
    assert texts(await box.run("x")) == ["3"]


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


async def test_a_line_that_is_not_finished_comes_at_once(box: Box) -> None:
    context = await box.context()
    code = "print('one'); print('two', end='')\nwhile True: pass"
    live = await box.start(code, context)
    await until_printed(live, b"two")
    assert await box.contexts.interrupt(box.id, context)
    assert [event async for event in live]


async def test_interrupt_from_elsewhere(box: Box) -> None:
    context = await box.context()
    assert not await box.contexts.interrupt(box.id, context)
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
    assert await box.state(context) == "running"
    assert await box.contexts.interrupt(box.id, context)
    events = [event async for event in live]
    assert getattr(events[-1], "status", "") == "interrupted"
    assert texts(await box.run("1", context)) == ["1"]


@pytest.mark.parametrize("language", ["python", "bash"])
async def test_an_interrupt_is_never_too_early(box: Box, language: str) -> None:
    """A run is under way as soon as it is told so, wherever its interpreter may be."""
    context = await box.context(language)
    code = "import time; time.sleep(60)" if language == "python" else "sleep 60"
    for _ in range(10):
        live = await box.start(code, context)
        assert await box.contexts.interrupt(box.id, context)
        events = [event async for event in live]
        assert getattr(events[-1], "status", "") == "interrupted"


@pytest.mark.parametrize("language", ["python", "bash", "node"])
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
        for _ in range(60):
            live = await box.start(code, context)
            await asyncio.sleep(pick.choice((0, 0, 0.001, 0.004, 0.02)))
            for _ in range(pick.choice((1, 2))):
                await box.contexts.interrupt(box.id, context)
            events = [event async for event in live]
            seen.add(getattr(events[-1], "status", ""))
            after = await box.run(":" if language == "bash" else "1", context)
            assert (after.end.status, after.end.state) == ("ok", "idle")
    assert seen == {"interrupted", "ok"}


async def test_code_that_swallows_an_interrupt_is_told_again_at_its_timeout(box: Box) -> None:
    context = await box.context()
    code = """
import time
for _ in range(2):
    try:
        print("on", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("caught", flush=True)
"""
    running = asyncio.create_task(box.run(code, context, timeout=1.0))
    await eventually(lambda: box.contexts.interrupt(box.id, context), what="a run is under way")
    ended = await running
    assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
    assert ended.stdout == b"on\ncaught\non\ncaught\n"


SWALLOWS = {
    "in a loop": "while True:\n    try: time.sleep(60)\n    except: pass",
    "in two": "while 1:\n try:\n  while 1:\n   try: time.sleep(1)\n   except: pass\n except: pass",
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
        ("x = bytearray(1 << 30)", "out of memory (oom_killed)"),
    ],
)
async def test_a_death_says_why(box: Box, code: str, reason: str) -> None:
    gaps = {gap.what: gap.why for gap in box.service.get(box.id).unenforced}
    if "oom" in reason and "memory" in gaps:
        pytest.skip(f"memory is not enforced here: {gaps['memory']}")  # it is a MemoryError then
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


async def test_a_death_between_runs_is_noticed(box: Box) -> None:
    context = await box.context()
    await box.run("import os, threading\nthreading.Timer(0.05, os._exit, (4,)).start()", context)

    async def dead() -> bool:
        return await box.state(context) == "dead"

    await eventually(dead, what="the context is dead")


async def test_exit_ends_a_shell_and_says_so(box: Box) -> None:
    ended = await box.run("echo bye; exit 3", language="bash")
    assert (ended.end.status, ended.end.state, ended.stdout) == ("died", "dead", b"bye\n")
    assert ended.end.reason == "its interpreter exited with code 3"
    await box.contexts.restart(box.id, "default-bash")
    last = await box.run("(exit 4)", language="bash")
    assert (last.end.status, last.end.exit_code) == ("error", 4)


async def test_runs_wait_in_line_in_their_order(box: Box) -> None:
    context = await box.context()
    await box.run("seen = []", context)
    codes = [f"import time; time.sleep(0.02); seen.append({n})" for n in range(5)]
    await asyncio.gather(*(box.run(code, context) for code in codes))
    assert texts(await box.run("seen", context)) == ["[0, 1, 2, 3, 4]"]


async def test_the_line_has_an_end(box: Box) -> None:
    context = await box.context()
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
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


async def test_a_caller_that_leaves_does_not_end_the_run(box: Box) -> None:
    context = await box.context()
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(0.2); x = 8", context)
    await until_printed(live, b"on")
    await live.aclose()
    assert texts(await box.run("x", context)) == ["8"]


async def test_restart_and_delete_end_a_run_under_way(box: Box) -> None:
    context = await box.context()
    code = "print('on', flush=True)\nimport time; time.sleep(60)"
    live = await box.start(code, context)
    await until_printed(live, b"on")
    await box.contexts.restart(box.id, context)
    events = [event async for event in live]
    assert getattr(events[-1], "status", "") == "died"
    assert getattr(events[-1], "reason", "") == "it was restarted"
    assert texts(await box.run("1", context)) == ["1"]
    live = await box.start(code, context)
    await until_printed(live, b"on")
    await box.contexts.delete(box.id, context)
    assert getattr([event async for event in live][-1], "reason", "") == "it was deleted"
    with pytest.raises(NotFoundError, match="no such context"):
        await box.run("1", context)
    running = [each for each in await box.service.execs(box.id) if each.running]
    assert running == []


@pytest.mark.parametrize("end", ["delete", "restart"])
async def test_a_run_in_line_learns_what_became_of_its_context(box: Box, end: str) -> None:
    context = await box.context()
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
    waiting = asyncio.create_task(box.run("1", context))

    async def waits() -> bool:
        return (await box.contexts.list(box.id))[0].waiting == 1

    await eventually(waits, what="it waits in line")
    if end == "delete":
        await box.contexts.delete(box.id, context)
        with pytest.raises(NotFoundError, match="was deleted"):
            await waiting
        assert await box.contexts.list(box.id) == []
    else:
        await box.contexts.restart(box.id, context)
        with pytest.raises(WrongStateError, match="restarted before it was this run's turn"):
            await waiting
        assert texts(await box.run("1", context)) == ["1"]


async def test_a_restart_takes_what_the_old_one_started(box: Box) -> None:
    context = await box.context()
    await box.run("import subprocess; p = subprocess.Popen(['sleep', '1000'])", context)
    count = ExecCall(("pgrep", "-c", "sleep"))
    assert (await box.service.exec(box.id, count)).stdout == b"1\n"
    await box.contexts.restart(box.id, context)
    assert (await box.service.exec(box.id, count)).stdout == b"0\n"


async def test_deleting_the_sandbox_ends_all(box: Box) -> None:
    context = await box.context()
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
    await box.service.delete(box.id)
    with pytest.raises(GoneError):
        async for _ in live:
            pass
    await eventually(lambda: not box.contexts._tasks, what="no task is left")
    assert not box.contexts._shelves


async def test_a_reset_leaves_no_context(box: Box) -> None:
    context = await box.context()
    live = await box.start("print('on', flush=True)\nimport time; time.sleep(60)", context)
    await until_printed(live, b"on")
    await box.service.reset(box.id)
    with pytest.raises(CapsuleError):
        async for _ in live:
            pass
    assert await box.contexts.list(box.id) == []
    assert (await box.run("2")).end.run == 1


async def test_no_descriptor_is_left_behind(folder: Path) -> None:
    async with serving(folder) as service:
        await Box.create(service)  # whatever the first one opens for good
        before = len(os.listdir("/proc/self/fd"))
        box = await Box.create(service)
        for _ in range(3):
            await box.run("1", await box.context())
        await service.delete(box.id)
        await eventually(
            lambda: len(os.listdir("/proc/self/fd")) <= before, what="no descriptor is left"
        )


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


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("language", ["python", "node"])
async def test_a_run_in_flight_when_the_server_stopped_is_lost(
    folder: Path, language: str, looked: bool
) -> None:
    code = {
        "python": "print('on', flush=True)\nimport time\nfor _ in range(600): time.sleep(0.1)\n",
        "node": "console.log('on'); await 1; while (true) {}",
    }[language]
    async with serving(folder, drain="keep", stop=0.05) as service:
        box = await Box.create(service, language)
        context = await box.context(language)
        await box.run("x = 9", context)
        live = await box.start(code, context)
        await until_printed(live, b"on")
    async with serving(folder) as service:
        box = Box(service, box.id)
        if looked:
            (info,) = await box.contexts.list(box.id)
            assert (info.state, info.lost_run) == ("running", 2)
            with pytest.raises(ConflictError, match="busy with run 2, which was begun before"):
                await box.run("x", context, timeout=0.2)
        assert await box.contexts.interrupt(box.id, context)
        after = await box.run("x", context)
        assert (texts(after), after.stdout) == (["9"], b"")
        assert await box.state(context) == "idle"


async def test_a_context_that_died_while_nobody_looked(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        box = await Box.create(service)
        context = await box.context()
        await box.run("import os, threading\nthreading.Timer(0.3, os._exit, (6,)).start()", context)
    async with serving(folder) as service:
        box = Box(service, box.id)

        async def ended() -> bool:
            return all(not each.running for each in await service.execs(box.id))

        await eventually(ended, what="the interpreter has ended")
        with pytest.raises(WrongStateError, match="exited with code 6"):
            await box.run("1", context)
        await box.contexts.restart(box.id, context)
        assert texts(await box.run("1", context)) == ["1"]


async def test_output_beyond_the_limit_is_cut_and_the_run_goes_on(box: Box) -> None:
    most = box.service.config.output_limit
    done = await box.run(f"import sys; sys.stdout.write('x' * {most + 5}); 3")
    assert (len(done.stdout), done.stdout_truncated) == (most, True)
    assert texts(done) == ["3"]


FLOOD = "import sys\nfor _ in range(40): sys.stdout.write('x' * 1_000_000)\n"


async def test_a_slow_reader_does_not_make_a_run_late(box: Box) -> None:
    """What it missed is counted, and the run ends as it did."""
    context = await box.context()
    due = time.monotonic() + 1.5
    live = await box.contexts.start(box.id, ContextRun(FLOOD, context, timeout=1.5))
    await eventually(lambda: time.monotonic() > due, what="its timeout is over")
    events = [event async for event in live]
    end = events[-1]
    assert isinstance(end, RunEnd)
    assert end.status in ("ok", "lost")
    read = sum(len(event.data) for event in events if isinstance(event, Text))
    assert read + end.lost_bytes >= 40_000_000
    assert texts(await box.run("1", context)) == ["1"]


async def test_who_never_reads_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsule.service.talk.STALL", 0.2)
    context = await box.context()
    live = await box.start(FLOOD, context)
    assert texts(await box.run("1", context)) == ["1"]
    with pytest.raises(UnavailableError, match="was not read for too long"):
        async for _ in live:
            pass


async def test_code_of_several_megabytes(box: Box) -> None:
    text = "x" * 4_000_000
    await box.run(f"y = '{text}'")
    assert texts(await box.run("len(y)")) == ["4000000"]


async def test_too_many_results_are_counted(box: Box) -> None:
    done = await box.run(f"for n in range({MAX_RESULTS + 10}): display(n)")
    assert (len(done.results), done.end.dropped) == (MAX_RESULTS, 10)


HOSTILE = """
import os
marker = display.__self__.wire.marker
def say(flag, data): os.write(1, marker + flag + b"%04x" % len(data) + data)
"""


@pytest.mark.parametrize(
    "lie",
    [
        "say(b'S', b'{')",
        "say(b'B', b'x' * 4000); [say(b'M', b'x' * 4000) for _ in range(3000)]",
        "say(b'S', b'{\"k\":\"result\",\"json\":' + b'[' * 4000)",
        "os.write(1, marker); os.write(1, marker + b'Sffff'); os.write(1, marker[:5])",
        "say(b'E', b'no beginning')",
        'say(b\'S\', b\'{"k":"end","run":99999,"status":"ok"}\')',
        'say(b\'S\', b\'{"k":"ready","failed":{"a":"b"}}\')',
    ],
)
async def test_a_kernel_that_lies_harms_itself_only(box: Box, lie: str) -> None:
    context = await box.context()
    await box.run(HOSTILE, context)
    await box.run(lie, context)
    assert texts(await box.run("6 * 7", context)) == ["42"]


async def test_a_false_end_ends_the_run_for_its_client_only(box: Box) -> None:
    """What it prints afterwards comes with the next run; the server is not confused."""
    context = await box.context()
    await box.run(HOSTILE, context)
    lie = 'say(b\'S\', b\'{"k":"end","run":2,"status":"ok"}\'); print(\'later\')'
    assert (await box.run(lie, context)).end.status == "ok"
    assert texts(await box.run("1", context)) == ["1"]


async def test_what_cannot_be_asked(box: Box) -> None:
    with pytest.raises(NotFoundError, match="has no language 'cobol'"):
        await box.run("1", language="cobol")
    with pytest.raises(NotFoundError, match="no such context: 'nope'"):
        await box.run("1", "nope")
    with pytest.raises(InvalidError, match="timeout"):
        await box.run("1", timeout=-1)
    with pytest.raises(InvalidError, match="NUL"):
        await box.run("a\0b")
    with pytest.raises(TooLargeError, match="limit 8388608"):
        await box.run("#" * (8 * 1024 * 1024 + 1))
    with pytest.raises(InvalidError, match=r"no_such_module.*ModuleNotFoundError"):
        await box.contexts.create(box.id, ContextCall(imports=["no_such_module"]))
    with pytest.raises(InvalidError, match="a shell has none"):
        await box.contexts.create(box.id, ContextCall("bash", imports=["x"]))
    with pytest.raises(NotFoundError):
        await box.contexts.create(box.id, ContextCall(cwd="/nowhere"))
    context = await box.context()
    with pytest.raises(InvalidError, match="speaks python"):
        await box.run("1", context, language="bash")
    assert [each.id for each in await box.contexts.list(box.id)] == ["default-python", context]


@pytest.mark.slow
async def test_a_sandbox_has_only_so_many(box: Box) -> None:
    for _ in range(MAX_CONTEXTS):
        await box.context("bash")
    with pytest.raises(CapacityError, match=f"limit {MAX_CONTEXTS}"):
        await box.context("bash")


@pytest.mark.parametrize(
    ("limit", "said"),
    [(31, "has 24 of 31 .* signal 6"), (27, "has 27 of 27 .* does not get ready")],
)
async def test_too_few_processes_for_another_interpreter_are_said(
    folder: Path, limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node has eleven threads and our guard. Without the last of its own it aborts, without the
    first it hangs."""
    monkeypatch.setattr(interpreters, "LOOK_AFTER", 0.5)
    async with serving(folder) as service:
        box = await Box.create(service, "node", processes=limit)
        first, second = await box.context(), await box.context()
        for context in (first, second) * 2:
            await box.run("1", context)  # the second one is read by the guard
        with pytest.raises(CapacityError, match=said) as error:
            await box.context()
        assert "limits.processes" in (error.value.hint or "")
        assert error.value.details["limit"] == limit
        assert [each.id for each in await box.contexts.list(box.id)] == [first, second]
        await box.contexts.delete(box.id, first)
        assert texts(await box.run("6 * 7", await box.context())) == ["42"]


async def test_javascript_without_room_for_its_guard(folder: Path) -> None:
    """It can be interrupted while it waits, at least."""
    async with serving(folder) as service:
        box = await Box.create(service, "node", processes=11)
        context = await box.context()
        assert texts(await box.run("6 * 7", context)) == ["42"]
        waits = await box.run("await new Promise(() => {})", context, timeout=0.2)
        assert (waits.end.status, waits.end.state) == ("timed_out", "idle")
        assert texts(await box.run("6 * 7", context)) == ["42"]


async def test_a_death_at_the_start_that_no_limit_explains(box: Box) -> None:
    await box.run("open('dies.py', 'w').write('import os; os.abort()')")
    with pytest.raises(InvalidError, match=r"cannot be used: .* killed by signal 6"):
        await box.contexts.create(box.id, ContextCall(imports=["dies"]))


async def test_a_language_without_a_kernel_says_which_have_one(folder: Path) -> None:
    async with serving(folder) as service:
        box = await Box.create(service, "bash")
        with pytest.raises(NotSupportedError, match="language sh of template bash has no live"):
            await box.run("1", language="sh")
