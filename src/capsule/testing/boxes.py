"""Conformance: how boxes come, survive, and go."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from capsule.errors import CapsuleError, ConflictError, NotFoundError, UnavailableError
from capsule.link import AgentLink
from capsule.link.conversation import GREETING
from capsule.link.protocol import FrameType, pack
from capsule.model import ExecId, Handle, Isolation, Stream
from capsule.providers.contract import ByteStream, Haltable, Provider
from capsule.testing.harness import (
    Launcher,
    Leftovers,
    NewProvider,
    Subject,
    drain,
    opened,
    owned,
    read_until,
    stored,
    until,
)


class TestLifecycle:
    async def test_the_host_says_what_it_can_do(self, provider: Provider) -> None:
        found = await provider.probe()
        assert found.provider == provider.name
        assert found.usable and found.isolation is not Isolation.NONE
        assert all(finding.fix for finding in found.findings if not finding.ok)

    async def test_the_host_can_be_asked_before_anything_is_opened(
        self, new_provider: NewProvider
    ) -> None:
        made = new_provider()
        try:
            assert (await made.probe()).provider == made.name
        finally:
            await made.aclose()
            await made.aclose()

    async def test_a_launched_box_has_an_agent_that_answers(self, launch: Launcher) -> None:
        subject = await launch()
        answer = await subject.link.ping()
        assert answer["id"] == subject.box.handle.sandbox_id
        assert answer["version"] == 1 and answer["execs_running"] == 0

    async def test_a_box_is_owned_until_it_is_destroyed(self, launch: Launcher) -> None:
        assert await owned(launch.provider) == []
        first, second = await launch(), await launch()
        ids = {handle.sandbox_id for handle in await owned(launch.provider)}
        assert ids == {first.box.handle.sandbox_id, second.box.handle.sandbox_id}
        await first.box.destroy()
        assert [h.sandbox_id for h in await owned(launch.provider)] == [
            second.box.handle.sandbox_id
        ]

    async def test_destroy_can_be_repeated_and_raced(self, launch: Launcher) -> None:
        box = (await launch()).box
        await asyncio.gather(*(box.destroy() for _ in range(3)))
        await box.destroy()
        assert await owned(launch.provider) == []

    async def test_a_halted_box_is_owned_until_it_is_destroyed(self, launch: Launcher) -> None:
        subject = await launch()
        if not isinstance(subject.box, Haltable):
            pytest.skip(f"with {launch.provider.name} to end a box is to remove it")
        async with await subject.start("sleep", "1000") as stream:
            await subject.box.halt()
            with pytest.raises(UnavailableError):
                await drain(stream)
        left = [handle.sandbox_id for handle in await owned(launch.provider)]
        assert left == [subject.box.handle.sandbox_id]
        await subject.box.destroy()
        assert await owned(launch.provider) == []

    async def test_a_destroyed_box_does_not_answer(self, subject: Subject) -> None:
        await subject.box.destroy()
        with pytest.raises(UnavailableError):
            await subject.link.ping()

    @pytest.mark.parametrize("by", ["destroy", "discard"])
    async def test_of_a_busy_box_nothing_is_left(
        self, launch: Launcher, leftovers: Leftovers, by: str
    ) -> None:
        subject = await launch()
        handle = subject.box.handle
        nowhere = Handle(handle.provider, launch.new_id(), {})
        await subject.sh("for i in 1 2 3; do setsid sleep 1000 & done; echo data > file")
        assert await asyncio.to_thread(leftovers, nowhere) == []
        async with await subject.start("sleep", "1000") as stream:
            await (subject.box.destroy() if by == "destroy" else launch.provider.discard(handle))
            with pytest.raises(UnavailableError):
                await drain(stream)

        async def all_gone() -> bool:
            return await asyncio.to_thread(leftovers, handle) == []

        assert await owned(launch.provider) == []
        await until(all_gone, what="nothing left of the box", within=5)

    async def test_an_id_is_taken_once(self, launch: Launcher) -> None:
        subject = await launch()
        with pytest.raises(ConflictError):
            await launch.provider.launch(subject.box.handle.sandbox_id, launch.spec())
        assert await subject.output("echo alive") == "alive"

    async def test_an_id_is_free_again_afterwards(self, launch: Launcher) -> None:
        subject = await launch()
        await subject.link.write("file", b"x")
        await subject.box.destroy()
        again = Subject(await launch.provider.launch(subject.box.handle.sandbox_id, launch.spec()))
        assert await again.entries() == {}

    async def test_a_missing_interpreter_is_not_found(self, launch: Launcher) -> None:
        launch.template = replace(launch.template, needs=("sh", "no-such-interpreter"))
        with pytest.raises(NotFoundError, match="no-such-interpreter"):
            await launch()
        assert await owned(launch.provider) == []

    async def test_boxes_launched_at_once_share_nothing(self, launch: Launcher) -> None:
        subjects = await asyncio.gather(*(launch() for _ in range(6)))
        for n, subject in enumerate(subjects):
            await subject.link.write("mine", b"%d" % n)
        for n, subject in enumerate(subjects):
            assert await subject.content("mine") == b"%d" % n
            assert list(await subject.entries()) == ["mine"]
        await asyncio.gather(*(subject.box.destroy() for subject in subjects))
        assert await owned(launch.provider) == []

    @pytest.mark.parametrize("part", [0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
    async def test_a_cancelled_launch_leaves_nothing(self, launch: Launcher, part: float) -> None:
        began = time.monotonic()
        usual = await launch()
        lasted = time.monotonic() - began
        await usual.box.destroy()
        task = asyncio.create_task(launch())
        await asyncio.sleep(part * lasted)  # a moment of the launch
        task.cancel()
        try:
            subject = await task
        except asyncio.CancelledError:
            assert await owned(launch.provider) == []
        else:
            assert await subject.output("echo quicker") == "quicker"


class TestAdoption:
    async def test_a_box_outlives_its_provider(
        self, launch: Launcher, new_provider: NewProvider
    ) -> None:
        before = await launch()
        await before.link.write("file", b"kept")
        script = "echo early; while [ ! -e go ]; do sleep 0.02; done; echo late; exit 3"
        stream = await before.start_sh(script, id=ExecId("running"))
        await read_until(stream, b"early")
        await stream.aclose()
        await launch.provider.aclose()

        async with opened(new_provider()) as successor:
            (handle,) = await owned(successor)
            assert handle.sandbox_id == before.box.handle.sandbox_id
            box = await successor.adopt(stored(handle))
            assert box is not None
            assert (box.handle, box.isolation) == (handle, before.box.isolation)
            assert list(box.unenforced) == list(before.box.unenforced)
            after = Subject(box)
            assert await after.content("file") == b"kept"
            async with await after.link.attach(ExecId("running")) as again:
                await after.link.write("go", b"")
                assert await drain(again) == {Stream.STDOUT: b"early\nlate\n"}
            assert again.exit is not None and again.exit.exit_code == 3
            await box.destroy()
            assert await owned(successor) == []

    async def test_a_stored_handle_is_enough(self, launch: Launcher) -> None:
        subject = await launch()
        box = await launch.provider.adopt(stored(subject.box.handle))
        assert box is not None
        assert await Subject(box).output("echo adopted") == "adopted"

    async def test_adopting_a_box_in_use_does_not_disturb_it(self, launch: Launcher) -> None:
        subject = await launch()
        async with await subject.start("cat", stdin=True) as stream:
            for _ in range(3):
                assert await launch.provider.adopt(subject.box.handle) is not None
            await stream.send(b"still here\n")
            await read_until(stream, b"still here")
        assert len(await owned(launch.provider)) == 1

    async def test_what_is_gone_is_not_adopted(self, launch: Launcher) -> None:
        subject = await launch()
        await subject.box.destroy()
        assert await launch.provider.adopt(subject.box.handle) is None

    async def test_what_never_was_is_not_adopted(self, launch: Launcher) -> None:
        handle = Handle(launch.provider.name, launch.new_id(), {})
        assert await launch.provider.adopt(handle) is None

    async def test_discard_ends_a_living_box(self, launch: Launcher) -> None:
        subject = await launch()
        handle = stored(subject.box.handle)
        for _ in range(2):
            await launch.provider.discard(handle)
        assert await owned(launch.provider) == []
        with pytest.raises(UnavailableError):
            await subject.link.ping()

    async def test_discarding_what_never_was_is_fine(self, launch: Launcher) -> None:
        await launch.provider.discard(Handle(launch.provider.name, launch.new_id(), {}))


NOISE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "ones": b"\xff" * 100,
    "zeros": b"\0" * 100,
    "half a greeting": GREETING[:7],
    "two greetings": GREETING + GREETING,
    "hello without json": pack(FrameType.HELLO, b"{"),
    "hello of version 0": pack(FrameType.HELLO, b'{"version":0}'),
    "hello with a list": pack(FrameType.HELLO, b"[]"),
    "request first": pack(FrameType.REQUEST, b'{"op":"ping"}'),
    "request without json": GREETING + pack(FrameType.REQUEST, b"not json"),
    "request with a list": GREETING + pack(FrameType.REQUEST, b"[1]"),
    "op of no name": GREETING + pack(FrameType.REQUEST, b'{"op":7}'),
    "unknown op": GREETING + pack(FrameType.REQUEST, b'{"op":"nosuch"}'),
    "too deep": GREETING + pack(FrameType.REQUEST, b"[" * 10_000),
    "exec of nothing": GREETING + pack(FrameType.REQUEST, b'{"op":"exec"}'),
    "exec of no strings": GREETING
    + pack(FrameType.REQUEST, b'{"op":"exec","id":"a","argv":"x","env":[1]}'),
    "exec of numbers": GREETING
    + pack(FrameType.REQUEST, b'{"op":"exec","id":"a","argv":[1,null]}'),
    "write of no frames": GREETING
    + pack(FrameType.REQUEST, b'{"op":"write","path":"x"}')
    + b"\xff" * 64,
    "read of nothing": GREETING + pack(FrameType.REQUEST, b'{"op":"read"}'),
    "attach to nothing": GREETING + pack(FrameType.REQUEST, b'{"op":"attach"}'),
    "dial to infinity": GREETING + pack(FrameType.REQUEST, b'{"op":"dial","port":1e99}'),
    "list of a number": GREETING + pack(FrameType.REQUEST, b'{"op":"list","path":7,"limit":-1}'),
    "a frame too large": GREETING + b"\x00\x10\x00\x01\x02" + bytes(11),
}


class TestConnections:
    """The agent outlasts its clients, however they behave."""

    async def test_a_new_connection_works_after_the_last_broke(self, subject: Subject) -> None:
        for _ in range(5):
            stream = await subject.box.connect()
            await stream.send(GREETING)
            await stream.aclose()
        assert await subject.output("echo alive") == "alive"

    @pytest.mark.parametrize("noise", list(NOISE.values()), ids=list(NOISE))
    async def test_noise_ends_one_connection_and_no_more(
        self, subject: Subject, noise: bytes
    ) -> None:
        async with await subject.start("cat", stdin=True) as bystander:
            stream = await subject.box.connect()
            await stream.send(noise)
            answered = await self.until_closed(stream)
            await stream.aclose()
            assert answered or len(noise) < 16, "an agent says why it hangs up"
            await bystander.send(b"still here\n")
            await read_until(bystander, b"still here")
        assert await subject.output("echo alive") == "alive"

    async def until_closed(self, stream: ByteStream) -> bytes:
        seen = b""
        try:
            async with asyncio.timeout(1):
                while chunk := await stream.receive():
                    seen += chunk
        except (TimeoutError, CapsuleError):
            pass
        return seen

    async def test_a_cancelled_receive_loses_no_byte(self, subject: Subject) -> None:
        stream = await subject.box.connect()
        await stream.send(GREETING)
        received = b""
        for timeout in (0.0, 0.001, 0.01, 1.0):
            try:
                async with asyncio.timeout(timeout):
                    received += await stream.receive(1)
            except TimeoutError:
                pass
        while len(received) < len(GREETING):
            received += await stream.receive(7)
        assert received == GREETING
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        for _ in range(2):
            await stream.aclose()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await stream.send(GREETING)

    async def test_idle_connections_do_not_keep_others_out(self, subject: Subject) -> None:
        idle = [await subject.box.connect() for _ in range(50)]
        assert await subject.output("echo alive") == "alive"
        for stream in idle:
            await stream.aclose()

    async def test_a_reader_that_does_not_read_holds_up_nobody(self, subject: Subject) -> None:
        async with await subject.start("yes", output_limit=64 * 1024 * 1024) as lazy:
            await until(lambda: self.flooded(subject, lazy.exec_id), what="a flood of output")
            async with asyncio.timeout(5):
                assert await subject.output("echo alive") == "alive"
            await subject.link.kill(lazy.exec_id)

    async def flooded(self, subject: Subject, exec_id: ExecId) -> bool:
        listed = {info.id: info for info in await subject.link.execs()}
        return listed[exec_id].stdout_bytes > 8 * 1024 * 1024

    async def test_many_clients_at_once(self, subject: Subject) -> None:
        link = AgentLink(subject.box.connect)
        answers = await asyncio.gather(*(link.ping() for _ in range(100)))
        assert len({answer["id"] for answer in answers}) == 1
