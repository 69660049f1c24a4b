"""TLS to a program that speaks nothing else, over the stream to it.

Nobody can vouch for a sandbox's certificate, so it is not looked at: who may reach the port has
been seen to, and nothing lies between us and the program.
"""

from __future__ import annotations

import asyncio
import ssl

from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream

WITHIN = 10.0  # seconds, until it is agreed
_PIECE = 65536


class Tls:
    """A ByteStream. `open` comes first."""

    def __init__(self, stream: ByteStream) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        self._stream = stream
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)
        self._sending = asyncio.Lock()  # what is sealed first is sent first

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
                hint=f"leave {port} out of httpsPorts, or serve HTTPS there",
                port=port,
            ) from error

    async def receive(self, max_bytes: int = _PIECE) -> bytes:
        while True:
            try:
                return self._tls.read(max_bytes)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise UnavailableError(f"the program broke its TLS: {error.reason}") from error

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
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
        async with self._sending:
            while data := self._out.read(_PIECE):
                await self._stream.send(data)
