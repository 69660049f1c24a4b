"""A connection to a kernel, and a run over it: from the request to both of its end marks.

A run's timeout interrupts it, as a person would. What swallows that is insisted on, and what goes
on after GRACE is killed, and with it the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from capsule.link.exec_stream import ExecStream, Gap
from capsule.model import Exit, Reason, Stream
from capsule.service import kernel_wire as wire
from capsule.service.kernel_wire import (
    Dropped,
    Ended,
    Hit,
    Raised,
    Said,
    Shown,
    Splitter,
    Synced,
)
from capsule.service.live_run import LiveRun, Tally, Text

GRACE = 3.0
INSIST = 2.0  # after the first; so long it may clean up undisturbed
STALL = 90.0  # how long a run's output may wait for whoever follows it, all in all
PATIENCE = 3  # interrupts, each wire.PRESS seconds after the one before
_SETTLE = 1.0  # how long one stream's end mark may come after the other's

Heard = tuple[Stream, Said]


class Talk:
    def __init__(self, stream: ExecStream, kernel: str, nonce: str) -> None:
        self.stream = stream
        self.kernel = kernel
        self.lost_bytes = 0
        self.gaps = 0
        self.hit = 0  # the run that an interrupt has reached
        self._presses = 0
        self._splitters = {each: Splitter(nonce) for each in (Stream.STDOUT, Stream.STDERR)}

    async def hear(self) -> Iterable[Heard] | None:
        """What comes next. None: the interpreter has ended, see `stream.exit`.

        Raises UnavailableError. Safe to cancel.
        """
        try:
            item = await self.stream.__anext__()
        except StopAsyncIteration:
            return None
        splitter = self._splitters[item.stream]
        if isinstance(item, Gap):
            self.lost_bytes += item.end - item.start
            self.gaps += item.stream is Stream.STDOUT
            said = splitter.gap()
        else:
            said = splitter.feed(item.data)
        return [(item.stream, each) for each in said]

    def again(self) -> None:
        """What it was told before was not enough: code may swallow an interrupt."""
        self.hit = self._presses = 0

    async def press(self, run: int) -> None:
        """Interrupt the run that is under way, as Ctrl-C in a terminal would. If that is not heard
        the interpreter may be waiting for a program in a process group of its own."""
        self._presses += 1
        if self._presses > PATIENCE:
            await self.stream.signal(wire.signal_for_all(self.kernel), tree=True)
        if word := wire.interrupt(self.kernel, run):
            await self.stream.send(word)
        else:
            await self.stream.signal("INT")

    async def insist(self) -> None:
        """It was interrupted, and goes on."""
        if signal := wire.insist(self.kernel):
            await self.stream.signal(signal)

    def rest(self) -> Iterable[Heard]:
        """What was held back, as it might have become a message."""
        for stream, splitter in self._splitters.items():
            for said in splitter.finish():
                yield stream, said

    async def ready(self) -> wire.Ready | None:
        """The kernel's first word. None: it ended before, or says something else."""
        while (heard := await self.hear()) is not None:
            for _, said in heard:
                if isinstance(said, wire.Ready):
                    return said
        return None

    async def synced(self, number: int) -> bool:
        """Wait until everything before `number` is over. False: the interpreter is."""
        missing = {Stream.STDOUT, Stream.STDERR}
        while missing:
            heard = await self.hear()
            if heard is None:
                return False
            for stream, said in heard:
                if isinstance(said, Synced) and said.run == number:
                    missing.discard(stream)
        self.lost_bytes = self.gaps = 0
        return True


@dataclass(slots=True)
class Outcome:
    """What the kernel, or the clock, says of a run."""

    status: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    killed: bool = False
    insisted: bool = False
    kill_at: float = 0.0  # on the loop's clock
    exit: Exit | None = None  # of the interpreter, which has ended


class Conversation:
    """One run over a talk. Its events go to `live`."""

    def __init__(
        self,
        talk: Talk,
        live: LiveRun,
        *,
        timeout: float,
        kill: Callable[[], Awaitable[object]],
    ) -> None:
        self.tally = Tally()
        self._talk = talk
        self._live = live
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout
        self._outcome = Outcome()
        self._missing = {Stream.STDOUT, Stream.STDERR}
        self._gaps = 0
        self._stall = STALL

    async def hold(self, code: str, env: Mapping[str, str] | None = None) -> Outcome:
        """Raises UnavailableError."""
        talk, outcome = self._talk, self._outcome
        talk.lost_bytes = self._gaps = talk.gaps = 0
        request = wire.run(talk.kernel, self._live.run, code, env)
        sending = asyncio.ensure_future(talk.stream.send(request))  # it may be large
        try:
            while self._missing:
                if self._live.behind:
                    await self._wait_for_follower()
                heard = await self._hear()
                if heard is None:
                    outcome.exit = talk.stream.exit
                    self._take(talk.rest())
                    return outcome
                self._take(heard)
                await self._ask_after_gap()
        finally:
            await _settled(sending)
        self._take(talk.rest())
        return outcome

    async def _wait_for_follower(self) -> None:
        """What it takes to read a run's output is not the run's time."""
        began = self._loop.time()
        await self._live.room(max(self._stall, 0.0))
        waited = self._loop.time() - began
        self._stall -= waited
        self._deadline += waited

    async def _hear(self) -> Iterable[Heard] | None:
        """What comes next; nothing when a deadline passes."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._talk.hear()
        except TimeoutError:
            await self._overdue()
            return ()

    async def _overdue(self) -> None:
        outcome = self._outcome
        if outcome.status:
            self._missing.clear()  # it said that it is over; a stream's mark was lost
        elif not outcome.timed_out:
            outcome.timed_out, outcome.kill_at = True, self._loop.time() + GRACE
            self._talk.again()
            await self._press()
        elif self._loop.time() < outcome.kill_at:
            await self._press()
        elif not outcome.killed:
            outcome.killed = True
            self._deadline = self._loop.time() + 3600.0  # the agent says when it is over
            await self._kill()

    async def _press(self) -> None:
        """Interrupt it until that has reached it; insist, if it goes on for INSIST."""
        outcome, now = self._outcome, self._loop.time()
        insist_at = outcome.kill_at - GRACE + INSIST
        if now >= insist_at and not outcome.insisted:
            outcome.insisted = True
            await self._talk.insist()
        self._deadline = outcome.kill_at if outcome.insisted else insist_at
        if self._talk.hit != self._live.run:
            await self._talk.press(self._live.run)
            self._deadline = min(self._deadline, now + wire.PRESS)

    def _take(self, heard: Iterable[Heard]) -> None:
        for stream, said in heard:
            match said:
                case bytes():
                    self._live.put(Text(stream, said), len(said))
                case Shown():
                    if (size := self.tally.admits(said)) is not None:
                        self._live.put(said, size)
                case Raised():
                    self._live.put(said)
                case Hit():
                    self._talk.hit = said.run
                case Dropped():
                    self.tally.dropped += 1
                case Ended(run=self._live.run):
                    self._ended(stream, said)
                case Synced(run=self._live.run) if stream is Stream.STDOUT:
                    self._ended(stream, Ended(said.run, "lost"))

    def _ended(self, stream: Stream, end: Ended) -> None:
        self._missing.discard(stream)
        if stream is Stream.STDOUT and not self._outcome.status:
            known = end.status in ("ok", "error", "interrupted", "lost")
            self._outcome.status = end.status if known else "ok"
            self._outcome.exit_code = end.code
        self._deadline = min(self._deadline, self._loop.time() + _SETTLE)

    async def _ask_after_gap(self) -> None:
        """Its end may have been in what was lost; the answer to this comes after it."""
        if self._talk.gaps > self._gaps and not self._gaps:
            self._gaps = self._talk.gaps
            await self._talk.stream.send(wire.sync(self._talk.kernel, self._live.run))


async def _settled(sending: asyncio.Future[None]) -> None:
    """A kernel that has ended a run has read its request; to give up on sending is to hang up."""
    if not sending.done():
        await asyncio.wait({sending}, timeout=_SETTLE)
    if not sending.done():
        sending.cancel()
        await asyncio.wait({sending})
    if not sending.cancelled():
        sending.exception()  # whoever reads has learned of it too


def describe(exit: Exit | None) -> str:
    """Why an interpreter is over."""
    if exit is None:
        return "its interpreter is gone"
    match exit.reason:
        case Reason.OOM_KILLED:
            return "its interpreter was killed: out of memory (oom_killed)"
        case Reason.SIGNALED:
            return f"its interpreter was killed by signal {exit.signal}"
        case Reason.EXITED:
            return f"its interpreter exited with code {exit.exit_code}"
        case _:
            return f"its interpreter was killed ({exit.reason})"


def why(outcome: Outcome, timeout: float) -> str:
    if outcome.killed:
        return f"a run did not stop {GRACE:g} s after its timeout of {timeout:g} s, and was killed"
    return describe(outcome.exit)
