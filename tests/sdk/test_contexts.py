"""Contexts through the client."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from capsule_sdk import (
    AsyncCapsule,
    Capsule,
    InvalidError,
    NotFoundError,
    Printed,
    RunEnd,
    RunError,
    RunFailedError,
    WrongStateError,
)
from tests.support import eventually, wait_for

pytestmark = pytest.mark.real


def test_contexts_keep_their_names(capsule: Capsule) -> None:
    with capsule.context() as ctx:
        ctx.run("x = 1")
        assert ctx.run("x + 1").text == "2"
        assert ctx.run("x = 5").text is None
        assert (ctx.language, ctx.info.state) == ("python", "idle")
    assert capsule.contexts() == []
    with pytest.raises(NotFoundError):
        ctx.run("x")
    ctx.delete()  # once more is no error
    capsule.run_code("def f(n): return n * 2")
    assert capsule.run_code("f(21)").text == "42"
    assert capsule.run_code("echo $((6 * 7)); false", language="bash").exit_code == 1
    assert [each.id for each in capsule.contexts()] == ["default-python", "default-bash"]


def test_a_timeout_a_death_and_a_restart(capsule: Capsule) -> None:
    with capsule.context("python", cwd="/tmp", env={"A": "b"}, imports=("json",)) as ctx:
        assert ctx.run("while True: pass", timeout=0.3).status == "timed_out"
        assert ctx.run("import os; os.getcwd(), os.environ['A']").text == "('/tmp', 'b')"
        dead = ctx.run("os._exit(7)")
        assert (dead.status, dead.state) == ("died", "dead")
        with pytest.raises(WrongStateError, match="is dead: its interpreter exited with code 7"):
            ctx.run("1")
        assert (ctx.refresh().state, ctx.restart().state) == ("dead", "idle")
        events = list(ctx.stream("print('out')\n1 / 0"))
        assert "".join(each.text for each in events if isinstance(each, Printed)) == "out\n"
        assert isinstance(events[-2], RunError)
        assert isinstance(events[-1], RunEnd) and events[-1].status == "error"


def test_forms_of_a_result(capsule: Capsule) -> None:
    code = """
class Rich:
    def __repr__(self): return "rich"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_json_(self): return [1, None]
    def _repr_html_(self): raise ValueError("no")
Rich()
"""
    done = capsule.run_code(code)
    assert done.main is not None
    assert (done.main.png, done.main.json) == (b"\x89PNG", [1, None])
    assert done.main.errors == {"html": "ValueError: no"}
    assert done.main.forms == ("text", "png", "json")


def test_an_exception_is_data_until_it_is_checked(capsule: Capsule) -> None:
    done = capsule.run_code("print('before')\n{}['key']")
    assert (done.status, done.ok, done.stdout) == ("error", False, "before\n")
    assert done.error is not None
    assert (done.error.name, done.error.value) == ("KeyError", "'key'")
    assert "line 2" in done.error.traceback
    with pytest.raises(RunFailedError, match="the code failed: KeyError: 'key'") as caught:
        done.check()
    assert pickle.loads(pickle.dumps(caught.value)).result == done
    assert capsule.run_code("1").check().text == "1"


def test_callbacks_get_output_and_results(capsule: Capsule) -> None:
    got: list[object] = []
    done = capsule.run_code(
        "import sys\nprint('a')\ndisplay('b')\nsys.stderr.write('c')\n4",
        on_stdout=got.append,
        on_stderr=got.append,
        on_result=lambda result: got.append((result.text, result.is_main)),
    )
    assert "".join(each for each in got if isinstance(each, str)).replace("c", "") == "a\n"
    assert [each for each in got if isinstance(each, tuple)] == [("'b'", False), ("4", True)]
    assert (done.stdout, done.stderr, done.text, done.status) == ("a\n", "c", "4", "ok")


def test_interrupt_from_another_thread(capsule: Capsule) -> None:
    with capsule.context() as ctx:
        assert not ctx.interrupt()
        ended: list[str] = []
        thread = threading.Thread(
            target=lambda: ended.append(ctx.run("import time; time.sleep(30)").status)
        )
        thread.start()
        wait_for(ctx.interrupt, what="there is a run to interrupt")
        thread.join(10)
        assert ended == ["interrupted"]


def test_arguments_are_named_as_they_were_given(capsule: Capsule) -> None:
    with pytest.raises(InvalidError, match=r"^timeout=-1"):
        capsule.run_code("1", timeout=-1)
    with pytest.raises(InvalidError, match=r"^code=5"):
        capsule.run_code(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"^imports=\['nope'\]"):
        capsule.context(imports=["nope"])
    with pytest.raises(NotFoundError, match="has no language 'cobol'"):
        capsule.run_code("1", language="cobol", on_stdout=print)


async def test_the_async_one_does_the_same(async_capsule: AsyncCapsule) -> None:
    async with await async_capsule.context() as ctx:
        await ctx.run("x = 20")
        assert (await ctx.run("x + 1")).text == "21"
        events = [event async for event in ctx.stream("print('hi')\nx")]
        assert isinstance(events[-1], RunEnd)
        running = asyncio.create_task(ctx.run("import time; time.sleep(30)"))
        await eventually(ctx.interrupt, what="there is a run to interrupt")
        assert (await running).status == "interrupted"
        assert [each.id for each in await async_capsule.contexts()] == [ctx.id]
    assert await async_capsule.contexts() == []
    assert (await async_capsule.run_code("1 + 1", on_result=lambda _: None)).text == "2"
