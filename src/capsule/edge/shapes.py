"""What clients send, as types. JSON-RPC takes one of these plus `id` as its params, REST as its
body.

msgspec checks types, ranges and unknown fields while it parses; `parse` turns its complaints into
one line that names the field. `timeout_ms` and the like are whole milliseconds; a bool is no
number, NaN and infinity are no JSON.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from capsule.edge.errors import invalid_field
from capsule.errors import InvalidError
from capsule.service.execs import MAX_BATCH

YEAR_MS = 366 * 24 * 3600 * 1000
NAME = r"^[A-Za-z0-9_.-]{1,64}$"

# The service knows the configured limits; these only keep nonsense out.
Millis = Annotated[int, Meta(ge=1, le=YEAR_MS)]
MillisOrZero = Annotated[int, Meta(ge=0, le=YEAR_MS)]
Size = Annotated[int, Meta(ge=1, le=2**50)]
Offset = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Id = Annotated[str, Meta(min_length=1, max_length=64)]
Word = Id
Name = Annotated[str, Meta(pattern=NAME)]
TenantOrAll = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_.-]{1,64}|\*)$")]
Key = Annotated[str, Meta(min_length=1, max_length=255)]
Secret = Annotated[str, Meta(min_length=8, max_length=512, pattern="^[!-~]+$")]
StepNumber = Annotated[int, Meta(ge=0, le=2**31)]
Mode = Annotated[int, Meta(ge=0, le=0o7777)] | Annotated[str, Meta(pattern="^0?[0-7]{3,4}$")]
Encoding = Literal["text", "base64"]
Side = Annotated[int, Meta(ge=1, le=4096)]  # of a terminal
SignalName = Annotated[str, Meta(pattern="^(SIG)?[A-Z0-9]{2,10}$")]
Argv = Annotated[list[str], Meta(min_length=1, max_length=65536)]
Command = Argv | Annotated[str, Meta(min_length=1)]


class Shape(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class Nothing(Shape, kw_only=True, frozen=True):
    pass


class LimitsShape(Shape, kw_only=True, frozen=True):
    """Overrides of the template's limits; bytes are bytes, cpus are cores."""

    memory: Size | UnsetType = UNSET
    cpus: Annotated[float, Meta(gt=0, le=4096)] | UnsetType = UNSET
    processes: Count | UnsetType = UNSET
    disk: Size | UnsetType = UNSET
    inodes: Count | UnsetType = UNSET
    open_files: Count | UnsetType = UNSET


class MountVolume(Shape, kw_only=True, frozen=True):
    name: Name
    path: Path
    read_only: bool = False


class MakeVolume(Shape, kw_only=True, frozen=True):
    name: Name
    size: Size | None = None
    provider: Word | None = None
    metadata: dict[str, str] = {}


class OfVolume(Shape, kw_only=True, frozen=True):
    name: Name


class Create(Shape, kw_only=True, frozen=True):
    template: Word = "python"
    ttl_ms: Millis | None = None
    idle_timeout_ms: MillisOrZero | None = None
    limits: LimitsShape | None = None
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    provider: Word | None = None
    provider_key: Secret | None = None
    runtime: Word | None = None
    on_timeout: Literal["delete", "pause"] = "delete"
    auto_resume: bool = False
    snapshot: Name | None = None
    checkpoint: Literal["none", "each"] = "none"
    volumes: Annotated[list[MountVolume], Meta(max_length=16)] = []
    ports: Literal["private", "public"] = "private"
    idempotency_key: Key | None = None


class MakeSnapshot(Shape, kw_only=True, frozen=True):
    name: Name
    metadata: dict[str, str] = {}


class OfSnapshot(Shape, kw_only=True, frozen=True):
    name: Name


class ImportSnapshot(OfSnapshot, kw_only=True, frozen=True):
    template: Word | None = None
    provider: Word | None = None


class Fork(Shape, kw_only=True, frozen=True):
    count: Annotated[int, Meta(ge=1, le=20)] = 1
    at: StepNumber | None = None


class Diff(Shape, kw_only=True, frozen=True, rename={"old": "from", "new": "to"}):
    old: StepNumber
    new: StepNumber | None = None


class Undo(Shape, kw_only=True, frozen=True):
    to: StepNumber


class ListSandboxes(Shape, kw_only=True, frozen=True):
    tenant: TenantOrAll | None = None
    metadata: dict[str, str] = {}
    state: Literal["creating", "running", "paused", "stopping", "gone", "failed"] | None = None


class SetTimeout(Shape, kw_only=True, frozen=True):
    ttl_ms: Millis


class Options(Shape, kw_only=True, frozen=True):
    """What `exec`, `run`, `start` and each command of a batch have in common."""

    env: dict[str, str] = {}
    cwd: Path | None = None
    timeout_ms: Millis | None = None
    stdin: str = ""
    stdin_base64: bytes = b""
    output_limit: Annotated[int, Meta(ge=0, le=2**40)] | None = None
    on_limit: Literal["truncate", "kill"] = "truncate"
    user: Word | None = None
    session: Name | None = None
    idempotency_key: Key | None = None
    encoding: Encoding = "text"


class Exec(Options, kw_only=True, frozen=True):
    """`cmd` is an argv, or a string for the sandbox's shell."""

    cmd: Command


class Run(Options, kw_only=True, frozen=True):
    code: str
    language: Word | None = None


class Call(Options, kw_only=True, frozen=True):
    """Either `cmd` or `code`."""

    cmd: Command | UnsetType = UNSET
    code: str | UnsetType = UNSET
    language: Word | None = None


class Tty(Shape, kw_only=True, frozen=True):
    rows: Side = 24
    cols: Side = 80


class Start(Call, kw_only=True, frozen=True):
    stdin_open: bool = False
    tty: Tty | None = None


class Batch(Shape, kw_only=True, frozen=True):
    commands: Annotated[list[Call], Meta(min_length=1, max_length=MAX_BATCH)]
    stop_on_error: bool = True


class RunOld(Shape, kw_only=True, frozen=True):
    """`sandbox.exec` of the older interface."""

    code: str
    language: Word | None = None
    timeout_ms: Millis | None = None


class OfExec(Shape, kw_only=True, frozen=True):
    exec_id: Id


class Attach(OfExec, kw_only=True, frozen=True):
    stdout: Offset = 0
    stderr: Offset = 0
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    max_bytes: Annotated[int, Meta(ge=1, le=8 * 1024 * 1024)] = 1024 * 1024
    encoding: Encoding = "text"


class Signal(Shape, kw_only=True, frozen=True):
    signal: SignalName = "KILL"
    grace_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class Kill(Signal, kw_only=True, frozen=True):
    exec_id: Id


class SendInput(OfExec, kw_only=True, frozen=True):
    data: str = ""
    encoding: Encoding = "text"
    eof: bool = False


class Resize(OfExec, kw_only=True, frozen=True):
    rows: Side
    cols: Side


class CreateContext(Shape, kw_only=True, frozen=True):
    language: Word | None = None
    cwd: Path | None = None
    env: dict[str, str] = {}
    imports: Annotated[list[str], Meta(max_length=100)] = []
    user: Word | None = None


class OfContext(Shape, kw_only=True, frozen=True):
    context: Id


class RunCode(Shape, kw_only=True, frozen=True):
    code: str
    timeout_ms: Millis | None = None


class RunDefault(RunCode, kw_only=True, frozen=True):
    language: Word | None = None


class RunInContext(RunDefault, kw_only=True, frozen=True):
    context: Id | None = None


class OfPath(Shape, kw_only=True, frozen=True):
    path: Path


class WriteFile(OfPath, kw_only=True, frozen=True):
    content: str
    encoding: Encoding = "base64"
    mode: Mode = 0o644
    parents: bool = True
    append: bool = False
    exclusive: bool = False


class ReadFile(OfPath, kw_only=True, frozen=True):
    encoding: Encoding = "base64"
    offset: Offset = 0
    length: Annotated[int, Meta(ge=0, le=2**40)] | None = None


class ListDir(Shape, kw_only=True, frozen=True):
    path: Path = "/workspace"
    recursive: bool = False
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100_000


class Stat(OfPath, kw_only=True, frozen=True):
    follow: bool = False


class Mkdir(OfPath, kw_only=True, frozen=True):
    parents: bool = True
    mode: Mode = 0o755


class Move(Shape, kw_only=True, frozen=True, rename={"source": "from", "target": "to"}):
    source: Path
    target: Path
    overwrite: bool = True


class Remove(OfPath, kw_only=True, frozen=True):
    recursive: bool = False


class Chmod(OfPath, kw_only=True, frozen=True):
    mode: Mode


class OfTemplate(Shape, kw_only=True, frozen=True):
    name: Word


class BuildOptions(OfTemplate, kw_only=True, frozen=True):
    file: Path = "Dockerfile"
    args: dict[str, str] = {}
    cache: bool = True
    pull: bool = False
    provider: Word | None = None


class BuildTemplate(BuildOptions, kw_only=True, frozen=True):
    """Without a context, the Dockerfile that Capsule brings for this name."""

    context_base64: bytes = b""


def mode_bits(mode: int | str) -> int:
    """File modes are numbers, or octal digits in a string as people write them."""
    return int(mode, 8) if isinstance(mode, str) else mode


T = TypeVar("T")

# A first half, escaped, near the end, that goes on with something else than its second half.
_ENDS_IN_HALF = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u])")
_AT = re.compile(r"^(?P<problem>.*) - at `(?P<path>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)


def parse(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """Raises InvalidError in one line, with the field's name in `details`."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(error, data) from None
    except (ValueError, RecursionError) as error:
        raise malformed(error, data) from None


def checked(shape: T) -> T:
    """A shape that was put together here, from a URL say, held to what it says of itself."""
    return parse(msgspec.json.Decoder(type(shape)), msgspec.json.encode(shape))


def malformed(error: Exception, data: bytes | msgspec.Raw) -> InvalidError:
    """Not JSON at all: broken syntax, bytes that are not UTF-8, lone surrogates, endless
    nesting.
    """
    if isinstance(error, RecursionError):
        return InvalidError("not valid JSON: nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return InvalidError("not valid JSON: not UTF-8")
    problem = str(error).removeprefix("JSON is malformed: ")
    if _is_lone_surrogate(problem, bytes(data)):
        return InvalidError(
            "not valid JSON: a string has a lone surrogate (\\ud800 to \\udfff), half a character",
            hint="escape what is beyond \\uffff as a pair; what is no text goes as base64",
        )
    return InvalidError(f"not valid JSON: {_short(problem)}")


def _is_lone_surrogate(problem: str, data: bytes) -> bool:
    """msgspec has several words for it, and at the end of the data takes it for a cut."""
    if "surrogate" in problem or "end of hex escape" in problem:
        return True
    return problem == "Input data was truncated" and _ENDS_IN_HALF.search(data[-64:]) is not None


def _explain(error: msgspec.ValidationError, data: bytes | msgspec.Raw) -> InvalidError:
    text = str(error)
    problem, where = (m["problem"], m["path"]) if (m := _AT.match(text)) else (text, "$")
    field = where.removeprefix("$").removeprefix(".")
    if m := _UNKNOWN.match(problem):
        return invalid_field(_join(field, _short(m["field"])), "unknown field")
    if m := _MISSING.match(problem):
        return invalid_field(_join(field, m["field"]), "missing")
    problem = problem[:1].lower() + problem[1:]
    if not field:
        return InvalidError(f"params: {problem}", hint="send an object with named fields")
    return invalid_field(field, problem + _got(problem, field, data))


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _got(problem: str, field: str, data: bytes | msgspec.Raw) -> str:
    """msgspec says which range was expected, but not what came: look it up."""
    if "got" in problem or "base64" in problem:
        return ""
    try:
        value: Any = msgspec.json.decode(data)
        for step in field.split("."):
            value = value[step]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f", got {_short(repr(value))}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
