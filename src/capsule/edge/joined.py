"""One write for an answer's head and the first of its body: one system call, and one time that the
client is woken, instead of two.
"""

from __future__ import annotations

import asyncio
from typing import Any

_HEAD = b"HTTP/1."
_MOST = 64 * 1024  # of a body that is worth to be copied


class Joined:
    """A transport, as far as uvicorn uses one. A head whose body does not follow at once leaves by
    itself as soon as the loop comes round.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head and len(data) <= _MOST:
            data, self._head = self._head + data, b""
        elif self._head:
            self._leave()
        elif data.startswith(_HEAD):
            self._head = data
            asyncio.get_running_loop().call_soon(self._leave)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._leave()
        self._transport.close()

    def _leave(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._transport.write(head)
