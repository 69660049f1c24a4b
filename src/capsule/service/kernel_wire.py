"""What a kernel says, taken out of what its program prints. Sans-I/O; spec/kernel.md is the text.

Nothing here is trusted: the code that a kernel runs can write whatever it likes to the same pipe.
Whatever comes is output, a message, or dropped and counted; sizes and depths have limits, and no
input raises.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

NONCE = 16  # characters
MAX_MESSAGE = 8 * 1024 * 1024
MAX_PAYLOAD = 4096 - 22
MAX_JSON = 1024 * 1024  # of a form that is JSON, and so has to be looked into
MAX_WORDS = 64 * 1024  # of what a kernel says about its forms and imports
MAX_DEPTH = 64

# An interrupt may come before a run has begun; a shell between two commands may lose one. So it is
# repeated this often, until the run ends or says that it was hit.
PRESS = 0.3

_HEAD = 5  # after the marker: a flag and four hexadecimal digits
NOTHING = msgspec.Raw()


class Ready(msgspec.Struct, tag_field="k", tag="ready", frozen=True):
    version: str = ""
    failed: msgspec.Raw = NOTHING  # imports, and what went wrong: {"name": "text"}


class Hit(msgspec.Struct, tag_field="k", tag="hit", frozen=True):
    """An interrupt has reached the run."""

    run: int


class Shown(msgspec.Struct, tag_field="k", tag="result", frozen=True, kw_only=True):
    """A value in every form that it offers; `main`: the last expression's."""

    main: bool = False
    text: str | UnsetType = UNSET
    html: str | UnsetType = UNSET
    markdown: str | UnsetType = UNSET
    svg: str | UnsetType = UNSET
    png: str | UnsetType = UNSET  # base64, as are jpeg and pdf
    jpeg: str | UnsetType = UNSET
    latex: str | UnsetType = UNSET
    json: msgspec.Raw = NOTHING
    pdf: str | UnsetType = UNSET
    javascript: str | UnsetType = UNSET
    data: msgspec.Raw = NOTHING  # of a table
    chart: msgspec.Raw = NOTHING
    errors: msgspec.Raw = NOTHING  # forms that could not be made: {"form": "text"}


class Raised(msgspec.Struct, tag_field="k", tag="error", frozen=True):
    name: str = ""
    value: str = ""
    traceback: str = ""


class Ended(msgspec.Struct, tag_field="k", tag="end", frozen=True):
    """Of a run; also on stderr, where nothing of it follows."""

    run: int
    status: str = ""
    code: int | None = None


class Synced(msgspec.Struct, tag_field="k", tag="sync", frozen=True):
    run: int


class Dropped(msgspec.Struct, tag_field="k", tag="", frozen=True):
    """A message that was too large, not understood, or cut."""


Message = Ready | Hit | Shown | Raised | Ended | Synced
Said = bytes | Message | Dropped

_decode = msgspec.json.Decoder(Message).decode


def hello(kernel: str, nonce: str, imports: tuple[str, ...]) -> bytes:
    """The first line for a kernel."""
    if kernel == "bash":
        return nonce.encode() + b"\n"
    return _line({"op": "hello", "nonce": nonce, "imports": imports})


def run(kernel: str, number: int, code: str, env: Mapping[str, str] | None = None) -> bytes:
    if kernel == "bash":
        code = "".join(_export(name, value) for name, value in (env or {}).items()) + code
        escaped = code.replace("\\", "\\\\").replace("\n", "\\n")
        return f"{number} {escaped}\n".encode()
    more = {"env": env} if env else {}
    return _line({"op": "run", "run": number, "code": code, **more})


def _export(name: str, value: str) -> str:
    """Before the code, in its first line; the kernel takes it back as it is told here."""
    before = f'[[ -v {name} ]] && __capsule_undo+="export {name}=${{{name}@Q}};"'
    return f'{before} || __capsule_undo+="unset {name};"; export {name}={shlex.quote(value)}; '


def sync(kernel: str, number: int) -> bytes:
    """Answered when all before it is done. Begins with a new line, as a server that died while it
    wrote may have left half of one."""
    if kernel == "bash":
        return f"\n{number}\n".encode()
    return b"\n" + _line({"op": "sync", "run": number})


def interrupt(kernel: str, number: int) -> bytes:
    """For a kernel that reads while it runs code. Nothing: it wants a SIGINT."""
    return _line({"op": "interrupt", "run": number}) if kernel == "node" else b""


def insist(kernel: str) -> str:
    """The signal for code that was interrupted and goes on. Nothing: the kernel has none."""
    return "QUIT" if kernel == "python" else ""


def signal_for_all(kernel: str) -> str:
    """For an interpreter that does not hear interrupts, and whatever it may be waiting for. A shell
    takes a SIGTERM for one, as its code may ignore the other; and a job of its own that dies of a
    SIGINT takes it along."""
    return "TERM" if kernel == "bash" else "INT"


def _line(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


class Splitter:
    """Of one stream. Holds back a message that is not complete, and what may be the beginning of a
    marker: no more than MAX_MESSAGE bytes and one chunk.
    """

    def __init__(self, nonce: str) -> None:
        self._marker = b"\0" + nonce.encode("ascii")
        self._rest = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._open = False  # a message has begun

    def feed(self, data: bytes) -> Iterator[Said]:
        if not self._rest and not self._open and b"\0" not in data:
            yield data
            return
        data = self._rest + data
        at = 0
        while (found := data.find(self._marker, at)) >= 0:
            if found > at:
                yield data[at:found]
            body = found + len(self._marker) + _HEAD
            size = _size(data[found + len(self._marker) : body])
            if size is None:  # no header of ours: somebody printed the marker
                yield self._marker
                at = found + len(self._marker)
                continue
            if len(data) < body + max(size, 0) or size < 0:
                self._rest = data[found:]
                return
            at = body + size
            yield from self._chunk(data[body - _HEAD], data[body:at])
        keep = self._tail(data, at)
        if keep > at:
            yield data[at:keep]
        self._rest = data[keep:]

    def _tail(self, data: bytes, at: int) -> int:
        """Where the beginning of a marker may stand at the end of `data`."""
        zero = data.rfind(b"\0", max(at, len(data) - len(self._marker) + 1))
        return zero if zero >= 0 and self._marker.startswith(data[zero:]) else len(data)

    def _chunk(self, flag: int, payload: bytes) -> Iterator[Message | Dropped]:
        if flag in b"SB":
            if self._open:
                yield Dropped()  # the last one was never finished
            self._parts, self._size, self._open = [], 0, True
        elif not self._open:
            return  # its beginning was lost, and told of
        self._size += len(payload)
        if self._size <= MAX_MESSAGE:
            self._parts.append(payload)
        else:
            self._parts.clear()
        if flag in b"SE":
            message = b"".join(self._parts) if self._size <= MAX_MESSAGE else b""
            self._parts, self._open = [], False
            yield understand(message)

    def gap(self) -> Iterator[Said]:
        """Bytes were lost: what was held back makes no sense any more."""
        if self._open:
            yield Dropped()
        self._rest, self._parts, self._size, self._open = b"", [], 0, False

    def finish(self) -> Iterator[Said]:
        """Nothing follows: what was held back was output."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest


def _size(head: bytes) -> int | None:
    """Of a chunk; -1: the head is not complete. None: it is no head."""
    if head and head[0] not in b"SBME":
        return None
    if len(head) < _HEAD:
        return -1
    digits = head[1:]
    if not all(c in b"0123456789abcdef" for c in digits):
        return None
    size = int(digits, 16)
    return size if size <= MAX_PAYLOAD else None


def understand(data: bytes) -> Message | Dropped:
    try:
        message: Message = _decode(data)
        if isinstance(message, Shown):
            for each in (message.json, message.data, message.chart):
                _check(each)
            words(message.errors)
        elif isinstance(message, Ready):
            words(message.failed)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Dropped()
    return message


def words(raw: msgspec.Raw) -> dict[str, str]:
    if len(raw) > MAX_WORDS:
        raise ValueError("too many words")
    return msgspec.json.decode(raw, type=dict[str, str]) if len(raw) else {}


def _check(raw: msgspec.Raw) -> None:
    """Raises ValueError where it is larger or deeper than a client should have to bear."""
    if len(raw) > MAX_JSON:
        raise ValueError("too large")
    level = [msgspec.json.decode(raw)] if len(raw) else []
    for _ in range(MAX_DEPTH):
        level = [
            each
            for item in level
            if isinstance(item, dict | list)
            for each in (item.values() if isinstance(item, dict) else item)
        ]
    if level:
        raise ValueError("too deep")
