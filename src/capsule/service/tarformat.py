"""Headers of tar archives, without any reading or writing of our own.

Read: ustar, pax and GNU (long names, sizes over 8 GiB), and the old format before them. Written:
ustar, with a pax header in front where a name, target or size does not fit. Anything malformed
is an InvalidError in one line; names are bytes on Linux and pass through as `surrogateescape`
writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from capsule.errors import InvalidError

BLOCK = 512
MAX_EXTENSION = 1024 * 1024  # bytes of one pax header or GNU long name
END = bytes(2 * BLOCK)

FILE, HARD_LINK, SYMLINK, FOLDER = b"0", b"1", b"2", b"5"
PAX, PAX_GLOBAL, GNU_NAME, GNU_TARGET = b"x", b"g", b"L", b"K"
SPECIAL = {b"3": "a character device", b"4": "a block device", b"6": "a FIFO"}

_OCTAL_MOST = 8**11 - 1


@dataclass(frozen=True, slots=True)
class Header:
    name: str
    type: bytes
    size: int = 0
    mode: int = 0o644
    mtime: int = 0
    target: str = ""
    uid: int = 0
    gid: int = 0


def parse_header(block: bytes) -> Header | None:
    """None: a block of zeros, which ends the archive."""
    if block.count(0) == BLOCK:
        return None
    if not _is_header(block):
        raise InvalidError("archive: a header's checksum is wrong; this is not a tar archive")
    name = _text(block[0:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = f"{prefix}/{name}"
    type = block[156:157]
    if type in (b"\0", b"7"):
        type = FOLDER if name.endswith("/") else FILE
    size = _number(block[124:136], "size")
    return Header(
        name=name,
        type=type,
        size=0 if type in (HARD_LINK, SYMLINK, FOLDER) or type in SPECIAL else size,
        mode=_number(block[100:108], "mode") & 0o7777,
        mtime=_number(block[136:148], "mtime"),
        target=_text(block[157:257]),
    )


def parse_pax(data: bytes) -> dict[str, str]:
    """The records of a pax header: `LENGTH KEY=VALUE\\n`, the length counting all of it."""
    found: dict[str, str] = {}
    position = 0
    while position < len(data) and data[position]:
        digits, space, _ = data[position : position + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = data[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if length < 5 or position + length > len(data) or not equals or value[-1:] != b"\n":
            raise InvalidError("archive: a pax header is malformed")
        found[_decode(key)] = _decode(value[:-1])
        position += length
    return found


def pax_size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidError(f"archive: the size {text[:40]!r} in a pax header is no number")
    return int(text)


def format_header(header: Header) -> Iterator[bytes]:
    """The header's blocks, after a pax header where it needs one."""
    name, target = _encode(header.name), _encode(header.target)
    records = b""
    if len(name) > 100 or not header.name.isascii():
        records += _record(b"path", name)
    if len(target) > 100 or not header.target.isascii():
        records += _record(b"linkpath", target)
    if header.size > _OCTAL_MOST:
        records += _record(b"size", b"%d" % header.size)
    if records:
        yield _block(b"capsule.pax", Header("", PAX, len(records)), b"")
        yield records + padding(len(records))
    yield _block(name[:100], header, target[:100])


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _block(name: bytes, header: Header, target: bytes) -> bytes:
    fields = (
        name.ljust(100, b"\0"),
        b"%07o\0" % (header.mode & 0o7777),
        b"%07o\0" % min(header.uid, 8**7 - 1),
        b"%07o\0" % min(header.gid, 8**7 - 1),
        b"%011o\0" % min(header.size, _OCTAL_MOST),
        b"%011o\0" % max(0, min(header.mtime, _OCTAL_MOST)),
        b" " * 8,
        header.type,
        target.ljust(100, b"\0"),
        b"ustar\0" + b"00",
    )
    block = b"".join(fields).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))  # its own digits count, and may have become one more
    return b"%d %s=%s\n" % (length, key, value)


def _is_header(block: bytes) -> bool:
    """Its checksum is right, or as some old programs reckoned it, with signed bytes."""
    rest = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(rest)
    try:
        stated = _number(block[148:156], "checksum")
    except InvalidError:
        return False
    return stated in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest))


def _number(field: bytes, what: str) -> int:
    if field[0] & 0x80:  # GNU: binary, for what octal cannot hold
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        if field[0] & 0x40 or value >= 2**62:
            raise InvalidError(f"archive: the {what} of an entry is out of range")
        return value
    digits = field.strip(b" \0") or b"0"
    if any(byte not in b"01234567" for byte in digits):
        raise InvalidError(f"archive: the {what} of an entry is no number: {digits[:12]!r}")
    return int(digits, 8)


def _text(field: bytes) -> str:
    return _decode(field.partition(b"\0")[0])


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
