"""What callers ask of contexts, checked."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from capsule.errors import InvalidError, TooLargeError
from capsule.model import MIB, ROOT, Template, User
from capsule.service import validate
from capsule.service.context import ContextRecord
from capsule.service.entry import ROOT_HOME
from capsule.service.kernels import Start, start_of
from capsule.settings import brief

MAX_CODE = {"python": 8 * MIB, "node": 8 * MIB, "bash": MIB}  # bash reads byte by byte
MAX_IMPORTS = 100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ContextCall:
    """A new context. `imports` are loaded before it is ready; without a language, the default."""

    language: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()
    user: str | None = None  # a name; None: the sandbox's user
    make_cwd: bool = False  # the folder, where it is not there


@dataclass(frozen=True, slots=True)
class ContextRun:
    """Code for a context; None: the default one of the language, made on first use."""

    code: str
    context: str | None = None
    language: str | None = None
    timeout: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # while it runs; then as before


def default_record(
    template: Template, language: str | None, imports: Sequence[str], now: float
) -> ContextRecord:
    """Of a language's default context, which nobody has started yet.

    Raises NotFoundError, NotSupportedError, InvalidError, TooLargeError.
    """
    start = start_of(template, language)
    call = ContextCall(imports=imports)
    return new_record(f"default-{start.language}", start, call, now, own=template.user)


def new_record(
    name: str, start: Start, call: ContextCall, now: float, *, own: User
) -> ContextRecord:
    """Raises InvalidError, TooLargeError."""
    validate.env(call.env)
    exec_id, nonce = fresh()
    user = validate.user(call.user, own.name)
    home = ROOT_HOME if user == ROOT else own.home
    return ContextRecord(
        id=name,
        language=start.language,
        kernel=start.kernel,
        cwd=home if call.cwd is None else validate.path(call.cwd, "cwd"),
        env=dict(call.env),
        user=user,
        imports=imports_of(call.imports, start.kernel),
        created=now,
        exec_id=exec_id,
        nonce=nonce,
    )


def code_of(code: str, kernel: str) -> str:
    """Raises InvalidError, TooLargeError."""
    try:
        size = len(code.encode())
    except (UnicodeEncodeError, AttributeError):
        raise InvalidError("code: is not a text of Unicode characters", field="code") from None
    if "\0" in code:
        raise InvalidError("code: has a NUL character", field="code")
    most = MAX_CODE[kernel]
    if size > most:
        raise TooLargeError(
            f"code: {size} bytes, limit {most}",
            hint="write it to a file, and import or source that",
            field="code",
            limit=most,
        )
    return code


def run_env(env: Mapping[str, str], kernel: str) -> Mapping[str, str]:
    """Raises InvalidError, TooLargeError."""
    validate.env(env)
    for name in env if kernel == "bash" else ():
        if not _VARIABLE.fullmatch(name):
            raise InvalidError(f"env: {brief(name)} is no name of a shell's variable", field="env")
    return env


def imports_of(names: Sequence[str], kernel: str) -> tuple[str, ...]:
    """Raises InvalidError, TooLargeError."""
    if names and kernel == "bash":
        raise InvalidError("imports: a shell has none", field="imports")
    if len(names) > MAX_IMPORTS:
        raise TooLargeError(
            f"imports: {len(names)} of them, limit {MAX_IMPORTS}",
            field="imports",
            limit=MAX_IMPORTS,
        )
    return tuple(validate.text("imports", name, least=1, most=256) for name in names)


class Fresh(NamedTuple):
    """What every interpreter has of its own."""

    exec_id: str
    nonce: str


def is_kernel(exec_id: str) -> bool:
    return exec_id.startswith("x")


def fresh() -> Fresh:
    return Fresh("x" + secrets.token_hex(8), secrets.token_hex(8))
