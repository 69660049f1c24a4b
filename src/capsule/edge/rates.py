"""How often one key, and one address, may ask: a moving window each, in this server's memory.

Answers say how much is left (`RateLimit-Limit`, `-Remaining`, `-Reset`, of the window that is
closest to its end); a refusal is a 429 with `Retry-After`. A batch of JSON-RPC counts as its calls,
a WebSocket as one request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.types import Message, Send

from capsule.config import Config
from capsule.edge.addresses import group
from capsule.edge.errors import RateError
from capsule.service.caller import Caller

CHARGE = "capsule.charge"  # in a scope: what takes further requests from the same windows
Charge = Callable[[int], None]

_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


class Window(NamedTuple):
    limit: int
    remaining: int
    reset: float  # seconds from now

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"ratelimit-limit", b"%d" % self.limit),
            (b"ratelimit-remaining", b"%d" % self.remaining),
            (b"ratelimit-reset", b"%d" % math.ceil(self.reset)),
        ]


class Limit:
    """One of the two."""

    def __init__(self, rate: str, what: str, windows: Any) -> None:
        from limits import parse

        self._rate = parse(rate)
        self._what = what
        self._windows = windows

    def take(self, who: str, count: int = 1) -> Window:
        """Raises CapacityError."""
        taken = self._windows.hit(self._rate, self._what, who, cost=count)
        stats = self._windows.get_window_stats(self._rate, self._what, who)
        wait = max(stats.reset_time - time.time(), 0.0)
        window = Window(self._rate.amount, stats.remaining, wait)
        if not taken:
            raise TooOftenError(window, f"too many requests {self._what}, limit {self._rate}")
        return window


class TooOftenError(RateError):
    def __init__(self, window: Window, message: str) -> None:
        wait = max(math.ceil(window.reset), 1)
        super().__init__(message, retry_after=wait, hint=f"wait {wait} seconds", limit=window.limit)
        self.window = window


class Rates:
    def __init__(self, config: Config) -> None:
        self._of_key: Limit | None = None
        self._of_address: Limit | None = None
        if config.rate_limit_key or config.rate_limit_address:
            windows = _windows()
            self._of_key = _limit(config.rate_limit_key, "with this key", windows)
            self._of_address = _limit(config.rate_limit_address, "from this address", windows)

    def __bool__(self) -> bool:
        return self._of_key is not None or self._of_address is not None

    def take_address(self, address: str, count: int = 1) -> Window | None:
        return self._of_address.take(group(address), count) if self._of_address else None

    def take_key(self, caller: Caller, count: int = 1) -> Window | None:
        if self._of_key is None:
            return None
        return self._of_key.take(f"{caller.tenant}/{caller.key_id}", count)


def _windows() -> Any:
    """One for both: each has a thread that clears up after a request."""
    from limits.storage import MemoryStorage  # an eighth of a second; most servers have no limits
    from limits.strategies import MovingWindowRateLimiter

    return MovingWindowRateLimiter(MemoryStorage())


def _limit(rate: str | None, what: str, windows: Any) -> Limit | None:
    return Limit(rate, what, windows) if rate else None


class Told:
    """A `send` that says in the answer's headers what is left."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._window: Window | None = None

    def note(self, window: Window | None) -> None:
        if window is not None and (
            self._window is None or window.remaining < self._window.remaining
        ):
            self._window = window

    async def __call__(self, message: Message) -> None:
        if self._window is not None and message["type"] in _STARTS:
            message["headers"] = [*message.get("headers", ()), *self._window.headers()]
        await self._send(message)


def nothing(count: int) -> None:
    pass
