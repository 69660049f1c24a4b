"""A real Engine behind a door that we hold: a test says what is done there.

What the door does to a request is decided by its method and path; everything else goes through.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse | None]]  # None: let it through

_OWN = {"transfer-encoding", "content-length", "connection", "keep-alive"}


class CrookedEngine:
    def __init__(self, real: str, folder: Path) -> None:
        self.socket = folder / "door.sock"
        self.url = f"unix://{self.socket}"
        self.pulled = 0  # how often
        self._real = real.removeprefix("unix://")
        self._rules: list[tuple[re.Pattern[str], Answer]] = []
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    def on(self, pattern: str, answer: Answer) -> None:
        """For requests whose "METHOD path" matches, from now on; the newest rule decides."""
        self._rules.insert(0, (re.compile(pattern), answer))

    def behave(self) -> None:
        self._rules.clear()

    async def open(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._real))
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def close(self) -> None:
        """Nobody answers at the door any more."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        self._runner = self._session = None
        self.socket.unlink(missing_ok=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {re.sub(r'^/?(v[0-9.]+/)?', '', request.path_qs)}"
        await request.read()  # whoever sent it may be gone when it is its turn
        for pattern, answer in self._rules:
            if pattern.search(what):
                made = await answer(request)
                if made is not None:
                    return made
                break
        return await self.forward(request)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
        async with self._session.request(
            request.method,
            f"http://engine{request.path_qs}",
            headers=headers,
            data=await request.read(),
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _OWN}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    def pulls(self, source: str, target: str) -> Answer:
        """A registry that has `target`: what arrives is the Engine's own `source`."""

        async def answer(request: web.Request) -> web.StreamResponse:
            assert self._session is not None
            self.pulled += 1
            said = web.StreamResponse(headers={"Content-Type": "application/json"})
            await said.prepare(request)
            for done in (0, 500_000, 1_000_000):
                step = {"status": "Downloading", "id": "abc", "progressDetail": {"current": done}}
                step["progressDetail"]["total"] = 1_000_000  # type: ignore[index]
                await said.write(json.dumps(step).encode() + b"\r\n")
                await asyncio.sleep(0.01)  # each is told by itself
            repository, _, tag = target.rpartition(":")
            tagged = f"http://engine/images/{source}/tag?repo={repository}&tag={tag}"
            async with self._session.post(tagged) as answered:
                assert answered.status == 201, await answered.text()
            return said

        return answer


@asynccontextmanager
async def crooked(real: str, folder: Path) -> AsyncIterator[CrookedEngine]:
    made = CrookedEngine(real, folder)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
