"""E2B's wire, byte by byte: what an SDK would send, and what it would never send."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

STREAM = "application/connect+json"


class Frame(NamedTuple):
    flags: int
    body: dict[str, Any]


def pack(message: Any, flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body


class Frames:
    """The frames of a stream that is still coming."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._parts = answer.aiter_raw()
        self._kept = bytearray()

    async def next(self) -> Frame:
        while len(self._kept) < 5 or len(self._kept) < 5 + self._size:
            self._kept += await anext(self._parts)
        frame = Frame(self._kept[0], json.loads(self._kept[5 : 5 + self._size]))
        del self._kept[: 5 + self._size]
        return frame

    @property
    def _size(self) -> int:
        return int.from_bytes(self._kept[1:5], "big")

    async def rest(self) -> list[Frame]:
        found: list[Frame] = []
        while not found or found[-1].flags != 2:
            found.append(await self.next())
        return found


class Wire:
    """One sandbox's envd."""

    def __init__(self, http: httpx.AsyncClient, id: str, token: str) -> None:
        self.http = http
        self.id = id
        self.token = token
        self.headers = {
            "e2b-sandbox-id": id,
            "e2b-sandbox-port": "49983",
            "x-access-token": token,
        }

    async def call(self, name: str, message: Any, **headers: str) -> httpx.Response:
        """A call with one answer, whatever it is."""
        return await self.http.post(
            name, json=message, headers={**self.headers, "connect-protocol-version": "1", **headers}
        )

    async def ask(self, name: str, **message: Any) -> Any:
        answer = await self.call(name, message)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @asynccontextmanager
    async def stream(
        self, name: str, message: Any, *, raw: bytes | None = None, **headers: str
    ) -> AsyncIterator[Frames]:
        sent = {**self.headers, "content-type": STREAM, "connect-protocol-version": "1"}
        sent |= {key.replace("_", "-"): value for key, value in headers.items()}
        body = pack(message) if raw is None else raw
        async with self.http.stream("POST", name, content=body, headers=sent) as answer:
            yield Frames(answer)

    async def frames(self, name: str, message: Any, **headers: str) -> list[Frame]:
        async with self.stream(name, message, raw=None, **headers) as frames:
            assert frames.answer.headers["content-type"] == STREAM
            return await frames.rest()

    async def run(self, script: str, **headers: str) -> Ran:
        message = {"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False}
        return Ran.of(await self.frames("/process.Process/Start", message, **headers))


class Ran(NamedTuple):
    pid: int
    stdout: bytes
    stderr: bytes
    end: dict[str, Any] | None
    last: dict[str, Any]

    @classmethod
    def of(cls, frames: list[Frame]) -> Ran:
        events = [frame.body.get("event", {}) for frame in frames]
        output = {"stdout": bytearray(), "stderr": bytearray(), "pty": bytearray()}
        for event in events:
            for name, data in event.get("data", {}).items():
                output[name] += base64.b64decode(data)
        ends = [event["end"] for event in events if "end" in event]
        pid = events[0].get("start", {}).get("pid", 0)
        return cls(
            pid,
            bytes(output["stdout"] + output["pty"]),
            bytes(output["stderr"]),
            ends[0] if ends else None,
            frames[-1].body,
        )
