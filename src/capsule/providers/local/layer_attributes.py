"""Extended attributes of files in a layer's stream, or its tar: what programs have noted on them.

For each the length of its name (1 byte), the name, the length of its value (2) and the value. Only
`user.…`, and none of overlayfs's own: with those a program could rule what is seen of the layers
below.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from capsule.errors import InvalidError

_OURS = "user."
_OVERLAY = "user.overlay."
MOST = 32 * 1024  # bytes of one file's
_LONGEST = 255  # bytes of a name, as Linux has it


def packed(fd: int) -> bytes:
    """Of an open file. What is more than `MOST` is left out."""
    return pack(_read(fd))


def pack(attributes: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Of anybody's: what is not to be kept, or more than `MOST`, is left out."""
    made = bytearray()
    for name, value in attributes:
        fits = len(name) <= _LONGEST and len(made) + len(name) + len(value) + 3 <= MOST
        if fits and _is_noted(os.fsdecode(name)):
            made += bytes([len(name)]) + name + len(value).to_bytes(2, "big") + value
    return bytes(made)


def _read(fd: int) -> Iterator[tuple[bytes, bytes]]:
    try:
        found = os.listxattr(fd)
    except OSError:  # its file system has none
        return
    for name in found:
        if not _is_noted(name):
            continue
        try:
            value = os.getxattr(fd, name)
        except OSError:
            continue
        yield os.fsencode(name), value


def _is_noted(name: str) -> bool:
    return name.startswith(_OURS) and not name.startswith(_OVERLAY)


def give(fd: int, raw: bytes) -> None:
    """To an open file. A file system that has none, or no room for them, leaves them out."""
    for name, value in told(raw):
        if _is_noted(name):
            with contextlib.suppress(OSError):
                os.setxattr(fd, name, value)


def told(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Raises InvalidError: whoever wrote it may have been hostile."""
    at = 0
    while at < len(raw):
        end = at + 1 + raw[at]
        name, size = raw[at + 1 : end], int.from_bytes(raw[end : end + 2], "big")
        value = raw[end + 2 : end + 2 + size]
        at = end + 2 + size
        if at > len(raw) or b"\0" in name:
            raise InvalidError("the layer has attributes of a file that cannot be read")
        yield os.fsdecode(name), value
