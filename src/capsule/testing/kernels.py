"""Conformance: an interpreter lives on behind an exec, and what it says comes whole."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from capsule.model import MIB, ExecId, ExecRequest
from capsule.service import kernel_wire as wire
from capsule.service.kernels import Start
from capsule.service.live_run import LiveRun, RunEnd, RunResult, collect
from capsule.service.room import Room
from capsule.service.talk import Conversation, Outcome, Talk
from capsule.testing.harness import ENV, Subject

STARTS = {
    "python": Start("python", "python", "python.py", ("python3", "-u", "-c")),
    "bash": Start("bash", "bash", "bash.sh", ("bash", "-c")),
}
SLEEP = {
    "python": "print('on', flush=True)\nimport time; time.sleep(60)",
    "bash": "echo on; sleep 60",
}
STATE = {"python": ("x = 20", "print(x + 1)"), "bash": ("x=20", "echo $((x + 1))")}

# A child that floods the pipe which the kernel writes to, in pieces that no pipe keeps whole.
AMONG_OUTPUT = """
import subprocess
child = subprocess.Popen(["sh", "-c", "head -c 4000000 /dev/zero | tr '\\\\0' x"])
for n in range(20): display("y" * 50_000)
child.wait();
"""


class Done(NamedTuple):
    outcome: Outcome
    result: RunResult


class Interpreter:
    """A kernel in the box under test, and one run after the other in it."""

    def __init__(self, subject: Subject, kernel: str) -> None:
        self.id = ExecId("x" + secrets.token_hex(8))
        self._link = subject.link
        self._kernel = kernel
        self._nonce = secrets.token_hex(8)
        self._number = 0
        self.talk: Talk

    async def start(self) -> None:
        request = ExecRequest(
            argv=await STARTS[self._kernel].argv(),
            id=self.id,
            env=ENV,
            timeout=0.0,
            stdin=True,
            output_limit=16 * MIB,
            keep="tail",
        )
        self.talk = Talk(await self._link.exec(request), self._kernel, self._nonce)
        await self.talk.stream.send(wire.hello(self._kernel, self._nonce, ()))
        assert await self.talk.ready() is not None

    async def attach_again(self) -> None:
        await self.talk.stream.aclose()
        (known,) = [each for each in await self._link.execs() if each.id == self.id]
        stream = await self._link.attach(
            self.id, stdout=known.stdout_bytes, stderr=known.stderr_bytes, input=True
        )
        self.talk = Talk(stream, self._kernel, self._nonce)
        self._number += 1
        await stream.send(wire.sync(self._kernel, self._number))
        assert await self.talk.synced(self._number)

    async def run(self, code: str, *, timeout: float = 15.0) -> Done:
        self._number += 1
        live = LiveRun("c", self._number)
        talking = Conversation(self.talk, live, timeout=timeout, kill=self.end)

        async def hold() -> Outcome:
            outcome = await talking.hold(code)
            live.put(RunEnd(self._number, "c", outcome.status, "idle"))
            return outcome

        room = Room(64 * MIB)
        return Done(*await asyncio.gather(hold(), collect(live, room, 16 * MIB)))

    async def end(self) -> None:
        await self._link.kill(self.id)


@asynccontextmanager
async def started(subject: Subject, kernel: str) -> AsyncIterator[Interpreter]:
    interpreter = Interpreter(subject, kernel)
    await interpreter.start()
    try:
        yield interpreter
    finally:
        await interpreter.end()
        await interpreter.talk.stream.aclose()


class TestKernel:
    @pytest.mark.parametrize("kernel", ["python", "bash"])
    async def test_what_a_run_leaves_is_there_for_the_next(
        self, subject: Subject, kernel: str
    ) -> None:
        first, second = STATE[kernel]
        async with started(subject, kernel) as interpreter:
            await interpreter.run(first)
            done = await interpreter.run(second)
        assert (done.result.stdout, done.outcome.status) == (b"21\n", "ok")

    @pytest.mark.parametrize("kernel", ["python", "bash"])
    async def test_a_timeout_interrupts_and_the_interpreter_lives_on(
        self, subject: Subject, kernel: str
    ) -> None:
        first, second = STATE[kernel]
        async with started(subject, kernel) as interpreter:
            await interpreter.run(first)
            slow = await interpreter.run(SLEEP[kernel], timeout=0.5)
            done = await interpreter.run(second)
        assert (slow.outcome.status, slow.outcome.timed_out) == ("interrupted", True)
        assert (slow.result.stdout, done.result.stdout) == (b"on\n", b"21\n")

    async def test_messages_stay_whole_among_the_output_of_children(self, subject: Subject) -> None:
        async with started(subject, "python") as interpreter:
            done = await interpreter.run(AMONG_OUTPUT)
        assert [len(str(each.text)) for each in done.result.results] == [50_002] * 20
        assert done.result.stdout == b"x" * 4_000_000

    async def test_it_is_found_again_by_another_connection(self, subject: Subject) -> None:
        async with started(subject, "python") as interpreter:
            await interpreter.run("x = 20\nprint('before')")
            await interpreter.attach_again()
            done = await interpreter.run("print(x + 1)")
        assert done.result.stdout == b"21\n"
