"""A web server for inside a sandbox, with the standard library alone. It answers with what it was
asked, and misbehaves on request. Started as `python3 -c SOURCE PORT`.
"""

import asyncio
import base64
import hashlib
import json
import sys

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
left = 0  # clients that went before they had their answer


class NoHttp(Exception):
    """Perhaps TLS: a server that waited for a line of text would answer it late, or never."""


async def head_of(reader):
    first = await reader.readexactly(1)
    if not first.isalpha():
        raise NoHttp
    lines = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    return method, target, [line.split(": ", 1) for line in lines[1:] if line]


async def body_of(reader, headers):
    found = {name.lower(): value for name, value in headers}
    if found.get("transfer-encoding") == "chunked":
        while True:
            size = int((await reader.readline()).strip(), 16)
            yield await reader.readexactly(size)
            await reader.readexactly(2)
            if not size:
                return
    rest = int(found.get("content-length", 0))
    while rest:
        piece = await reader.read(min(rest, 65536))
        rest -= len(piece)
        yield piece


async def answer(writer, body, status="200 OK", more=""):
    kind = "" if "Content-Type" in more else "Content-Type: application/json\r\n"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{kind}{more}\r\n"
    writer.write(head.encode("latin-1") + body)
    await writer.drain()


async def until_gone(reader):
    global left
    while await reader.read(65536):
        pass
    left += 1


async def serve(reader, writer):
    try:
        method, target, headers = await head_of(reader)
        await ROUTES.get(target.partition("?")[0], echo)(reader, writer, method, target, headers)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    except NoHttp:
        await answer(writer, b"", "400 Bad Request")
    finally:
        writer.close()


async def echo(reader, writer, method, target, headers):
    digest, size = hashlib.sha256(), 0
    async for piece in body_of(reader, headers):
        digest.update(piece)
        size += len(piece)
    seen = {"method": method, "target": target, "headers": headers, "size": size}
    seen["sha256"] = digest.hexdigest()
    body = b"" if method == "HEAD" else json.dumps(seen).encode()
    more = "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Of-App: yes\r\nKeep-Alive: timeout=5\r\n"
    await answer(writer, body, more=more)


async def chunked(reader, writer, method, target, headers):
    """One piece at once, the rest after a request for /go."""
    GO.clear()
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n")
    writer.write(b'Content-Type: text/event-stream\r\n\r\n10\r\ndata: {"n": 1}\n\n\r\n')
    await writer.drain()
    await GO.wait()
    writer.write(b'10\r\ndata: {"n": 2}\n\n\r\n0\r\n\r\n')
    await writer.drain()


async def go(reader, writer, method, target, headers):
    GO.set()
    await answer(writer, b"{}")


async def until_close(reader, writer, method, target, headers):
    writer.write(b"HTTP/1.0 200 OK\r\n\r\nall there is")
    await writer.drain()


async def big(reader, writer, method, target, headers):
    size = int(target.partition("?")[2])
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
    piece = bytes(65536)
    for _ in range(size // len(piece)):
        writer.write(piece)
        await writer.drain()


async def raw(reader, writer, method, target, headers):
    """The bytes in the query, which are in hex."""
    writer.write(bytes.fromhex(target.partition("?")[2]))
    await writer.drain()


async def early(reader, writer, method, target, headers):
    await answer(writer, b'{"too": "large"}', "413 Too Large")


async def hang(reader, writer, method, target, headers):
    await until_gone(reader)


async def count_left(reader, writer, method, target, headers):
    await answer(writer, json.dumps(left).encode())


async def status(reader, writer, method, target, headers):
    await answer(writer, b"", target.partition("?")[2] + " Some Status")


async def page(reader, writer, method, target, headers):
    await answer(writer, PAGE, more="Content-Type: text/html\r\n")


async def frame_from(reader):
    first, second = await reader.readexactly(2)
    size = second & 127
    if size > 125:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
    mask = await reader.readexactly(4)
    data = await reader.readexactly(size)
    return first & 15, first >> 7, bytes(b ^ mask[i % 4] for i, b in enumerate(data))


def frame(opcode, data, fin=1):
    n = len(data)
    size = bytes([n]) if n < 126 else b"\x7f" + n.to_bytes(8, "big")
    return bytes([fin << 7 | opcode]) + size + data


async def socket(reader, writer, method, target, headers):
    global left
    found = {name.lower(): value for name, value in headers}
    accept = hashlib.sha1((found["sec-websocket-key"] + GUID).encode()).digest()
    offered = [p.strip() for p in found.get("sec-websocket-protocol", "").split(",") if p.strip()]
    chosen = f"Sec-WebSocket-Protocol: {offered[-1]}\r\n" if offered else ""
    writer.write(
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"X-Of-App: yes\r\nSec-WebSocket-Accept: {base64.b64encode(accept).decode()}\r\n"
            f"{chosen}\r\n"
        ).encode()
    )
    seen = {"target": target, "headers": headers, "offered": offered}
    writer.write(frame(1, json.dumps(seen).encode()))
    while True:
        try:
            opcode, _, data = await frame_from(reader)
        except asyncio.IncompleteReadError:
            left += 1
            return
        if opcode == 8:
            CLOSES.append(int.from_bytes(data[:2], "big") if data else None)
            writer.write(frame(8, data))
            return
        if data.startswith(b"close "):
            writer.write(frame(8, int(data[6:10]).to_bytes(2, "big") + data[10:]))
        elif data == b"drop":
            return
        elif data == b"parts":
            writer.write(frame(1, b"one ", 0) + frame(9, b"?") + frame(0, b"two"))
        else:
            writer.write(frame(opcode, data))
        await writer.drain()


async def closes(reader, writer, method, target, headers):
    await answer(writer, json.dumps(CLOSES).encode())


PAGE = b"<title>hello</title><h1 style='color:green'>Served from a sandbox</h1>"
CLOSES = []
ROUTES = {
    "/chunked": chunked,
    "/go": go,
    "/until-close": until_close,
    "/big": big,
    "/raw": raw,
    "/early": early,
    "/hang": hang,
    "/left": count_left,
    "/status": status,
    "/page": page,
    "/socket": socket,
    "/closes": closes,
}


async def main():
    global GO
    GO = asyncio.Event()
    host = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    server = await asyncio.start_server(serve, host, int(sys.argv[1]))
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
