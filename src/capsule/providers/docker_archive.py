"""Image archives as `docker save` writes them, made here: the form in which images move."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)


def header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)  # one block, whatever the size


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def manifest(config: str, layers: Sequence[str], reference: str) -> bytes:
    return json.dumps(
        [{"Config": config, "RepoTags": [reference], "Layers": list(layers)}]
    ).encode()


def config_name(config: bytes) -> str:
    return f"{hashlib.sha256(config).hexdigest()}.json"


def entry(name: str, size: int, content: Iterable[bytes]) -> Iterator[bytes]:
    """A member whose size is known beforehand."""
    yield header(name, size)
    yield from content
    yield padding(size)


class Writer:
    """Into a file that can seek: a layer's size is known when it has been written."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target

    def add(self, name: str, data: bytes) -> None:
        for piece in entry(name, len(data), [data]):
            self._target.write(piece)

    @contextmanager
    def adding(self, name: str) -> Iterator[Hashing]:
        """What is written in the block is the member's content."""
        at = self._target.tell()
        self._target.write(bytes(len(header(name, 0))))
        content = Hashing(self._target.write)
        yield content
        self._target.write(padding(content.size))
        end = self._target.tell()
        self._target.seek(at)
        self._target.write(header(name, content.size))
        self._target.seek(end)

    def finish(self) -> None:
        self._target.write(END)


class Hashing:
    """Passes bytes on, and knows how many there were and their SHA-256."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        self._write(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
