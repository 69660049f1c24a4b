"""What carries one conversation with an agent."""

from __future__ import annotations

from typing import Protocol


class ByteStream(Protocol):
    """A connection to an agent. `link` cannot tell a Unix socket from a Docker attach.

    One task receives and one task sends, at the same time.
    """

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """At least one byte; b"" at the end of the stream. Raises UnavailableError if it broke.

        Cancelling it loses no byte: what had come is what the next call returns.
        """

    async def send(self, data: bytes) -> None:
        """Returns when the transport has taken the bytes (backpressure).

        Raises UnavailableError if it broke. Cancelled halfway, the stream is only good for closing.
        """

    async def aclose(self) -> None:
        """Idempotent, never waits for the other side, and wakes whoever is still waiting here."""
