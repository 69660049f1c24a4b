"""A seccomp profile in Docker's JSON format, read strictly and evaluated for one architecture.

What Docker's own reader does is kept, with these decisions:

- A program in a sandbox has no capabilities: entries that `includes` capabilities are dropped,
  entries that `excludes` capabilities stay. `arches` and `minKernel` are evaluated as well.
- The conditions of one entry are ANDed, the entries of one system call ORed: the first entry whose
  conditions hold decides, then the entry without conditions, then `defaultAction`.
- Names that no architecture knows are ignored (profiles are older and newer than our tables);
  `lint` reports them.
- Unknown keys are an error: a misspelled `args` would allow a call without its conditions.
"""

from __future__ import annotations

import difflib
import errno
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capsule.errors import InvalidError
from capsule.providers.local import syscalls

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000

_PLAIN_ACTIONS = {
    "SCMP_ACT_ALLOW": ALLOW,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_TRAP": 0x00030000,
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": KILL_PROCESS,
}
_NUMBERED_ACTIONS = {"SCMP_ACT_ERRNO": ERRNO, "SCMP_ACT_TRACE": 0x7FF00000}
_OPS = ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ")
_GO_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}

_TOP_KEYS = (
    "comment defaultAction defaultErrnoRet archMap architectures syscalls flags listenerPath "
    "listenerMetadata"
).split()
_ENTRY_KEYS = "names name action errnoRet args comment includes excludes".split()
_ARG_KEYS = "index value valueTwo op".split()
_FILTER_KEYS = "caps arches minKernel".split()
_MAX_ERRNO = 4095
_U64 = 2**64 - 1


class Condition(NamedTuple):
    """`args[arg] op value`; for MASKED_EQ: `args[arg] & value == value_two`."""

    arg: int
    op: str
    value: int
    value_two: int

    @property
    def impossible(self) -> bool:
        return self.op == "MASKED_EQ" and bool(self.value_two & ~self.value)


class Entry(NamedTuple):
    where: str
    names: tuple[str, ...]
    action: int
    conditions: tuple[Condition, ...]


@dataclass(slots=True)
class Calls:
    """Everything a profile says about one system call."""

    guarded: list[Entry] = field(default_factory=list)
    plain: Entry | None = None


class Plan(NamedTuple):
    default: int
    calls: Mapping[int, Calls]  # by number


def read(profile: Mapping[str, Any], arch: str) -> Plan:
    """Raises InvalidError with the field that is wrong."""
    default, entries = parse(profile, arch)
    numbers = syscalls.numbers(arch)
    calls: dict[int, Calls] = {}
    for entry in entries:
        for name in entry.names:
            if name in numbers:
                _add(calls.setdefault(numbers[name], Calls()), entry, name)
    return Plan(default, calls)


def _add(calls: Calls, entry: Entry, name: str) -> None:
    if entry.conditions:
        calls.guarded.append(entry)
    elif calls.plain is None:
        calls.plain = entry
    elif calls.plain.action != entry.action:
        raise _wrong(
            entry.where,
            f"{name} is decided twice without conditions, here and in {calls.plain.where}",
            "keep one of the two entries",
        )


def parse(profile: Mapping[str, Any], arch: str) -> tuple[int, list[Entry]]:
    _check_keys(profile, _TOP_KEYS, "profile")
    if "defaultAction" not in profile:
        raise _wrong("defaultAction", "is missing", "e.g. SCMP_ACT_ERRNO")
    default = _action(profile["defaultAction"], profile.get("defaultErrnoRet"), "defaultAction")
    found = _list(profile.get("syscalls"), "syscalls")
    entries = (_entry(entry, arch, f"syscalls[{i}]") for i, entry in enumerate(found))
    return default, [entry for entry in entries if entry is not None]


def lint(profile: Mapping[str, Any], arch: str) -> list[str]:
    """What is legal but probably not meant, or would mean something else to Docker."""
    _, entries = parse(profile, arch)
    plain = {name for entry in entries if not entry.conditions for name in entry.names}
    return [finding for entry in entries for finding in _lint_entry(entry, plain)]


def _lint_entry(entry: Entry, plain: set[str]) -> Iterator[str]:
    for name in entry.names:
        if name not in syscalls.known_names():
            near = difflib.get_close_matches(name, syscalls.known_names(), 1)
            nearest = f", nearest: {near[0]}" if near else ""
            yield f"{entry.where}: unknown system call {name}{nearest}"
        if entry.conditions and name in plain:
            yield f"{entry.where}: docker drops these conditions: {name} is also listed without any"
    indexes = [condition.arg for condition in entry.conditions]
    if len(set(indexes)) < len(indexes):
        yield f"{entry.where}: docker ORs conditions on the same argument, here they are ANDed"
    for condition in entry.conditions:
        if condition.impossible:
            yield f"{entry.where}: valueTwo has bits outside the mask, this never matches"


def _entry(raw: object, arch: str, where: str) -> Entry | None:
    entry = _object(raw, where)
    _check_keys(entry, _ENTRY_KEYS, where)
    names = _list(entry.get("names"), f"{where}.names")
    if "name" in entry:
        names = [*names, entry["name"]]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _wrong(f"{where}.names", f"must be a list of names: {names!r}", "e.g. [read, write]")
    action = _action(entry.get("action"), entry.get("errnoRet"), f"{where}.action")
    args = _list(entry.get("args"), f"{where}.args")
    conditions = tuple(_condition(arg, f"{where}.args[{i}]") for i, arg in enumerate(args))
    return Entry(where, tuple(names), action, conditions) if _applies(entry, arch, where) else None


def _applies(entry: Mapping[str, Any], arch: str, where: str) -> bool:
    includes = _object(entry.get("includes") or {}, f"{where}.includes")
    excludes = _object(entry.get("excludes") or {}, f"{where}.excludes")
    _check_keys(includes, _FILTER_KEYS, f"{where}.includes")
    _check_keys(excludes, _FILTER_KEYS, f"{where}.excludes")
    wanted_arches = _list(includes.get("arches"), f"{where}.includes.arches")
    if includes.get("caps") or (wanted_arches and _GO_ARCH[arch] not in wanted_arches):
        return False
    if _GO_ARCH[arch] in _list(excludes.get("arches"), f"{where}.excludes.arches"):
        return False
    at_least = _kernel(includes.get("minKernel"), f"{where}.includes.minKernel")
    below = _kernel(excludes.get("minKernel"), f"{where}.excludes.minKernel")
    running = _running_kernel()
    return (at_least is None or running >= at_least) and (below is None or running < below)


def _kernel(raw: object, where: str) -> tuple[int, int] | None:
    if raw in (None, ""):
        return None
    parts = str(raw).split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise _wrong(where, f"is not a kernel version: {raw!r}", "two numbers, e.g. 5.10")
    return int(parts[0]), int(parts[1])


def _running_kernel() -> tuple[int, int]:
    major, minor = platform.release().split("-")[0].split(".")[:2]
    return int(major), int(minor)


def _condition(raw: object, where: str) -> Condition:
    arg = _object(raw, where)
    _check_keys(arg, _ARG_KEYS, where)
    op = str(arg.get("op")).removeprefix("SCMP_CMP_")
    if op not in _OPS:
        raise _wrong(
            f"{where}.op", f"is unknown: {arg.get('op')!r}", "one of SCMP_CMP_" + "/".join(_OPS)
        )
    return Condition(
        _integer(arg.get("index"), 5, f"{where}.index"),
        op,
        _integer(arg.get("value"), _U64, f"{where}.value"),
        _integer(arg.get("valueTwo") or 0, _U64, f"{where}.valueTwo"),
    )


def _action(raw: object, number: object, where: str) -> int:
    if raw in _PLAIN_ACTIONS:
        return _PLAIN_ACTIONS[str(raw)]
    if raw in _NUMBERED_ACTIONS:
        value = errno.EPERM if number is None else _integer(number, _MAX_ERRNO, f"{where} errno")
        return _NUMBERED_ACTIONS[str(raw)] | value
    known = ", ".join([*_PLAIN_ACTIONS, *_NUMBERED_ACTIONS])
    raise _wrong(where, f"is not supported: {raw!r}", f"one of {known}")


def _integer(raw: object, limit: int, where: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw <= limit:
        raise _wrong(where, f"must be a whole number: {raw!r}", f"from 0 to {limit}")
    return raw


def _object(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise _wrong(where, f"must be an object: {raw!r}", "see Docker's seccomp documentation")
    return raw


def _list(raw: object, where: str) -> list[Any]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise _wrong(where, f"must be a list: {raw!r}", "see Docker's seccomp documentation")
    return raw


def _check_keys(raw: object, known: Sequence[str], where: str) -> None:
    for key in _object(raw, where):
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1) or known[:1]
            raise _wrong(where, f"has an unknown key: {key!r}", f"did you mean {near[0]!r}?")


def _wrong(where: str, what: str, hint: str) -> InvalidError:
    return InvalidError(f"seccomp profile: {where} {what}", hint=hint, field=where)
