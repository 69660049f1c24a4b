"""How long an Engine gets for an answer.

To start or to end a container may take half a minute on a busy machine. That is granted to an
Engine that is there: meanwhile it is asked whether it answers at all, and given up when it does
not. After a call that was given up, the next ones ask at once, so that what clears up after a
failure is not as slow as the failure was.

    Deadlines.of ── _watch   one task for each call that may take long, ended with it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from capsule.errors import CapsuleError
from capsule.providers.contract import OutOfReachError

LOOK_EVERY = 2.0  # seconds between the questions
ANSWER_WITHIN = 3.0
IN_DOUBT = 1.0  # for an Engine that has just not answered
DOUBTED_FOR = 10.0

_LONG = LOOK_EVERY + ANSWER_WITHIN  # what takes no longer need not be watched


class Deadlines:
    def __init__(self, url: str, ping: Callable[[], Awaitable[None]], *, patience: float) -> None:
        """`ping` raises CapsuleError when nobody answers; `patience` makes everything longer."""
        self._url = url
        self._ping = ping
        self._patience = patience
        self._doubt_until = 0.0  # by the loop's clock

    @asynccontextmanager
    async def of(self, what: str, seconds: float) -> AsyncIterator[None]:
        """Around one call. Raises OutOfReachError."""
        loop = asyncio.get_running_loop()
        began, doubt = loop.time(), loop.time() < self._doubt_until
        try:
            async with asyncio.timeout(seconds * self._patience) as budget:
                if doubt or seconds > _LONG:
                    async with self._watched(budget, doubt):
                        yield
                else:
                    yield
        except TimeoutError:
            self._doubt_until = loop.time() + DOUBTED_FOR
            raise OutOfReachError(
                f"the Docker Engine at {self._url} did not answer within "
                f"{loop.time() - began:.2g} seconds ({what})",
                hint="see whether `docker ps` answers; restarting the Engine helps if it does not",
            ) from None

    @asynccontextmanager
    async def _watched(self, budget: asyncio.Timeout, doubt: bool) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch(budget, doubt))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def _watch(self, budget: asyncio.Timeout, doubt: bool) -> None:
        if doubt and not await self._answers(IN_DOUBT, budget):
            return
        while True:
            await asyncio.sleep(LOOK_EVERY * self._patience)
            if not await self._answers(ANSWER_WITHIN, budget):
                return

    async def _answers(self, seconds: float, budget: asyncio.Timeout) -> bool:
        """If it does not, the call that waits is over."""
        try:
            async with asyncio.timeout(seconds * self._patience):
                await self._ping()
        except (CapsuleError, TimeoutError):
            if not budget.expired():
                budget.reschedule(asyncio.get_running_loop().time())
            return False
        self._doubt_until = 0.0
        return True
