"""A provider whose boxes live in memory, with an agent that speaks the real protocol.

Its programs are Python functions. Boxes belong to a `World`, not to a provider: a second service
over the same world is what a restarted server finds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from capsule.config import Config
from capsule.errors import UnavailableError
from capsule.link.protocol import Channel, Decoder, Frame, FrameType, dump, load, pack
from capsule.model import Handle, Isolation, Language, SandboxId, SandboxSpec, Template, Unenforced
from capsule.providers.contract import Box, ByteStream, Capabilities, Provider
from capsule.service import Service
from capsule.service.clock import Clock
from capsule.service.store import Store

PYTHON = Template(
    "python",
    languages={"python": Language("python", ".capsule-{id}.py", ("python3", "{file}"), "python")},
    default_language="python",
)


class TurnedClock:
    """Stands still until a test turns it. The wall clock can also be set."""

    def __init__(self) -> None:
        self.wall = 1_800_000_000.0
        self.mono = 5_000.0
        self.boot = "boot-1"

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono

    def boot_id(self) -> str:
        return self.boot

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds

    def set_wall(self, by: float) -> None:
        self.wall += by

    def reboot(self) -> None:
        self.boot += "+"
        self.mono = 10.0


@dataclass(eq=False)
class FakeExec:
    id: str
    argv: list[str]
    request: dict[str, Any]
    output: bytes = b""
    exit: dict[str, Any] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, code: int = 0, reason: str = "exited") -> None:
        self.exit = {
            "reason": reason, "exit_code": code, "signal": 0,
            "duration_ms": 1.0, "cpu_ms": 1.0, "max_rss_bytes": 1,
            "stdout_bytes": len(self.output), "stderr_bytes": 0,
            "stdout_truncated": False, "stderr_truncated": False,
        }  # fmt: skip
        self.ended.set()


Begin = Callable[[FakeExec], None]


def _true(run: FakeExec) -> None:
    run.end()


def _echo(run: FakeExec) -> None:
    run.output = " ".join(run.argv[1:]).encode() + b"\n"
    run.end()


def _fail(run: FakeExec) -> None:
    run.end(3)


def _wait(run: FakeExec) -> None:
    """Runs until it is killed."""


class FakeAgent:
    def __init__(self, id: SandboxId) -> None:
        self.id = id
        self.alive = True
        self.paused = False
        self.mute = False  # accepts, and says nothing
        self.execs: dict[str, FakeExec] = {}
        self.runs: Counter[tuple[str, ...]] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.forgotten: set[str] = set()  # their output was dropped
        self.programs: dict[str, Begin] = {
            "true": _true, "echo": _echo, "false": _fail, "wait": _wait, "python3": _true,
        }  # fmt: skip

    async def serve(self, request: dict[str, Any], say: Say) -> None:
        self.requests.append(request)
        match request["op"]:
            case "ping":
                await say(FrameType.REPLY, {"id": self.id, "version": 1, "execs_running": 0})
            case "exec":
                await self._exec(request, say)
            case "attach":
                await self._attach(request, say)
            case "execs":
                await say(FrameType.REPLY, {"execs": [_info(x) for x in self.execs.values()]})
            case "kill":
                run = self.execs[request["id"]]
                running = run.exit is None
                if running:
                    run.end(137, "cancelled")
                await say(FrameType.REPLY, {"running": running})
            case op:
                await error(say, "unsupported", f"the double cannot {op}")

    async def _exec(self, request: dict[str, Any], say: Say) -> None:
        if request["id"] in self.execs:
            return await error(say, "conflict", "the id is taken")
        begin = self.programs.get(request["argv"][0])
        if begin is None:
            return await error(say, "not_found", "no such program", stage="exec")
        if request["cwd"].startswith("/missing"):
            return await error(say, "not_found", "no such directory", stage="chdir")
        run = self.execs[request["id"]] = FakeExec(request["id"], request["argv"], request)
        self.runs[tuple(request["argv"])] += 1
        begin(run)
        await self._follow(run, say)

    async def _attach(self, request: dict[str, Any], say: Say) -> None:
        run = self.execs.get(request["id"])
        if run is None:
            return await error(say, "not_found", "no such exec")
        if run.id in self.forgotten:
            return await error(say, "gone", "its output was dropped")
        await self._follow(run, say)

    async def _follow(self, run: FakeExec, say: Say) -> None:
        await say(FrameType.REPLY, {"id": run.id, "pid": 7, "tty": False})
        await run.ended.wait()
        if run.output:
            await say(FrameType.DATA, run.output, stream=Channel.STDOUT)
        await say(FrameType.EXIT, run.exit)


Say = Callable[..., Awaitable[None]]


async def error(say: Say, code: str, message: str, stage: str = "") -> None:
    await say(FrameType.ERROR, {"code": code, "message": message, "stage": stage, "errno": 0})


def _info(run: FakeExec) -> dict[str, Any]:
    return {
        "id": run.id, "pid": 7, "argv": run.argv, "tty": bool(run.request.get("tty")),
        "running": run.exit is None, "started_ms_ago": 1.0, "exit": run.exit,
        "stdout_bytes": len(run.output), "stderr_bytes": 0,
    }  # fmt: skip


class FakeConnection:
    """Both ends of one connection; what the agent does runs as a task of it."""

    def __init__(self, agent: FakeAgent, open: set[FakeConnection]) -> None:
        self._agent = agent
        self._decoder = Decoder()
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._open = open
        open.add(self)

    async def send(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if frame.type is FrameType.REQUEST and not self._agent.mute:
                self._task = asyncio.create_task(self._serve(frame))

    async def _serve(self, frame: Frame) -> None:
        await self._say(FrameType.HELLO, {"version": 1})
        await self._agent.serve(load(frame.payload), self._say)
        self.break_off()

    async def _say(self, type: FrameType, body: Any = None, stream: int = 0) -> None:
        payload = body if isinstance(body, bytes) else dump(body)
        self._out.put_nowait(pack(type, payload, stream=stream))

    def break_off(self) -> None:
        self._out.put_nowait(b"")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._out.get()

    async def aclose(self) -> None:
        self._open.discard(self)
        if self._task is not None and not self._task.done():
            self._task.cancel()


class World:
    """The machine: its boxes outlive providers and services."""

    def __init__(self) -> None:
        self.agents: dict[SandboxId, FakeAgent] = {}
        self.connections: dict[SandboxId, set[FakeConnection]] = {}
        self.launched = 0

    def add(self, id: str) -> FakeAgent:
        """A box without a record."""
        agent = self.agents[SandboxId(id)] = FakeAgent(SandboxId(id))
        self.connections[SandboxId(id)] = set()
        return agent

    def kill(self, id: str) -> None:
        """The box dies, and the service does not know. Its remains are still there."""
        self.agents[SandboxId(id)].alive = False
        for connection in list(self.connections[SandboxId(id)]):
            connection.break_off()

    def remove(self, id: SandboxId) -> None:
        if id in self.agents:
            self.kill(id)
            del self.agents[id]


class FakeBox(Box):
    def __init__(self, provider: FakeProvider, id: SandboxId) -> None:
        self.handle = Handle("fake", id, {"n": provider.world.launched})
        self.isolation = Isolation.NAMESPACES
        self.unenforced = (Unenforced("disk", "it is in memory", "buy one"),)
        self._provider = provider
        self._id = id

    async def connect(self) -> ByteStream:
        agent = self._provider.world.agents.get(self._id)
        if agent is None or not agent.alive:
            raise UnavailableError("no agent listens")
        return FakeConnection(agent, self._provider.world.connections[self._id])

    async def destroy(self) -> None:
        await self._provider.before_destroy(self._id)
        self._provider.world.remove(self._id)


async def turns() -> None:
    """Let every task go on that does not wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)


class Gate:
    """Holds calls of a provider, or those for one box, until it is opened."""

    def __init__(self, only: SandboxId | None = None) -> None:
        self.came: list[SandboxId] = []
        self._reached, self._open = asyncio.Event(), asyncio.Event()
        self._only = only

    async def __call__(self, id: SandboxId) -> None:
        if self._only in (None, id):
            self.came.append(id)
            self._reached.set()
            await self._open.wait()

    async def reached(self) -> None:
        await self._reached.wait()

    def open(self) -> None:
        self._open.set()


async def nothing(*_: object) -> None:
    pass


class HaltableBox(FakeBox):
    async def halt(self) -> None:
        await self._provider.before_halt(self._id)
        self._provider.world.agents[self._id].alive = False


class PausableBox(FakeBox):
    async def pause(self) -> None:
        await self._provider.before_pause(self._id)
        self._provider.world.agents[self._id].paused = True

    async def resume(self) -> None:
        await (await self.connect()).aclose()  # fails if no agent listens
        self._provider.world.agents[self._id].paused = False


class FakeProvider(Provider):
    """`before_…` are where a test makes it slow, or fail."""

    name: ClassVar[str] = "fake"

    def __init__(self, world: World, isolation: Isolation = Isolation.NAMESPACES) -> None:
        self.world = world
        self.isolation = isolation
        self.before_launch: Callable[[SandboxId], Awaitable[None]] = nothing
        self.after_launch: Callable[[SandboxId], Awaitable[None]] = nothing
        self.before_destroy: Callable[[SandboxId], Awaitable[None]] = nothing
        self.before_halt: Callable[[SandboxId], Awaitable[None]] = nothing
        self.before_pause: Callable[[SandboxId], Awaitable[None]] = nothing
        self.features: frozenset[str] = frozenset()
        self.before_adopt: Callable[[SandboxId], Awaitable[None]] = nothing
        self.box: type[FakeBox] = FakeBox
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def aclose(self) -> None:
        self.is_open = False

    async def probe(self) -> Capabilities:
        return Capabilities("fake", usable=True, isolation=self.isolation, features=self.features)

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        await self.before_launch(sandbox_id)
        self.world.launched += 1
        self.world.add(sandbox_id)
        try:
            await self.after_launch(sandbox_id)
        except BaseException:
            self.world.remove(sandbox_id)
            raise
        return self.box(self, sandbox_id)

    async def adopt(self, handle: Handle) -> Box | None:
        await self.before_adopt(handle.sandbox_id)
        agent = self.world.agents.get(handle.sandbox_id)
        return self.box(self, handle.sandbox_id) if agent is not None and agent.alive else None

    async def owned(self) -> AsyncIterator[Handle]:
        for id in list(self.world.agents):
            yield Handle("fake", id)

    async def discard(self, handle: Handle) -> None:
        await self.before_destroy(handle.sandbox_id)
        self.world.remove(handle.sandbox_id)


@dataclass
class Bench:
    """A service over a world, and what a test turns."""

    service: Service
    provider: FakeProvider
    world: World
    clock: TurnedClock


@asynccontextmanager
async def bench(
    folder: Path,
    *,
    world: World | None = None,
    clock: TurnedClock | None = None,
    provider: FakeProvider | None = None,
    store: Store | None = None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    world = world or World()
    clock = clock or TurnedClock()
    provider = provider or FakeProvider(world)
    keeps_time: Clock = clock
    config = Config(
        data_dir=folder / "d", run_dir=Path("/proc/self/cwd"), provider="fake", **settings
    )
    # There are no sockets here, so the length of the path does not matter.
    object.__setattr__(config, "run_dir", folder / "r")
    service = Service(config, {"fake": provider}, {"python": PYTHON}, keeps_time, store)
    async with service:
        yield Bench(service, provider, world, clock)
