"""Archives made elsewhere: unpacked as they are, and hostile ones refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import (
    ConflictError,
    InvalidError,
    TooLargeError,
)
from capsule.link.link import AgentLink
from capsule.service import archive, tarformat
from capsule.service.tarformat import BLOCK, Header


@dataclass
class Disk:
    """A file system with the agent's operations: path → (type, mode, content or target)."""

    nodes: dict[str, tuple[str, int, bytes]] = field(default_factory=dict)

    def link(self) -> AgentLink:
        return cast(AgentLink, self)

    async def write(
        self, path: str, data: bytes | AsyncIterable[bytes], *, mode: int = 0o644, **_: Any
    ) -> None:
        content = data if isinstance(data, bytes) else b"".join([piece async for piece in data])
        self.nodes[path] = ("file", mode, content)

    async def mkdir(self, path: str, *, mode: int = 0o755, **_: Any) -> None:
        self.nodes.setdefault(path, ("dir", mode, b""))

    async def symlink(self, path: str, target: str) -> None:
        if path in self.nodes:
            raise ConflictError("exists")
        self.nodes[path] = ("symlink", 0o777, target.encode("utf-8", "surrogateescape"))

    async def remove(self, path: str, **_: Any) -> None:
        del self.nodes[path]

    async def chmod(self, path: str, mode: int) -> None:
        kind, _, content = self.nodes[path]
        self.nodes[path] = (kind, mode, content)

    @asynccontextmanager
    async def read(self, path: str) -> AsyncIterator[Reader]:
        _, mode, content = self.nodes[path]
        yield Reader(mode, content)


@dataclass
class Reader:
    mode: int
    content: bytes

    def __aiter__(self) -> AsyncIterator[bytes]:
        return chunked(self.content)


async def chunked(data: bytes, size: int = 700) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def unpacked(data: bytes, size: int = 700) -> dict[str, tuple[str, int, bytes]]:
    disk = Disk()
    await archive.unpack(disk.link(), "/w", chunked(data, size))
    return disk.nodes


def tarred(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as made:
        for info, content in members:
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, type: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = type, target, 0o640
    return info


LONG = "d" * 90 + "/" + "ü" * 60 + "/" + "x" * 120


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", [511, 100_000])
async def test_what_others_pack_is_unpacked(format: int, size: int) -> None:
    names = ["a.txt", "deep/er/b.bin", "d" * 80 + "/" + "n" * 70]
    if format != tarfile.USTAR_FORMAT:
        names.append(LONG)
    data = tarred(*((member(n), n.encode() * 50) for n in names), format=format)
    found = await unpacked(data, size)
    assert {p: c for p, (_, _, c) in found.items()} == {f"/w/{n}": n.encode() * 50 for n in names}
    assert {mode for _, mode, _ in found.values()} == {0o640}


async def test_folders_links_and_hard_links_are_made() -> None:
    closed = member("d/", tarfile.DIRTYPE)
    closed.mode = 0o500
    data = tarred(
        (closed, b""),
        (member("d/file"), b"content"),
        (member("d/sym", tarfile.SYMTYPE, "../../etc/passwd"), b""),
        (member("hard", tarfile.LNKTYPE, "d/file"), b""),
        (member("./", tarfile.DIRTYPE), b""),
    )
    found = await unpacked(data)
    assert found["/w/d"][:2] == ("dir", 0o500)
    assert found["/w/d/sym"] == ("symlink", 0o777, b"../../etc/passwd")
    assert found["/w/hard"] == ("file", 0o640, b"content")


REFUSED = [
    (member("/etc/passwd"), "'/etc/passwd' has an absolute name"),
    (member("a/../../up"), "has '..'"),
    (member("h", tarfile.LNKTYPE, "../../up"), "has '..'"),
    (member("h", tarfile.LNKTYPE, "/etc/passwd"), "absolute"),
    (member("link/deeper/file"), "leads through a symbolic link"),
    (member("h", tarfile.LNKTYPE, "link/passwd"), "leads through"),
    (member("dev", tarfile.BLKTYPE), "is a block device"),
    (member("pipe", tarfile.FIFOTYPE), "is a FIFO"),
    (member("s", b"S"), "is a sparse file"),
    (member("what", b"Z"), "unknown type"),
    (member("l", tarfile.SYMTYPE, ""), "impossible target"),
]


@pytest.mark.parametrize(("entry", "text"), REFUSED)
async def test_hostile_entries_are_refused_by_name(entry: tarfile.TarInfo, text: str) -> None:
    with pytest.raises(InvalidError, match=text):
        await unpacked(tarred((member("link", tarfile.SYMTYPE, "/etc"), b""), (entry, b"")))


@pytest.mark.parametrize("cut", [1, 511, 513, 1024 + 100])
async def test_an_archive_that_ends_early_says_where(cut: int) -> None:
    data = tarred((member("file"), b"x" * 2000))
    with pytest.raises(InvalidError, match="ends in the middle of"):
        await unpacked(data[:cut])


@pytest.mark.parametrize("data", [b"not a tar archive" * 100, b"PK\3\4" + b"x" * 600])
async def test_other_things_are_no_archives(data: bytes) -> None:
    with pytest.raises(InvalidError, match="not a tar archive"):
        await unpacked(data)


async def test_a_huge_extension_header_is_refused_before_it_is_read() -> None:
    blocks = b"".join(tarformat.format_header(Header("x", b"x", size=1 << 32)))
    with pytest.raises(TooLargeError, match="extension header"):
        await unpacked(blocks + bytes(BLOCK))


async def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(TooLargeError, match="more than 3 entries"):
        await unpacked(tarred(*((member(str(n)), b"") for n in range(4))))


@given(st.binary(max_size=3 * BLOCK))
def test_no_block_breaks_the_parser(data: bytes) -> None:
    block = data[:BLOCK].ljust(BLOCK, b"x")
    summed = block[:148] + b"%06o\0 " % sum(block[:148] + b" " * 8 + block[156:]) + block[156:]
    for candidate in (block, summed):
        try:
            tarformat.parse_header(candidate)
        except InvalidError:
            pass
    try:
        tarformat.parse_pax(data)
    except InvalidError:
        pass
