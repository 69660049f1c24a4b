"""A run as E2B's code interpreter tells it: a line of JSON for each event, and one every five
seconds in which nothing happens.

    Lines ─┬─ step    the run's next event; first its turn, if others are before it
           └─ gone    the client leaves: the run is interrupted, or loses its turn

What fails once lines have begun is told as one, and the connection is kept. Only where the sandbox
itself is gone it is cut: the SDKs ask then whether it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.edge.drain import cut
from capsule.edge.e2b import charts
from capsule.edge.errors import encode, sentence, understand
from capsule.edge.sse import until_gone
from capsule.errors import CapsuleError
from capsule.model import Stream
from capsule.service import LiveRun
from capsule.service.kernel_wire import Raised, Shown
from capsule.service.live_run import RunEnd, RunEvent, Text
from capsule.service.text import Utf8Decoder

EVERY = 5.0
KEEPALIVE = {"type": "keepalive"}
END = {"type": "end_of_execution"}
_FORMS = ("text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "javascript")
_QUOTES = ("'", '"')


class Lines(Response):
    def __init__(
        self,
        starting: asyncio.Future[LiveRun],
        interrupt: Callable[[LiveRun], Awaitable[None]],
        lives: Callable[[], bool],
    ) -> None:
        """`lives`: whether the sandbox still does."""
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._starting = starting
        self._interrupt = interrupt
        self._lives = lives

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            live = await self._turn(gone, send)
            if live is not None:
                await self._tell(live, gone, send)
        except CapsuleError as error:
            if not self._lives():
                await cut(scope)
                return
            await _send(send, _lost(understand(error)), END)
        finally:
            gone.cancel()
            await asyncio.wait({gone})
        await send({"type": "http.response.body", "body": b""})

    async def _turn(self, gone: asyncio.Future[None], send: Send) -> LiveRun | None:
        """None: the client did not wait for it."""
        try:
            while not self._starting.done():
                await _first(gone, self._starting)
                if self._starting.done():
                    break
                if gone.done():
                    return None
                await _send(send, KEEPALIVE)
            return self._starting.result()
        finally:
            if not self._starting.done():
                self._starting.cancel()
                await asyncio.wait({self._starting})

    async def _tell(self, live: LiveRun, gone: asyncio.Future[None], send: Send) -> None:
        story = Story()
        over = False
        async with live:
            await _send(send, {"type": "number_of_executions", "execution_count": live.run})
            step = asyncio.ensure_future(anext(live))
            try:
                while not over:
                    await _first(gone, step)
                    if gone.done():
                        return
                    if not step.done():
                        await _send(send, KEEPALIVE)
                        continue
                    event = step.result()
                    over = isinstance(event, RunEnd)
                    if not over:
                        step = asyncio.ensure_future(anext(live))
                    await _send(send, *story.told(event))
            finally:
                if not over:
                    step.cancel()
                    await asyncio.wait({step})
                    with contextlib.suppress(CapsuleError):  # it is over, or its sandbox is
                        await self._interrupt(live)


class Story:
    """What is told of a run's events."""

    def __init__(self) -> None:
        self._cuts = {Stream.STDOUT: Utf8Decoder(), Stream.STDERR: Utf8Decoder()}
        self._raised = False

    def told(self, event: RunEvent) -> Iterator[dict[str, Any]]:
        match event:
            case Text():
                yield from _said(event.stream, self._cuts[event.stream].feed(event.data))
            case Shown():
                yield _shown(event)
            case Raised():
                self._raised = True
                yield _error(event.name, event.value, event.traceback)
            case RunEnd():
                for stream, cut in self._cuts.items():
                    yield from _said(stream, cut.finish())
                if event.status != "ok" and not self._raised:
                    # A shell raises nothing: its last command's code is all that there is.
                    yield _error("", str(event.exit_code or event.status), "")
                yield END


def _said(stream: Stream, text: str) -> Iterator[dict[str, Any]]:
    if text:
        now = datetime.now(UTC).isoformat()
        yield {"type": str(stream), "text": text, "timestamp": now}


def _shown(shown: Shown) -> dict[str, Any]:
    body: dict[str, Any] = {"type": "result", "is_main_result": shown.main, "extra": {}}
    for name in _FORMS:
        if (form := getattr(shown, name)) is not UNSET:
            body[name] = form
    if "text" in body:
        body["text"] = _unquoted(body["text"])
    if len(shown.json):
        body["json"] = shown.json
    for name, made in (("data", charts.data), ("chart", charts.chart)):
        if len(raw := getattr(shown, name)) and (found := made(raw)) is not None:
            body[name] = found
    return body


def _unquoted(text: str) -> str:
    """A text is shown as it is, not as it is written in code."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
    return text[1:-1] if quoted else text


def _lost(error: CapsuleError) -> dict[str, Any]:
    """By the name that E2B gives to a run whose end nobody saw."""
    return _error("UnexpectedEndOfExecution", sentence(error), "")


def _error(name: str, value: str, traceback: str) -> dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


async def _first(*either: asyncio.Future[Any]) -> None:
    await asyncio.wait(either, timeout=EVERY, return_when=asyncio.FIRST_COMPLETED)


async def _send(send: Send, *messages: dict[str, Any]) -> None:
    if messages:
        body = b"".join(encode(message) + b"\n" for message in messages)
        await send({"type": "http.response.body", "body": body, "more_body": True})
