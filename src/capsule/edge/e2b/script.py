"""A template's steps, as E2B's SDKs send them, as a Dockerfile and the context that it needs.

Nothing of what a step says can become an instruction of its own: commands and paths are JSON, names
are checked, and what would need a line break is refused.

Programs of a sandbox have its disk at /home/user, so what a build leaves there is put aside (HOME),
and copied to its place when a sandbox begins.
"""

from __future__ import annotations

import gzip
import io
import json
import posixpath
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

from msgspec import Meta
from msgspec import field as named

from capsule.edge.e2b.control_shapes import Body
from capsule.edge.errors import invalid_field
from capsule.errors import InvalidError, TooLargeError
from capsule.service import spool

USER = "user"
PLACE = "/home/user"
HOME = "/.home"  # of an image: what its user's home begins with
_TAR = f"{HOME}.tar"  # the same, where there is tar: who may read files of an image is up to a host
PREPARE = f"if [ -e {_TAR} ]; then tar -C {PLACE} -xf {_TAR}; else cp -a {HOME}/. {PLACE}/; fi"
BASE, FINALIZE = "base", "finalize"
MOST_STEPS = 500
MOST_ENTRIES = 50_000
_AT_ONCE = 1024 * 1024

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,254}", re.ASCII)
_MODE = re.compile(r"[0-7]{3,5}", re.ASCII)
HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)

# The user that E2B's templates have, whatever the image calls this id.
_MAKE_USER = (
    f"grep -q '^{USER}:' /etc/passwd || echo '{USER}:x:1000:1000::{PLACE}:/bin/sh' >> /etc/passwd;"
    f" grep -q '^{USER}:' /etc/group || echo '{USER}:x:1000:' >> /etc/group;"
    f" mkdir -p {PLACE} && chown 1000:1000 {PLACE}"
)
_KEEP_HOME = (
    f"rm -rf {HOME} {_TAR} && if command -v tar >/dev/null;"
    f" then tar -C {PLACE} -cf {_TAR} . && chmod 644 {_TAR};"
    f" else mkdir {HOME} && cp -a {PLACE}/. {HOME}/ && chmod -R a+rX {HOME}; fi"
)
_ANY_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
_MAKE_DIR = '[ -d "$0" ] || { mkdir -p "$0" && chown "$1" "$0"; }'

Arg = Annotated[str, Meta(max_length=64 * 1024)]


class E2bStep(Body, kw_only=True, frozen=True):
    type: Annotated[str, Meta(max_length=32)]
    args: Annotated[list[Arg], Meta(max_length=512)] = named(default_factory=list)
    files_hash: Annotated[str, Meta(max_length=64)] | None = None
    force: bool = False


class E2bBuild(Body, kw_only=True, frozen=True):
    """How a template is built, and what its sandboxes begin with."""

    from_image: Annotated[str, Meta(max_length=255)] | None = None
    from_template: Annotated[str, Meta(max_length=128)] | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool = False
    steps: Annotated[list[E2bStep], Meta(max_length=MOST_STEPS)] = named(default_factory=list)
    start_cmd: Arg | None = None
    ready_cmd: Arg | None = None


class Copied(NamedTuple):
    """An upload, and where in the context it goes."""

    hash: str
    folder: str
    mode: int | None


@dataclass(slots=True)
class Script:
    lines: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)  # which step each instruction is of
    copied: list[Copied] = field(default_factory=list)

    def add(self, line: str, mark: str) -> None:
        assert "\n" not in line and "\r" not in line
        self.lines.append(line)
        self.marks.append(mark)

    def run(self, mark: str, *argv: str) -> None:
        self.add(f"RUN {json.dumps(argv)}", mark)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def step(self, number: int) -> str:
        """Of an instruction, by its number. What comes after the last one is the end."""
        return self.marks[number - 1] if 0 < number <= len(self.marks) else FINALIZE


def script(image: str, steps: Sequence[E2bStep]) -> Script:
    """Raises InvalidError, which names the step."""
    if not _IMAGE.fullmatch(image):
        raise invalid_field("fromImage", f"{image[:60]!r} is no name of an image")
    made, user = Script(), USER
    made.add(f"FROM {image}", BASE)
    made.add("USER root", BASE)
    made.run(BASE, "/bin/sh", "-c", _MAKE_USER)
    made.add(f"WORKDIR {PLACE}", BASE)
    made.add(f"USER {user}", BASE)
    for index, step in enumerate(steps):
        user = _add(made, step, index, user)
    made.add("USER root", FINALIZE)
    made.run(FINALIZE, "/bin/sh", "-c", _KEEP_HOME)
    return made


def _add(made: Script, step: E2bStep, index: int, user: str) -> str:
    """Who the user is afterwards."""
    mark, where = str(index + 1), f"steps.{index}.args"
    args = step.args
    if any("\0" in arg for arg in args):
        raise invalid_field(where, "has a NUL in it")
    match step.type.upper(), args:
        case "RUN", [command] | [command, ""]:
            made.run(mark, "/bin/sh", "-c", _ANY_SHELL, command)
        case "RUN", [command, other]:
            made.add(f"USER {_user(other, where)}", mark)
            made.run(mark, "/bin/sh", "-c", _ANY_SHELL, command)
            made.add(f"USER {user}", mark)
        case "ENV", [*pairs] if pairs and len(pairs) % 2 == 0:
            for name, value in zip(pairs[::2], pairs[1::2], strict=True):
                made.add(f"ENV {_variable(name, where)}={_quoted(value, where)}", mark)
        case "WORKDIR", [path] if path:
            made.add("USER root", mark)
            made.run(mark, "/bin/sh", "-c", _MAKE_DIR, path, user)
            made.add(f"WORKDIR {_quoted(path, where)}", mark)
            made.add(f"USER {user}", mark)
        case "USER", [name]:
            user = _user(name, where)
            made.add(f"USER {user}", mark)
        case "COPY", [source, target, *more] if source and target and len(more) <= 2:
            _copy(made, step, (source, target), [*more, "", ""][:2], mark, where, user)
        case _:
            raise invalid_field(
                f"steps.{index}",
                f"{step.type[:20]!r} with {len(args)} arguments is no step",
                hint="there are RUN, COPY, ENV, WORKDIR and USER",
            )
    return user


def _copy(
    made: Script,
    step: E2bStep,
    paths: tuple[str, str],
    more: Sequence[str],
    mark: str,
    where: str,
    user: str,
) -> None:
    if step.files_hash is None or not HASH.fullmatch(step.files_hash):
        raise invalid_field(where, "COPY needs the hash of its files")
    owner, mode = more
    if mode and not _MODE.fullmatch(mode):
        raise invalid_field(where, f"{mode[:20]!r} is no mode, such as 0755")
    source = posixpath.normpath(paths[0])
    if source.startswith(("/", "../")) or source == "..":
        raise invalid_field(where, f"{paths[0][:100]!r} leaves the folder of the template")
    folder = f"files/{len(made.copied)}"
    made.copied.append(Copied(step.files_hash, folder, int(mode, 8) if mode else None))
    words = [_literal(f"{folder}/{source}"), _literal(paths[1])]
    name = _user(owner, where) if owner else user
    group = name if name in (USER, "root") or name.isdecimal() else ""
    made.add(f"COPY --chown={name}{':' + group if group else ''} {json.dumps(words)}", mark)


def _user(name: str, where: str) -> str:
    if not _USER.fullmatch(name):
        raise invalid_field(where, f"{name[:40]!r} is no user's name")
    return name


def _variable(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise invalid_field(where, f"{name[:60]!r} is no name of a variable")
    return name


def _quoted(value: str, where: str) -> str:
    """As it stands there, with nothing replaced."""
    if any(c in value for c in "\n\r"):
        raise invalid_field(where, "has a line break in it, which a Dockerfile cannot say")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _literal(word: str) -> str:
    return word.replace("\\", "\\\\").replace("$", "\\$")


def context(made: Script, uploads: Path, data_dir: Path, most: int) -> BinaryIO:
    """A tar with the Dockerfile and what it copies, in a file without a name. Blocks.

    Raises InvalidError, TooLargeError.
    """
    file = spool(data_dir)
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as out:
            text = made.text.encode()
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(text)
            out.addfile(entry, io.BytesIO(text))
            left = Left(most, MOST_ENTRIES)
            for copied in made.copied:
                _take(out, uploads / copied.hash, copied, left)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


@dataclass(slots=True)
class Left:
    """What all uploads of a build together may still have."""

    bytes: int
    entries: int

    def take(self, size: int) -> None:
        self.bytes -= size
        self.entries -= 1
        if self.bytes < 0 or self.entries < 0:
            raise TooLargeError(
                "the files of the build are too many or too large",
                hint="leave out what the build does not need, or raise max_context",
            )


def _take(out: tarfile.TarFile, path: Path, copied: Copied, left: Left) -> None:
    try:
        with open(path, "rb") as raw, _opened(raw, left.bytes) as upload:
            for member in upload:
                if (entry := _entry(member, copied)) is not None:
                    left.take(entry.size)
                    out.addfile(entry, upload.extractfile(member) if entry.isreg() else None)
    except FileNotFoundError:
        raise InvalidError(
            f"the files {copied.hash[:12]} were not uploaded, or were removed meanwhile",
            hint="build again; with forceUpload, if that does not help",
        ) from None
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InvalidError(f"the upload {copied.hash[:12]} is no tar: {error}") from error


def _entry(member: tarfile.TarInfo, copied: Copied) -> tarfile.TarInfo | None:
    """As it goes into the context; None: not at all. Raises InvalidError."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts:
        raise InvalidError(f"a file of the build leaves its folder: {member.name[:100]!r}")
    if not parts:
        return None
    if not (member.isreg() or member.isdir() or member.issym()):
        raise InvalidError(
            f"a file of the build is no file, folder or link: {member.name[:100]!r}",
            hint="leave out devices, pipes and hard links",
        )
    entry = tarfile.TarInfo("/".join([copied.folder, *parts]))
    entry.type, entry.mtime = member.type, member.mtime
    entry.mode = member.mode & 0o777
    if copied.mode is not None and member.isreg():
        entry.mode = copied.mode & 0o777
    if member.isreg():
        entry.type, entry.size = tarfile.REGTYPE, member.size
    if member.issym():
        entry.linkname = member.linkname
    return entry


def _opened(raw: BinaryIO, most: int) -> tarfile.TarFile:
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    limited = Limited(stream, most + MOST_ENTRIES * 2048)
    return tarfile.open(fileobj=cast(BinaryIO, limited), mode="r|")


class Limited:
    """A stream that ends with an error where it gets too long, or much is asked for at once: a few
    packed bytes may be many, and a header may say that it is as large as it likes."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self._stream = stream
        self._left = most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise tarfile.ReadError("a header that is too long")
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TooLargeError("the files of the build are too large", hint="raise max_context")
        return data
