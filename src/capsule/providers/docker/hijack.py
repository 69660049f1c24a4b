"""A program beside the agent, started through the Engine, as a stream of bytes both ways."""

from __future__ import annotations

import json

import aiohttp
from aiodocker import Docker
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream
from yarl import URL

from capsule.errors import UnavailableError

_BROKEN = (aiohttp.ClientError, DockerError, OSError, RuntimeError, AssertionError)


async def hijack(docker: Docker, exec_id: str) -> HijackedStream:
    """Starts it. The caller owns the deadline, and translates what comes out."""

    async def request() -> tuple[URL, bytes, bool]:
        # As if it had a terminal: then aiodocker hands on what comes as it comes, instead of
        # gathering each of the Engine's frames first.
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        return URL(f"exec/{exec_id}/start"), body, True

    made = HijackedStream(Stream(docker, request))
    try:
        await made.begin()
    except BaseException:
        await made.aclose()
        raise
    return made


class HijackedStream:
    """Cancelling `receive` loses no byte: what has come waits in aiodocker's queue, or here."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = b""
        self._closed = False

    async def begin(self) -> None:
        await self._stream._init()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._rest:
            self._rest = await self._next()
        chunk, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return chunk

    async def _next(self) -> bytes:
        if not self._closed:
            try:
                message = await self._stream.read_out()
            except _BROKEN as exc:
                raise UnavailableError(f"the stream through the Engine broke: {exc}") from exc
            if not self._closed:
                return message.data if message is not None else b""
        raise UnavailableError("the stream through the Engine is closed")

    async def send(self, data: bytes) -> None:
        if self._closed:
            raise UnavailableError("the stream through the Engine is closed")
        try:
            await self._stream.write_in(data)
        except _BROKEN as exc:
            raise UnavailableError(f"the stream through the Engine broke: {exc}") from exc

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = self._stream._closed = True
        response = self._stream._resp
        if response is not None:
            response.close()
