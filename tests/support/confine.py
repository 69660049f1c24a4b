"""Run system calls under a seccomp filter and nothing else.

As a module: `attempt`. As a script, the child that loads the filter:
    confine.py FILTER   < a JSON list of calls, answers with a list of errnos (0: it worked)
FILTER is the path of a compiled program, or `-` for none.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

# getpid by the 32-bit door: mov eax, 20; int 0x80; ret
I386_GETPID = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"


class Text(str):
    """An argument that is a pointer to this text."""


class Room(bytes):
    """An argument that is a pointer to a buffer with this content."""


PTY = "pty"  # an argument that is the descriptor of a terminal


class Killed(Exception):
    """The kernel ended the child instead of answering."""


def attempt(filter: bytes | None, *calls: tuple[Any, ...]) -> list[int]:
    """The errno of each call `(number, arguments…)`, made one after the other in one child."""
    encoded = [[call[0], *(_encoded(argument) for argument in call[1:])] for call in calls]
    with tempfile.NamedTemporaryFile() as file:
        file.write(filter or b"")
        file.flush()
        ended = subprocess.run(
            [sys.executable, "-I", __file__, file.name if filter else "-"],
            input=json.dumps(encoded),
            capture_output=True,
            text=True,
            timeout=20,
        )
    if ended.returncode < 0:
        raise Killed(signal.Signals(-ended.returncode).name)
    assert ended.returncode == 0, ended.stderr
    answers: list[int] = json.loads(ended.stdout)
    return answers


def _encoded(argument: Any) -> Any:
    if isinstance(argument, Text):
        return {"text": argument}
    return {"hex": argument.hex()} if isinstance(argument, Room) else argument


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


libc = ctypes.CDLL(None, use_errno=True)


def load(filter: bytes) -> None:
    """Confine this process and all it starts, for good."""
    program = _Program(len(filter) // 8, filter)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def call(number: int | str, *arguments: Any) -> int:
    if number == "i386":
        return _call_i386()
    raw = [_decoded(argument) for argument in arguments]
    ctypes.set_errno(0)
    parent = os.getpid()
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(int(number)), *raw)
    if os.getpid() != parent:  # a clone or fork that worked
        os._exit(0)
    return ctypes.get_errno() if result == -1 else 0


def _call_i386() -> int:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(I386_GETPID)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return 0 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid() else 1


def _decoded(argument: Any) -> Any:
    if isinstance(argument, dict):
        data = argument["text"].encode() if "text" in argument else bytes.fromhex(argument["hex"])
        return ctypes.create_string_buffer(data, max(len(data) + 1, 4096))
    if argument == PTY:
        return ctypes.c_long(pty.openpty()[1])
    return ctypes.c_ulong(argument & (2**64 - 1))


def main() -> None:
    (path,) = sys.argv[1:]
    calls = json.load(sys.stdin)
    if path != "-":
        load(Path(path).read_bytes())
    sys.stdout.write(json.dumps([call(*each) for each in calls]))


if __name__ == "__main__":
    main()
