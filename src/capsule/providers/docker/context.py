"""A build's context: a tar from somebody, looked through before the Engine gets it.

The Engine unpacks it in a folder of its own and follows no link out of it; what is refused here is
what no honest context has, and what would only fail later with less to say.
"""

from __future__ import annotations

import posixpath
import re
import string
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from capsule.errors import InvalidError, TooLargeError
from capsule.providers.local.tarball import Kind, Member, Tar, shown

MOST_ENTRIES = 200_000
MOST_DOCKERFILE = 1024 * 1024

_INSTRUCTION = re.compile(r"^\s*(ARG|FROM)\s+(.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", re.ASCII)
_DIRECTIVE = re.compile(r"^#\s*escape\s*=\s*(\S)", re.IGNORECASE)


def check_context(context: BinaryIO, file: str, *, most: int) -> str:
    """The text of the file `file` in it. Blocks; the context is at its start afterwards.

    Raises InvalidError, TooLargeError.
    """
    wanted = posixpath.normpath(file)
    text: str | None = None
    size = 0
    tar = Tar(context)
    for count, member in enumerate(tar):
        if count >= MOST_ENTRIES:
            raise TooLargeError(
                f"the build context has more than {MOST_ENTRIES} entries", limit=MOST_ENTRIES
            )
        path = _checked(member)
        size += member.size
        if size > most:
            raise too_large(most)
        if path == wanted and member.kind is Kind.FILE:
            text = _text(tar, member)
    context.seek(0)
    if text is None:
        raise InvalidError(
            f"the build context has no file {file[:200]!r}",
            hint="say which one it is with `file`",
            field="file",
        )
    return text


def too_large(most: int) -> TooLargeError:
    return TooLargeError(
        f"the build context is larger than {most} bytes",
        hint="leave out what the build does not need with a .dockerignore, or raise max_context",
        limit=most,
    )


def _checked(member: Member) -> str:
    parts = [part for part in member.path.split(b"/") if part not in (b"", b".")]
    if member.path.startswith(b"/") or b".." in parts:
        raise InvalidError(f"the build context leaves its folder: {shown(member.path)}")
    if member.kind is Kind.OTHER:
        raise InvalidError(
            f"the build context has what is no file, folder or link: {shown(member.path)}",
            hint="leave out devices, pipes and sockets",
        )
    return b"/".join(parts).decode("utf-8", "surrogateescape")


def _text(tar: Tar, member: Member) -> str:
    if member.size > MOST_DOCKERFILE:
        raise TooLargeError(
            f"{shown(member.path)} is larger than {MOST_DOCKERFILE} bytes", limit=MOST_DOCKERFILE
        )
    return b"".join(tar.data()).decode("utf-8", "replace")


def bases(text: str, args: Mapping[str, str]) -> list[str]:
    """The images that a Dockerfile starts from, as far as it can be told without building it."""
    known: dict[str, str] = {}
    stages: set[str] = set()
    found: list[str] = []
    for line in _logical_lines(text):
        if (instruction := _INSTRUCTION.match(line)) is None:
            continue
        if instruction[1].upper() == "ARG" and not stages and not found:
            name, _, default = instruction[2].strip().partition("=")
            known[name] = args.get(name, default.strip("\"'"))
        elif instruction[1].upper() == "FROM":
            words = [w for w in instruction[2].split() if not w.startswith("--")]
            image = _expanded(words[0], known) if words else ""
            if image and image != "scratch" and image.lower() not in stages:
                found.append(image)
            stages.add(words[2].lower() if len(words) > 2 else f"\n{len(stages)}")
    return found


def _logical_lines(text: str) -> Iterator[str]:
    directive = next((m for line in text.splitlines() if (m := _DIRECTIVE.match(line))), None)
    escape = directive[1] if directive else "\\"
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue  # also between the parts of a line that goes on
        stripped = line.rstrip()
        if stripped.endswith(escape):
            joined += stripped[:-1] + " "
            continue
        yield joined + line
        joined = ""
    yield joined


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """Empty where it cannot be told: whoever asks then lets the Engine find out."""
    text = _VARIABLE.sub(lambda m: known.get(m[1] or m[2]) or m[3] or "", word)
    return text if set(text) <= set(string.ascii_letters + string.digits + "._-/:@") else ""
