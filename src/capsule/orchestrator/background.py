"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from capsule.errors import UnavailableError

T = TypeVar("T")
R = TypeVar("R")


class Background(Generic[T]):
    """Opens what `opening` makes, and keeps it until `close`. A process that ends without it leaves
    what a killed server leaves: sandboxes that the next one takes up."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        """Raises what opening raises."""
        self._opening = opening
        self._opened: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="capsule", daemon=True)
        self._thread.start()
        self.value, self._loop, self._stop = self._opened.result()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        stop = asyncio.Event()
        try:
            async with self._opening() as value:
                self._opened.set_result((value, asyncio.get_running_loop(), stop))
                await stop.wait()
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """What `work` returns or raises, in the thread."""
        if not self._thread.is_alive():
            work.close()
            raise UnavailableError("it is closed", hint="make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
