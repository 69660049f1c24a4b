"""TLS to a program, with programs of all kinds at the other end of the stream."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from capsule.edge.ports.tls import Tls
from capsule.errors import UnavailableError
from capsule.link.stream import ByteStream
from tests.support import eventually

Program = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "program")])
CERT, DH = "CERTIFICATE", "DH PARAMETERS"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = rsa.generate_private_key(65537, 2048)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    coding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "program.pem"
    secret = key.private_bytes(coding, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + made.public_bytes(coding))
    return path


@pytest.fixture
def server(pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


class Wire:
    """A ByteStream over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._reader.read(max_bytes)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def to(program: Program, context: ssl.SSLContext | None) -> AsyncIterator[ByteStream]:
    tasks = set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(cast("asyncio.Task[Any]", asyncio.current_task()))
        try:
            await program(reader, writer)
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    host, port = listening.sockets[0].getsockname()
    wire = Wire(*await asyncio.open_connection(host, port))
    try:
        yield wire
    finally:
        await wire.aclose()
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # `wait_closed` waits for its connections since Python 3.12 only.
        await eventually(lambda: not vars(listening)["_active_count"], what="all are closed")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads no more before it has given back what it read."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_directions_at_once(server: ssl.SSLContext, version: ssl.TLSVersion) -> None:
    """The program reads only while we do, and we send more than there is room for on the way."""
    server.minimum_version = server.maximum_version = version
    sent, got = secrets.token_bytes(1 << 20) * 16, bytearray()
    async with to(echo, server) as wire, asyncio.timeout(60):
        tls = Tls(wire)
        await tls.open(443)

        async def take() -> None:
            while len(got) < len(sent):
                got.extend(await tls.receive())

        await asyncio.gather(take(), tls.send(sent))
    assert got == sent


def der(tag: int, body: bytes) -> bytes:
    length = bytes([len(body)]) if len(body) < 128 else b"\x82" + len(body).to_bytes(2)
    return bytes([tag]) + length + body


def endless_numbers(server: ssl.SSLContext, tmp_path: Path) -> ssl.SSLContext:
    """A modulus of 10,000 bits held the server for a second, with each connection."""
    modulus = (secrets.randbits(10_000) | 1 << 9_999 | 1).to_bytes(1_251)
    parameters = der(0x30, der(0x02, modulus) + der(0x02, b"\x02"))
    (tmp_path / "dh.pem").write_text(ssl.DER_cert_to_PEM_cert(parameters).replace(CERT, DH))
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    server.set_ciphers("DHE-RSA-AES128-GCM-SHA256:@SECLEVEL=0")
    server.load_dh_params(str(tmp_path / "dh.pem"))
    return server


def large_group(server: ssl.SSLContext, tmp_path: Path) -> ssl.SSLContext:
    server.set_ecdh_curve("secp521r1")
    return server


def no_tls(server: ssl.SSLContext, tmp_path: Path) -> None:
    return None


@pytest.mark.parametrize("speaks", [endless_numbers, large_group, no_tls])
async def test_a_program_that_does_not_speak_our_tls(
    speaks: Callable[..., ssl.SSLContext | None], server: ssl.SSLContext, tmp_path: Path
) -> None:
    async with to(echo, speaks(server, tmp_path)) as wire:
        with pytest.raises(UnavailableError, match="port 443 does not speak TLS"):
            await Tls(wire).open(443)
