"""Watching folders: as a stream (`WatchDir`), or asked for again and again (`CreateWatcher` and so
on), for clients that can only ask.

Each watcher of the second kind is a task of `Watchers`, which keeps what happened until somebody
asks. It ends when it is removed, when nobody has asked for an hour, with its sandbox, or with the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request

from capsule.edge.e2b.connect import RpcError, envelope
from capsule.edge.e2b.entries import DETAIL, entry
from capsule.edge.e2b.guests import Guest, running
from capsule.edge.e2b.rpc import Call, Opened, streaming, unary
from capsule.errors import CapacityError, CapsuleError
from capsule.link.watch import Change, Watch
from capsule.service import Service
from capsule.service.files import Files
from capsule.service.tasks import Tasks

PATH = "/filesystem.Filesystem/"
PING: dict[str, Any] = {"keepalive": {}}
MOST = 16  # watchers of a sandbox: a kernel has 128 for all that one user has started
TOGETHER = 24  # with streams: the agent lets 32 be in a sandbox, and programs want some
KEPT = 10_000  # events of a watcher; the oldest go first
KEPT_BYTES = 1024 * 1024  # of their names, about
UNASKED = 3600.0  # seconds after which a watcher is taken for forgotten
FULL = "stop a watcher, or end a program that watches files"
_PATIENCE = 10.0  # seconds for the agent to tell all that has happened

_TYPES = {
    "create": "EVENT_TYPE_CREATE",
    "write": "EVENT_TYPE_WRITE",
    "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME",
    "chmod": "EVENT_TYPE_CHMOD",
}
_TOLD = ("EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_CHMOD")  # it is still there then


class WatchDir(msgspec.Struct, rename="camel"):
    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class Watcher(msgspec.Struct, rename="camel"):
    watcher_id: str


class Kept:
    """What a watcher has seen since it was last asked."""

    def __init__(self, id: str, watched: Watched) -> None:
        self.id = id  # of the sandbox
        self.watched = watched
        self.events: deque[dict[str, Any]] = deque()
        self._size = 0
        self.error: CapsuleError | None = None
        self.task: asyncio.Task[None] | None = None
        self._asked: deque[asyncio.Future[None]] = deque()
        self._last = time.monotonic()

    @property
    def unasked(self) -> float:
        """Seconds since somebody asked, or it was made."""
        return time.monotonic() - self._last

    def put(self, event: dict[str, Any]) -> None:
        """As the kernel does: the same once more is nothing new."""
        if self.events and self.events[-1] == event:
            return
        self.events.append(event)
        self._size += _size(event)
        while len(self.events) > KEPT or self._size > KEPT_BYTES:
            self._size -= _size(self.events.popleft())

    async def run(self) -> None:
        try:
            async for event in self.watched.events():
                if event is not None:
                    self.put(event)
                elif self._asked:
                    _wake(self._asked.popleft())
        except CapsuleError as error:
            self.error = error
        finally:
            while self._asked:
                _wake(self._asked.popleft())
            await self.watched.aclose()

    async def take(self) -> list[dict[str, Any]]:
        """All that happened before it was asked for. Raises TimeoutError."""
        self._last = time.monotonic()
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        async with asyncio.timeout(_PATIENCE):
            try:
                await self.watched.changes.sync()
            except BaseException:
                self._asked.remove(asked)  # its answer will not come, and is nobody else's
                raise
            await asked
        found = list(self.events)
        self.events.clear()
        self._size = 0
        return found


class Watched:
    """A folder that is watched until it is closed."""

    def __init__(self, files: Files, path: str, *, entries: bool) -> None:
        self._files = files
        self._path = path
        self._entries = entries
        self._stack = contextlib.AsyncExitStack()
        self.changes: Watch

    def when_closed(self, call: Callable[[], None]) -> None:
        self._stack.callback(call)

    async def open(self, *, recursive: bool) -> None:
        """Once returned, no change is missed."""
        watching = self._files.watch(self._path, recursive=recursive)
        self.changes = await self._stack.enter_async_context(watching)

    async def events(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """None: a sync."""
        async with self._stack:
            async for change in self.changes:
                if change.change == "sync":
                    yield None
                elif change.change in _TYPES:  # else some were missed: there is no word for it
                    yield await self._event(change)

    async def _event(self, change: Change) -> dict[str, Any]:
        # As in fsnotify: what has got another name appears under it.
        kind = _TYPES["create" if change.arrived else change.change]
        event: dict[str, Any] = {"name": change.path or ".", "type": kind}
        if not self._entries or kind not in _TOLD:
            return event
        path = posixpath.join(self._path, change.path)
        try:
            found = await self._files.stat(path, detail=DETAIL)
        except CapsuleError:
            return event  # it is gone again
        return {**event, "entry": entry(found, path)}

    async def aclose(self) -> None:
        await self._stack.aclose()


class Watchers:
    def __init__(self, service: Service, closing: asyncio.Event) -> None:
        self._service = service
        self._closing = closing
        self._kept: dict[str, Kept] = {}
        self._streams: Counter[str] = Counter()  # by sandbox
        self._tasks = Tasks()

    def calls(self) -> dict[tuple[str, str], Call]:
        found = {
            "WatchDir": streaming(WatchDir, self.watch_dir, PING, until=self._closing),
            "CreateWatcher": unary(WatchDir, self.create),
            "GetWatcherEvents": unary(Watcher, self.events),
            "RemoveWatcher": unary(Watcher, self.remove),
        }
        return {("POST", PATH + name): call for name, call in found.items()}

    async def watch_dir(self, guest: Guest, asked: WatchDir, request: Request) -> Opened:
        watched = self._watched(guest, asked)
        self._count_stream(guest.id, watched)
        try:
            await self._open(guest, asked, watched)
        except BaseException:
            await watched.aclose()
            raise

        async def told() -> AsyncGenerator[bytes, None]:
            yield envelope({"start": {}})
            async for event in watched.events():
                yield envelope({"filesystem": event})

        return Opened(told(), held=watched)

    async def create(self, guest: Guest, asked: WatchDir, request: Request) -> Any:
        self._sweep()
        asked_for = self._asked_for(guest.id)
        if asked_for >= MOST or asked_for + self._streams[guest.id] >= TOGETHER:
            count = asked_for + self._streams[guest.id]
            raise RpcError("resource_exhausted", f"the sandbox has {count} watchers: remove one")
        kept, name = Kept(guest.id, self._watched(guest, asked)), "w" + secrets.token_hex(10)
        self._kept[name] = kept
        try:
            await self._open(guest, asked, kept.watched)
        except BaseException:
            del self._kept[name]
            raise
        kept.task = self._tasks.spawn(self._run(name, kept), f"watcher {name}")
        return {"watcherId": name}

    async def _run(self, name: str, kept: Kept) -> None:
        work = asyncio.ensure_future(kept.run())
        over = asyncio.ensure_future(self._closing.wait())
        try:
            while (left := UNASKED - kept.unasked) > 0 and not (work.done() or over.done()):
                pending = {work, over}
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if left <= 0:
                self._kept.pop(name, None)
        finally:
            for task in (work, over):
                task.cancel()
            await asyncio.wait({work, over})
            self._sweep()

    def _sweep(self) -> None:
        """What has ended with its sandbox is asked for by nobody."""
        for name, kept in list(self._kept.items()):
            ended = kept.task is not None and (kept.task.done() or kept.error is not None)
            if ended and running(self._service, kept.id) is None:
                del self._kept[name]

    async def events(self, guest: Guest, asked: Watcher, request: Request) -> Any:
        kept = self._find(guest, asked)
        if kept.error is None and kept.task is not None and not kept.task.done():
            try:
                return {"events": await kept.take()}
            except TimeoutError:
                raise RpcError("unavailable", "the watcher does not answer") from None
        text = "it has ended" if kept.error is None else kept.error.message
        raise RpcError("internal", f"watcher error: {text}")

    async def remove(self, guest: Guest, asked: Watcher, request: Request) -> Any:
        kept = self._find(guest, asked)
        del self._kept[asked.watcher_id]
        if kept.task is not None and not kept.task.done():
            kept.task.cancel()
            await asyncio.wait({kept.task})
        return {}

    def _find(self, guest: Guest, asked: Watcher) -> Kept:
        kept = self._kept.get(asked.watcher_id)
        if kept is None or kept.id != guest.id:
            raise RpcError("not_found", f"watcher with id {asked.watcher_id[:100]} not found")
        return kept

    def _asked_for(self, id: str) -> int:
        return sum(kept.id == id for kept in self._kept.values())

    def _count_stream(self, id: str, watched: Watched) -> None:
        """Until it is closed."""
        if self._streams[id] + self._asked_for(id) >= TOGETHER:
            raise RpcError("resource_exhausted", f"the sandbox has {TOGETHER} watchers: stop one")
        self._streams[id] += 1

        def closed() -> None:
            self._streams[id] -= 1
            if not self._streams[id]:
                del self._streams[id]

        watched.when_closed(closed)

    def _watched(self, guest: Guest, asked: WatchDir) -> Watched:
        files, path = self._service.files(guest.id), guest.path(asked.path)
        return Watched(files, path, entries=asked.include_entry)

    async def _open(self, guest: Guest, asked: WatchDir, watched: Watched) -> None:
        path = guest.path(asked.path)
        if (await self._service.files(guest.id).stat(path, follow=True)).type != "dir":
            raise RpcError("invalid_argument", f"path {path} not a directory")
        try:
            await watched.open(recursive=asked.recursive)
        except CapacityError:  # which speaks of processes
            text = f"no more folders can be watched in this sandbox, {path}: {FULL}"
            raise RpcError("resource_exhausted", text) from None


def _size(event: dict[str, Any]) -> int:
    return 100 + len(event["name"]) + (2 * len(event["entry"]["path"]) if "entry" in event else 0)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
