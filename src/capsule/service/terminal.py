"""Named shells with several viewers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from capsule.model import Exit

ClosingCode = Literal["exited", "gone", "slow", "left", "unavailable"]


@dataclass(frozen=True, slots=True)
class Closing:
    """Why a viewer's stream ended."""

    code: ClosingCode
    message: str
    exit: Exit | None = None


class TerminalSession:
    """One viewer of one shell: an async iterator of output, starting with the recent screen.

    It ends with the shell, the sandbox, or when this viewer is too slow; `closing` then says why.
    Leaving (`aclose`) does not end the shell. An async context manager.
    """

    name: str
    exec_id: str
    closing: Closing | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        raise NotImplementedError

    async def resize(self, rows: int, cols: int) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError
