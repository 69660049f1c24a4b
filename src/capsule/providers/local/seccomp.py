"""Compile a seccomp profile (Docker's JSON format) to the BPF that the kernel runs at each call.

The program: another architecture than the native one ends the process; then a balanced binary
search over the number finds the answer, or the tests of its arguments. A call that is simply
allowed costs about ten instructions, and none on kernels from 5.11 on: they remember which calls
are allowed whatever their arguments.
"""

from __future__ import annotations

import errno
import functools
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from capsule.errors import InvalidError, NotFoundError, NotSupportedError
from capsule.providers.local import bpf, syscalls
from capsule.providers.local.bpf import Assembler, Node, simulate
from capsule.providers.local.profile import ALLOW, ERRNO, KILL_PROCESS, Calls, Condition, Plan, read
from capsule.providers.local.profile import lint as _lint

__all__ = ["compile_profile", "lint", "load_profile", "native_arch", "simulate"]

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_WORD = 2**32 - 1
_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


class _Span(NamedTuple):
    """System call numbers from `first` up to the next span, all decided alike."""

    first: int
    calls: Calls | int  # what a profile says, or the answer itself


def compile_profile(
    profile: Mapping[str, Any], arch: str | None = None, *, also: Sequence[Mapping[str, Any]] = ()
) -> bytes:
    """An array of struct sock_filter. With `also`, a call must pass all the profiles.

    Raises InvalidError for a profile that is wrong or too large, NotSupportedError for an
    architecture that is neither x86_64 nor aarch64.
    """
    arch = native_arch(arch)
    asm = Assembler()
    allow = asm.ret(ALLOW)
    for other in reversed(also):
        allow = _search_number(asm, read(other, arch), arch, allow)
    entry = _search_number(asm, read(profile, arch), arch, allow)
    # The other outcome is emitted next to the test; a filter that skips this test can be
    # bypassed with 32-bit calls, whose numbers mean something else.
    entry = asm.jump_if(bpf.JEQ, AUDIT_ARCH[arch], entry, asm.ret(KILL_PROCESS))
    return asm.program(asm.load(bpf.ARCH, entry))


def lint(profile: Mapping[str, Any], arch: str | None = None) -> list[str]:
    """Findings worth a person's look: unknown names, conditions that never match, or that Docker
    reads differently. An empty list is a clean profile."""
    return _lint(profile, native_arch(arch))


def native_arch(name: str | None = None) -> str:
    """`x86_64` or `aarch64`, for any of the names these have; by default of this machine."""
    given = name or platform.machine()
    arch = _ALIASES.get(given.lower(), given.lower())
    if arch not in AUDIT_ARCH:
        raise NotSupportedError(
            f"no system call table for this architecture: {given}", hint="use x86_64 or aarch64"
        )
    return arch


def load_profile(name: str, directory: Path | None = None) -> dict[str, Any]:
    """The profile `name`: `directory`/name.json if there is one, else Capsule's own."""
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InvalidError(f"not a profile name: {name!r}", hint="letters, digits, - and _")
    own = resources.files("capsule") / "profiles"
    for place in (*((directory,) if directory else ()), own):
        file = place / f"{name}.json"
        if file.is_file():
            return _parse_json(file.read_text(encoding="utf-8"), str(file))
    known = sorted(file.name.removesuffix(".json") for file in own.iterdir())
    raise NotFoundError(f"no seccomp profile: {name}", hint=f"there are {', '.join(known)}")


def _parse_json(text: str, where: str) -> dict[str, Any]:
    try:
        profile = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"seccomp profile is not JSON: {where}: {error}") from error
    if not isinstance(profile, dict):
        raise InvalidError(f"seccomp profile is not a JSON object: {where}")
    return profile


def _search_number(asm: Assembler, plan: Plan, arch: str, allow: Node) -> Node:
    tree = _search(asm, _spans(plan, arch), plan.default, allow)
    return asm.load(bpf.NR, tree)


def _spans(plan: Plan, arch: str) -> list[_Span]:
    """The whole range of numbers, in order, neighbours with the same answer joined."""
    spans = [_Span(0, plan.default)]
    expected = 0

    def put(first: int, calls: Calls | int) -> None:
        if spans[-1].first == first:
            spans.pop()
        if not spans or spans[-1].calls != calls:
            spans.append(_Span(first, calls))

    for number in sorted(plan.calls):
        if number > expected:
            put(expected, plan.default)
        put(number, _simplified(plan.calls[number]))
        expected = number + 1
    put(expected, plan.default)
    if arch == "x86_64":
        # As on a kernel without x32. Not left to the default, which may be to allow.
        put(_X32_BIT, ERRNO | errno.ENOSYS)
    return spans


def _simplified(calls: Calls) -> Calls | int:
    if not calls.guarded and calls.plain is not None:
        return calls.plain.action
    return calls


def _search(asm: Assembler, spans: Sequence[_Span], default: int, allow: Node) -> Node:
    """Emitted from the back: the right half, the left half, then the comparison that picks one."""
    if len(spans) == 1:
        calls = spans[0].calls
        if isinstance(calls, Calls):
            return _tests(asm, calls, default, allow)
        return _answer(asm, calls, allow)
    middle = len(spans) // 2
    right = _search(asm, spans[middle:], default, allow)
    left = _search(asm, spans[:middle], default, allow)
    return asm.jump_if(bpf.JGE, spans[middle].first, right, left)


def _answer(asm: Assembler, action: int, allow: Node) -> Node:
    return allow if action == ALLOW else asm.ret(action)


def _tests(asm: Assembler, calls: Calls, default: int, allow: Node) -> Node:
    action = default if calls.plain is None else calls.plain.action
    node = _answer(asm, action, allow)
    for entry in reversed(calls.guarded):
        otherwise = node
        node = _answer(asm, entry.action, allow)
        for condition in reversed(entry.conditions):
            node = _test(asm, condition, node, otherwise)
    return node


def _test(asm: Assembler, condition: Condition, yes: Node, no: Node) -> Node:
    match condition.op:
        case "EQ":
            return _masked_equal(asm, condition.arg, _WORD << 32 | _WORD, condition.value, yes, no)
        case "NE":
            return _masked_equal(asm, condition.arg, _WORD << 32 | _WORD, condition.value, no, yes)
        case "MASKED_EQ":
            if condition.impossible:
                return no
            return _masked_equal(asm, condition.arg, condition.value, condition.value_two, yes, no)
        case "GT":
            return _greater(asm, bpf.JGT, condition, yes, no)
        case "LE":
            return _greater(asm, bpf.JGT, condition, no, yes)
        case "GE":
            return _greater(asm, bpf.JGE, condition, yes, no)
        case _:  # LT
            return _greater(asm, bpf.JGE, condition, no, yes)


def _masked_equal(asm: Assembler, index: int, mask: int, value: int, yes: Node, no: Node) -> Node:
    """A 64-bit argument is two 32-bit words; a word that the mask leaves out is not looked at."""
    node = yes
    for offset, shift in ((bpf.arg_low(index), 0), (bpf.arg_high(index), 32)):
        word_mask, word = mask >> shift & _WORD, value >> shift & _WORD
        if word_mask:
            node = _word_equal(asm, offset, word_mask, word, node, no)
    return node


def _word_equal(asm: Assembler, offset: int, mask: int, word: int, yes: Node, no: Node) -> Node:
    if mask == _WORD:
        test = asm.jump_if(bpf.JEQ, word, yes, no, holds=offset)
    elif word == 0:
        test = asm.jump_if(bpf.JSET, mask, no, yes, holds=offset)
    elif word == mask and mask & (mask - 1) == 0:
        test = asm.jump_if(bpf.JSET, mask, yes, no, holds=offset)
    else:
        test = asm.mask(mask, asm.jump_if(bpf.JEQ, word, yes, no))
    return test if test in (yes, no) else asm.load(offset, test)


def _greater(asm: Assembler, code: int, condition: Condition, yes: Node, no: Node) -> Node:
    """The high words decide unless they are equal."""
    low, high = bpf.arg_low(condition.arg), bpf.arg_high(condition.arg)
    low_test = asm.jump_if(code, condition.value & _WORD, yes, no, holds=low)
    if low_test not in (yes, no):
        low_test = asm.load(low, low_test)
    equal = asm.jump_if(bpf.JEQ, condition.value >> 32, low_test, no, holds=high)
    if equal == no:
        return no
    return asm.load(high, asm.jump_if(bpf.JGT, condition.value >> 32, yes, equal, holds=high))


_NEWUTS = 0x04000000
_BORN = 0x8000 | 17  # CLONE_PARENT | SIGCHLD
# From fork to execve, besides what every program does; with arguments where profiles look at them.
_ON_THE_WAY: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("clone", (_BORN,)),
    ("capset", ()),
    ("chdir", ()),
    ("close_range", ()),
    ("dup3", ()),
    ("fcntl", ()),
    ("getpid", ()),
    ("ioctl", (0, 0x40045431)),  # TIOCSPTLCK, and what else makes a terminal
    ("ioctl", (0, 0x80045430)),
    ("ioctl", (0, 0x5414)),
    ("ioctl", (0, 0x540E)),
    ("mmap", ()),
    ("prctl", (4, 0)),  # PR_SET_DUMPABLE
    ("prctl", (38, 1)),  # PR_SET_NO_NEW_PRIVS
    ("prctl", (23, 0)),  # PR_CAPBSET_READ
    ("prctl", (24, 0)),  # PR_CAPBSET_DROP
    ("prlimit64", ()),
    ("recvmsg", ()),
    ("seccomp", (1, 0)),
    ("sendmsg", ()),
    ("setfsuid", ()),
    ("setgroups", ()),
    ("setresgid", ()),
    ("setresuid", ()),
    ("setsid", ()),
    ("umask", ()),
    ("write", ()),
)


def fork_answer(program: bytes, arch: str | None = None) -> int:
    """What a program gets for the two calls that only whoever starts it needs: a clone with a UTS
    namespace, and setns. 0: the filter refuses something else on the way to a program's start, so
    nobody may have it before it is the last thing to do."""
    arch = native_arch(arch)
    numbers = syscalls.numbers(arch)

    def asked(name: str, args: tuple[int, ...]) -> int:
        return simulate(program, numbers[name], AUDIT_ARCH[arch], args).value

    if any(asked(name, args) != ALLOW for name, args in _ON_THE_WAY):
        return 0
    answers = {asked("clone", (_BORN | _NEWUTS,)), asked("setns", (0, 0))}
    only = answers.pop() if len(answers) == 1 else ALLOW
    return 0 if only == ALLOW else only


@functools.cache
def compiled(name: str, arch: str | None = None) -> bytes:
    """One of Capsule's own profiles, compiled once per process."""
    return compile_profile(load_profile(name), arch)
