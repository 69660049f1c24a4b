"""How often one address may ask: counted over a sliding window, told in headers.

    RateLimit-Limit: 120        RateLimit-Remaining: 119        RateLimit-Reset: 60 (seconds)

Whoever asks more often gets a 429 with Retry-After.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.routing import Route, failure
from capsule.errors import CapacityError, InvalidError

OFF = "off"


class Rate:
    def __init__(self, setting: str, text: str) -> None:
        """Raises InvalidError."""
        self._setting = setting
        self._item = None if text == OFF else _parsed(setting, text)
        self._windows = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def count(self, client: str) -> dict[str, str]:
        """One request more; the headers of its answer. Raises CapacityError."""
        if self._item is None:
            return {}
        allowed = await self._windows.hit(self._item, self._setting, client)
        window = await self._windows.get_window_stats(self._item, self._setting, client)
        left = max(window.reset_time - time.time(), 0.0)
        if not allowed:
            raise CapacityError(
                f"too many requests from {client}: limit {self._item}",
                retry_after=max(left, 1.0),
                hint=f"wait a moment, or set CAPSULE_{self._setting.upper()}",
            )
        return {
            "RateLimit-Limit": str(self._item.amount),
            "RateLimit-Remaining": str(window.remaining),
            "RateLimit-Reset": str(math.ceil(left)),
        }


def _parsed(setting: str, text: str) -> RateLimitItem:
    try:
        return parse(text)
    except ValueError:
        raise InvalidError(
            f"setting {setting}: {text!r} is no rate, expected something like 120/minute, or off",
            field=setting,
        ) from None


def limited(rate: Rate) -> type[Route]:
    """Routes that are counted before anything else is done for them."""

    class LimitedRoute(Route):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def counted(request: Request) -> Response:
                try:
                    headers = await rate.count(request.client.host if request.client else "")
                except CapacityError as error:
                    return failure(error)
                response = await handle(request)
                response.headers.update(headers)
                return response

            return counted

    return LimitedRoute
