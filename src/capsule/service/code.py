"""How a piece of code becomes a program.

Python and shell code is an argument (`python3 -c`, `bash -c`): one message to the agent instead
of two, nothing in the user's folder, and modules beside the working directory are found. Code
too large for an argument, and every other language, goes into a file in the home, as the
template says (`{file}`). It is removed when the exec's end was seen.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from capsule.errors import InvalidError, NotFoundError, TooLargeError
from capsule.model import ExecId, Language, Template
from capsule.service import carry
from capsule.settings import brief

MAX_INLINE = 100 * 1024  # the kernel takes 128 KiB per argument; preludes need some of it
MAX_CODE = 16 * 1024 * 1024

_FILE = "{file}"
# The path is an argument of its own, as the agent may have to translate it.
_LOADER = "exec((lambda p: compile(open(p, 'rb').read(), p, 'exec'))(__import__('sys').argv.pop()))"
_TAKES_ARGUMENT = re.compile(r"python(3(\.[0-9]+)?)?|(ba|da|z|k)?sh", re.ASCII)


class Program(NamedTuple):
    argv: tuple[str, ...]
    reports: bool = False  # what it changed for its session, through the pipe at fd 3
    path: str | None = None  # of a file to be written before, and removed after
    content: bytes = b""


def command(argv: tuple[str, ...], *, session: bool) -> Program:
    reporting = carry.wrap(argv) if session else None
    return Program(argv) if reporting is None else Program(reporting, reports=True)


def program(
    template: Template, language: str | None, code: str, exec_id: ExecId, *, session: bool
) -> Program:
    """Raises NotFoundError (the language), InvalidError, TooLargeError."""
    how = find_language(template, language)
    content = _encode(code)
    if len(content) <= MAX_INLINE and b"\0" not in content and _takes_argument(how):
        return command((*how.command[:-1], "-c", code), session=session)
    path = str(PurePosixPath(template.user.home, how.filename.replace("{id}", exec_id)))
    if session and how.carry == "python" and _takes_argument(how):
        loading = command((*how.command[:-1], "-c", _LOADER, path), session=True)
        return loading._replace(path=path, content=content)
    prelude = carry.prelude(how.carry, how.command[0], code) if session else None
    argv = tuple(word.replace(_FILE, path) for word in how.command)
    return Program(argv, prelude is not None, path, (prelude or "").encode() + content)


def find_language(template: Template, name: str | None) -> Language:
    """Raises NotFoundError."""
    name = template.default_language if name is None else name
    found = template.languages.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted(template.languages)) or "none"
        raise NotFoundError(
            f"template {template.name} has no language {brief(name)}",
            hint=f"it has: {known}",
            field="language",
        )
    return found


def _encode(code: str) -> bytes:
    try:
        content = code.encode()
    except (UnicodeEncodeError, AttributeError):
        raise InvalidError("code: is not a text of Unicode characters", field="code") from None
    if len(content) > MAX_CODE:
        raise TooLargeError(
            f"code: {len(content)} bytes, limit {MAX_CODE}", field="code", limit=MAX_CODE
        )
    return content


def _takes_argument(how: Language) -> bool:
    name = PurePosixPath(how.command[0]).name
    plain = how.command[-1] == _FILE and "-c" not in how.command
    return plain and _TAKES_ARGUMENT.fullmatch(name) is not None
