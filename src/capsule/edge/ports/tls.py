"""TLS to a program that speaks nothing else, over the stream to it.

Nobody can vouch for a sandbox's certificate, so it is not looked at: who may reach the port has
been seen to, and nothing lies between us and the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Iterator

from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream

WITHIN = 10.0  # seconds, until it is agreed
_PIECE = 65536
_MAX_REPLIES = 256 * 1024  # bytes of TLS's own, for a program that asks for them and takes none


class Tls:
    """A ByteStream. `open` comes first. Only `send` sends: what TLS itself has to say meanwhile
    goes along with the next data. So a program that does not read holds up nobody who receives.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context().wrap_bio(self._in, self._out)

    async def open(self, port: int) -> None:
        """Raises UnavailableError: there is something else at the port."""
        try:
            async with asyncio.timeout(WITHIN):
                while not self._agreed():
                    await self._flush()
                    await self._more()
                await self._flush()
        except (ssl.SSLError, TimeoutError) as error:
            raise UnavailableError(
                f"what listens at port {port} does not speak TLS",
                hint=f"leave {port} out of httpsPorts, or serve HTTPS there: TLS 1.3, or 1.2 with "
                "ECDHE",
                port=port,
            ) from error

    async def receive(self, max_bytes: int = _PIECE) -> bytes:
        while True:
            with _told():
                try:
                    return self._tls.read(max_bytes)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
            if self._out.pending > _MAX_REPLIES:
                raise UnavailableError("the program broke its TLS: it asks without end")
            await self._more()

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            with _told():
                self._tls.write(data[at : at + _PIECE])
            await self._flush()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _agreed(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    async def _more(self) -> None:
        data = await self._stream.receive()
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        while data := self._out.read(_PIECE):
            await self._stream.send(data)


@functools.cache
def _context() -> ssl.SSLContext:
    """What a program may have us reckon, all others wait for: so neither a group of its own nor a
    large one (DHE with 10,000 bits takes a second). Every server of TLS 1.3 has this curve."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    context.set_ecdh_curve("prime256v1")
    context.set_alpn_protocols(["http/1.1"])
    return context


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises UnavailableError for what TLS cannot go on after."""
    try:
        yield
    except ssl.SSLError as error:
        raise UnavailableError(f"the program broke its TLS: {error.reason}") from error
