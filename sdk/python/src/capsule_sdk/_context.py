"""A folder as the context of a build: a tar of what its .dockerignore does not leave out.

Symlinks go along as they are and are never followed, so nothing outside the folder gets in. The
patterns are Docker's: `*`, `?` and `[…]` within a name, `**` for any number of folders, `!` for
what is to be kept after all; the last pattern that matches decides.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from .errors import InvalidError, NotFoundError, TooLargeError

IGNORE_FILE = ".dockerignore"
CHUNK = 256 * 1024
BLOCK = tarfile.BLOCKSIZE
_FILE = os.O_RDONLY
for _flag in (
    "O_NOFOLLOW",
    "O_NONBLOCK",
    "O_CLOEXEC",
    "O_BINARY",
):  # as far as this system has them
    _FILE |= getattr(os, _flag, 0)


def pack_context(
    folder: Path, *, file: str = "Dockerfile", most: int | None = None
) -> Iterator[bytes]:
    """The tar, piece by piece. `file` is the Dockerfile, relative to the folder; with `most` a
    context of more bytes is a TooLargeError."""
    if not folder.is_dir():
        raise NotFoundError(f"not a folder: {folder}", hint="name the one with the Dockerfile")
    name = PurePosixPath(file).as_posix()
    if not (folder / name).is_file():
        raise NotFoundError(
            f"no {name} in {folder}", hint="say which one it is, relative to the folder"
        )
    ignored = Ignored.read(folder / IGNORE_FILE, keep=(name, IGNORE_FILE))
    size = 0
    for path, relative in _walk(folder, ignored):
        for piece in _member(path, relative):
            size += len(piece)
            if most is not None and size > most:
                raise TooLargeError(
                    f"the build context {folder} is larger than {most} bytes",
                    hint=f"leave out what the build does not need with a {IGNORE_FILE}",
                    limit=most,
                )
            yield piece
    yield bytes(2 * BLOCK)


class Ignored:
    """What a .dockerignore says of a path."""

    def __init__(self, lines: list[str], keep: tuple[str, ...] = ()) -> None:
        """`keep` is what the Engine needs, whatever the patterns say."""
        self._keep = frozenset(keep)
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in lines:
            text = line.strip()
            if not text or line.startswith("#"):
                continue
            negated = text.startswith("!")
            pattern = _clean(text[1:] if negated else text)
            if pattern:
                self._rules.append((not negated, _compiled(pattern)))
        self._exceptions = any(not leaves_out for leaves_out, _ in self._rules)

    @classmethod
    def read(cls, file: Path, keep: tuple[str, ...] = ()) -> Ignored:
        try:
            text = file.read_text("utf-8-sig", "surrogateescape")
        except FileNotFoundError:
            return cls([], keep)
        return cls(text.splitlines(), keep)

    def __call__(self, path: str) -> bool:
        """Whether it is left out. A pattern that matches a folder matches all that is in it."""
        if path in self._keep:
            return False
        parts = path.split("/")
        prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        left_out = False
        for leaves_out, pattern in self._rules:
            if leaves_out != left_out and any(pattern.fullmatch(each) for each in prefixes):
                left_out = leaves_out
        return left_out

    def whole(self, folder: str) -> bool:
        """Whether nothing in the folder can be kept after all, so that nobody need look."""
        needed = any(each.startswith(f"{folder}/") for each in self._keep)
        return self(folder) and not self._exceptions and not needed


def _clean(pattern: str) -> str:
    """`./a//b/` and `/a/b` → `a/b`; `..` is taken by its word, as Docker does."""
    return os.path.normpath(pattern.strip()).lstrip("/") if pattern.strip() else ""


def _compiled(pattern: str) -> re.Pattern[str]:
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**", at):
            at += 3 if pattern.startswith("/", at + 2) else 2
            out += "(?:.*/)?" if at < len(pattern) else ".*"
            continue
        if char == "[" and (end := pattern.find("]", at + 2)) > 0:
            out += _class(pattern[at + 1 : end])
            at = end + 1
            continue
        if char == "\\" and at + 1 < len(pattern):
            at += 1
            out += re.escape(pattern[at])
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        at += 1
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise InvalidError(f"{IGNORE_FILE}: not a pattern: {pattern!r}: {error}") from error


def _class(inside: str) -> str:
    negated = inside[:1] in ("^", "!")
    chars = inside[1:] if negated else inside
    safe = chars.replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
    return f"[{'^/' if negated else ''}{safe}]"


def _walk(folder: Path, ignored: Ignored) -> Iterator[tuple[Path, str]]:
    todo = [(folder, "")]
    while todo:
        place, prefix = todo.pop()
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                relative = prefix + entry.name
                is_dir = entry.is_dir(follow_symlinks=False)
                if not ignored(relative):
                    yield Path(entry.path), relative
                if is_dir and not ignored.whole(relative):
                    todo.append((Path(entry.path), f"{relative}/"))


def _member(path: Path, name: str) -> Iterator[bytes]:
    found = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISREG(found.st_mode):
        with os.fdopen(os.open(path, _FILE), "rb") as file:
            yield from _file(info, file)
        return
    else:
        return  # a socket or a pipe: no build can use it
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _file(info: tarfile.TarInfo, file: IO[bytes]) -> Iterator[bytes]:
    """Exactly as many bytes as were announced, though the file may change while it is read."""
    about = os.fstat(file.fileno())
    info.size = about.st_size if stat.S_ISREG(about.st_mode) else 0
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    left = info.size
    while left:
        chunk = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
        left -= len(chunk)
        yield chunk
    yield bytes(-info.size % BLOCK)
