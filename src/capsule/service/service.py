"""The one object the edges talk to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from capsule.config import Config
from capsule.link.link import ExecStream
from capsule.model import ExecInfo, State, Template, Usage
from capsule.providers.contract import Capabilities, Provider
from capsule.service.clock import Clock, SystemClock
from capsule.service.files import Files
from capsule.service.terminal import TerminalSession
from capsule.service.values import (
    CreateRequest,
    ExecCall,
    ExecResult,
    RunCall,
    Sandbox,
    Stats,
    Terminal,
)


class Service:
    def __init__(
        self,
        config: Config,
        providers: Mapping[str, Provider],
        catalog: Mapping[str, Template],
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.catalog = catalog

    async def open(self) -> None:
        """Lock the data directory, open the providers, adopt what lives, start the reaper.

        Raises UnavailableError (a provider does not work here, isolation below the configured
        minimum), ConflictError (another server uses the directory).
        """
        raise NotImplementedError

    def drain(self) -> None:
        """From now on refuse new sandboxes; what runs goes on. The first step of a graceful stop."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Drain, wait for execs up to config.drain_timeout, then let go (or delete: config.drain)."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def capabilities(self) -> dict[str, Capabilities]:
        raise NotImplementedError

    def stats(self) -> Stats:
        raise NotImplementedError

    async def create(self, request: CreateRequest) -> Sandbox:
        """Returns when it runs. Raises InvalidError, NotFoundError (template), CapacityError,
        ConflictError (the key was used for something else), UnavailableError, NoSpaceError."""
        raise NotImplementedError

    def get(self, id: str) -> Sandbox:
        """Raises NotFoundError, GoneError (it existed, and is over)."""
        raise NotImplementedError

    def list(
        self, *, metadata: Mapping[str, str] | None = None, state: State | None = None
    ) -> list[Sandbox]:
        """Newest last."""
        raise NotImplementedError

    async def delete(self, id: str) -> None:
        """Returns when nothing is left of it. Concurrent deletes all succeed."""
        raise NotImplementedError

    async def set_timeout(self, id: str, ttl: float) -> Sandbox:
        """It ends `ttl` seconds from now."""
        raise NotImplementedError

    async def keep_alive(self, id: str) -> Sandbox:
        """It ends no earlier than its own ttl from now."""
        raise NotImplementedError

    async def metrics(self, id: str) -> Usage:
        raise NotImplementedError

    async def exec(self, id: str, call: ExecCall) -> ExecResult:
        raise NotImplementedError

    async def run(self, id: str, call: RunCall) -> ExecResult:
        raise NotImplementedError

    async def start(
        self,
        id: str,
        call: ExecCall | RunCall,
        *,
        stdin_open: bool = False,
        tty: Terminal | tuple[int, int] | None = None,
    ) -> ExecStream:
        """Returns when the program runs. Closing the stream leaves the program running.

        With an idempotency key that was used before it attaches to that exec, from its start.
        """
        raise NotImplementedError

    async def attach(
        self, id: str, exec_id: str, *, stdout: int = 0, stderr: int = 0, input: bool = False
    ) -> ExecStream:
        raise NotImplementedError

    async def execs(self, id: str) -> Sequence[ExecInfo]:
        raise NotImplementedError

    async def kill(
        self, id: str, exec_id: str, *, signal: str = "KILL", grace: float = 0.0
    ) -> bool:
        """True: it was still running."""
        raise NotImplementedError

    async def send_input(self, id: str, exec_id: str, data: bytes, *, eof: bool = False) -> None:
        raise NotImplementedError

    async def resize(self, id: str, exec_id: str, rows: int, cols: int) -> None:
        raise NotImplementedError

    async def batch(
        self, id: str, calls: Sequence[ExecCall | RunCall], *, stop_on_error: bool = True
    ) -> Sequence[ExecResult]:
        """In order. With stop_on_error the first exec that did not exit with 0 is the last result."""
        raise NotImplementedError

    def files(self, id: str) -> Files:
        """Raises NotFoundError, GoneError at once."""
        raise NotImplementedError

    async def terminal(
        self, id: str, *, name: str = "main", rows: int = 24, cols: int = 80
    ) -> TerminalSession:
        """Join the named shell, or start it."""
        raise NotImplementedError
