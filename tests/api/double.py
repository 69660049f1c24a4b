"""A service in memory, for what a real one does not do on demand: crash, be full, be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any, cast

from capsule.app import bind, build_app
from capsule.catalog import Catalog
from capsule.config import Config
from capsule.edge.drain import Gate
from capsule.edge.server import Server
from capsule.errors import NotFoundError
from capsule.model import (
    ExecId,
    Exit,
    Isolation,
    Limits,
    Reason,
    SandboxId,
    Started,
    State,
    Template,
)
from capsule.service import CreateRequest, ExecCall, ExecResult, Sandbox, Service
from capsule.service.caller import OPERATOR, Caller
from tests.support.folders import server_folder

NOW = datetime(2024, 1, 19, 10, 0, tzinfo=UTC)

Behave = Callable[[ExecCall], Any]


class TemplatesDouble:
    def __init__(self, templates: Mapping[str, Template]) -> None:
        self._catalog = Catalog.of(templates)

    async def fresh(self) -> Catalog:
        return self._catalog

    def origin(self, template: Template) -> str:
        return self._catalog.origin(template.name)


class NoKeys:
    """As of a server for which nobody has made any."""

    any = False

    def caller(self, token: str) -> None:
        return None


class ServiceDouble:
    """One sandbox at most; `behave` decides what an exec does: returns stdout, or raises."""

    catalog: Mapping[str, Template] = {"python": Template(name="python")}

    def __init__(self, behave: Behave | None = None) -> None:
        self.behave = behave or (lambda call: " ".join(call.cmd).encode())
        self.templates = TemplatesDouble(self.catalog)
        self.sandboxes: dict[str, Sandbox] = {}
        self.failure: Exception | None = None
        self.drained: list[float] = []
        self.keys = NoKeys()
        self.vault = None  # nobody asks this one for secrets

    def forget(self) -> None:
        self.sandboxes.clear()
        self.failure = None

    def ids(self) -> list[str]:
        return list(self.sandboxes)

    def own(self, caller: Caller, id: str) -> None:
        self.get(id)

    async def create(self, request: CreateRequest, caller: Caller = OPERATOR) -> Sandbox:
        if self.failure is not None:
            raise self.failure
        id = SandboxId(f"box{len(self.sandboxes)}")
        self.sandboxes[id] = Sandbox(
            id=id,
            template=request.template,
            provider="local",
            state=State.RUNNING,
            isolation=Isolation.NAMESPACES,
            started=Started.COLD,
            created_at=NOW,
            expires_at=NOW + timedelta(seconds=request.ttl or 600),
            ttl=request.ttl or 600,
            idle_timeout=0,
            limits=Limits(),
            metadata=request.metadata,
        )
        return self.sandboxes[id]

    def get(self, id: str) -> Sandbox:
        if id not in self.sandboxes:
            raise NotFoundError(f"no such sandbox: {id}")
        return self.sandboxes[id]

    async def exec(self, id: str, call: ExecCall) -> ExecResult:
        self.get(id)
        stdout = self.behave(call)
        if asyncio.iscoroutine(stdout):
            stdout = await stdout
        exit = Exit(Reason.EXITED, 0, duration_ms=45.2, stdout_bytes=len(stdout))
        return ExecResult(ExecId("e1"), exit, stdout, b"")

    async def terminal(self, id: str, **options: Any) -> Any:
        self.get(id)
        raise NotImplementedError

    def drain(self, within: float) -> None:
        self.drained.append(within)


class Running:
    """An app over a double, listening."""

    def __init__(self, port: int, service: ServiceDouble, server: Server) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.service = service
        self.server = server


@asynccontextmanager
async def serving(service: ServiceDouble | None = None, **settings: Any) -> AsyncIterator[Running]:
    service = service or ServiceDouble()
    gate = Gate()
    with ExitStack() as stack:
        base = stack.enter_context(server_folder("cd-", data=None))
        dirs = {"data_dir": base / "d", "run_dir": base / "r"}
        dirs["data_dir"].mkdir()
        # In a thread: what starts up may look at files, what serves may not.
        config = await asyncio.to_thread(Config, port=0, **{**dirs, **settings})
        app = await asyncio.to_thread(build_app, config, cast(Service, service), gate)
        server = Server(config, app, gate, on_drain=service.drain)
        listener = stack.enter_context(bind(config))
        listener.listen()
        port = listener.getsockname()[1]
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                yield Running(port, service, server)
            finally:
                server.should_exit = True


class Doubles:
    """Servers over doubles that tests borrow one after the other: one for each settings, all in a
    loop of one thread. To build one takes longer than most of these tests.
    """

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._thread: Thread | None = None

    def running(self, settings: dict[str, Any]) -> Running:
        name = repr(sorted(settings.items()))
        if name not in self._running:
            if self._thread is None:
                self._begin()
            found = Future[Running]()
            keeping = self._keep(settings, found)
            self._loop.call_soon_threadsafe(self._group.create_task, keeping)
            self._running[name] = found.result(20)
        return self._running[name]

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(20)

    def _begin(self) -> None:
        begun = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._main(begun)))
        self._thread.start()
        begun.wait(20)

    async def _main(self, begun: Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.TaskGroup() as self._group:
            begun.set()
            await self._over.wait()

    async def _keep(self, settings: dict[str, Any], found: Future[Running]) -> None:
        async with serving(**settings) as running:
            found.set_result(running)
            await self._over.wait()


DOUBLES = Doubles()


@asynccontextmanager
async def borrowed(**settings: Any) -> AsyncIterator[Running]:
    """As `serving`, for a moment: whoever comes next finds its service as new."""
    running = await asyncio.to_thread(DOUBLES.running, settings)
    try:
        yield running
    finally:
        running.service.forget()
