"""What listens in a sandbox, as byte streams. Who may have one is the edge's to see to."""

from __future__ import annotations

from capsule.errors import CapsuleError, UnavailableError
from capsule.link.link import AgentLink
from capsule.link.stream import ByteStream
from capsule.service import validate
from capsule.service.access import Access
from capsule.service.entry import Entry

CLOSED = "refused"  # in an error's details, as its cause
_LOOPBACK = ("127.0.0.1", "::1")  # a server that listens on `localhost` may have taken the second


class PortStream:
    """A connection to a program. What moves through it is use of the sandbox: it puts off the end
    of an idle one, and wakes one that may be woken.
    """

    __slots__ = ("_access", "_entry", "_stream")

    def __init__(self, stream: ByteStream, access: Access, entry: Entry) -> None:
        self._stream = stream
        self._access = access
        self._entry = entry

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        self._access.touch(self._entry)
        return data

    async def send(self, data: bytes) -> None:
        await self._access.wake(self._entry)
        self._access.touch(self._entry)
        await self._stream.send(data)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Ports:
    def __init__(self, access: Access) -> None:
        self._access = access

    async def dial(self, id: str, port: int) -> PortStream:
        """Raises NotFoundError, GoneError, WrongStateError for the sandbox, UnavailableError (with
        CLOSED where nobody listens), CapacityError (connections)."""
        validate.count("port", port, 1, 65535)
        visit = self._access.visit(id)
        async with visit as link:
            stream = await _dial(link, port)
        if stream is None:
            raise UnavailableError(
                f"sandbox {id} is running, and nothing listens at its port {port}",
                hint=f"start a server in it that listens on 127.0.0.1:{port} or 0.0.0.0:{port}",
                cause=CLOSED,
                port=port,
            )
        return PortStream(stream, self._access, visit.entry)


async def _dial(link: AgentLink, port: int) -> ByteStream | None:
    """None: nobody listens."""
    for host in _LOOPBACK:
        try:
            return await link.dial(port, host)
        except CapsuleError as error:
            # Where there is no IPv6 the second says something else, which is as good as closed.
            if host == _LOOPBACK[0] and error.details.get("cause") != CLOSED:
                raise
    return None
