"""E2B's processes and our execs: which is which.

A process is known by its number, which is the program's pid in its sandbox and in the agent's
memory. What only E2B wants to know of it (its variables, folder, tag) is remembered here, and lost
with the server. So is which exec has a number, to spare a question; it is asked again if wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from capsule.edge.e2b.connect import RpcError
from capsule.edge.errors import encode
from capsule.model import ExecInfo
from capsule.service import Service
from capsule.service.context_calls import is_kernel

REMEMBERED = 4096  # processes, of all sandboxes
LARGEST = 4096  # bytes of what is remembered of one; else it is told as the agent knows it
REPLAY = 30.0  # seconds in which a process that has ended can be connected to


class Selector(msgspec.Struct):
    pid: int | None = None
    tag: str | None = None

    def __str__(self) -> str:
        name = f"pid {self.pid}" if self.tag is None else f"tag {self.tag}"
        return f"process with {name}"


class Known(NamedTuple):
    exec_id: str
    pid: int
    config: Mapping[str, Any]
    tag: str | None = None


class Table:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: OrderedDict[tuple[str, int], Known] = OrderedDict()

    def note(self, id: str, known: Known) -> None:
        if len(encode(known.config)) + len(known.tag or "") > LARGEST:
            return
        self._known[id, known.pid] = known
        self._known.move_to_end((id, known.pid))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self, id: str, pid: int) -> None:
        self._known.pop((id, pid), None)

    def recall(self, id: str, wanted: Selector) -> Known | None:
        if wanted.tag is None:
            return None if wanted.pid is None else self._known.get((id, wanted.pid))
        found = (k for (of, _), k in self._known.items() if of == id and k.tag == wanted.tag)
        return next(found, None)

    async def running(self, id: str) -> list[dict[str, Any]]:
        """As List tells them."""
        return [self._told(id, info) for info in await self._execs(id) if info.running]

    def _told(self, id: str, info: ExecInfo) -> dict[str, Any]:
        known = self._known.get((id, info.pid))
        if known is None or known.exec_id != info.id:
            return {"pid": info.pid, "config": {"cmd": info.argv[0], "args": info.argv[1:]}}
        tag = {} if known.tag is None else {"tag": known.tag}
        return {"pid": info.pid, "config": known.config, **tag}

    async def find(self, id: str, wanted: Selector, *, ended: bool = False) -> ExecInfo:
        """Raises RpcError: no such process runs, nor, if `ended`, has ended a moment ago."""
        pid = wanted.pid
        if wanted.tag is not None:
            known = self.recall(id, wanted)
            pid = None if known is None else known.pid
        found = [info for info in await self._execs(id) if info.pid == pid]
        for info in sorted(found, key=lambda info: (not info.running, info.started_ms_ago)):
            if info.running or (ended and _just_now(info)):
                return info
        raise RpcError("not_found", f"{wanted} not found")

    async def _execs(self, id: str) -> Sequence[ExecInfo]:
        return [info for info in await self._service.execs(id) if not is_kernel(info.id)]


def _just_now(info: ExecInfo) -> bool:
    if info.exit is None:
        return False
    return info.started_ms_ago - info.exit.duration_ms < REPLAY * 1000
