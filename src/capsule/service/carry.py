"""Sessions: what one call changes in its environment and working directory is there in the next.

The program gets a pipe at fd 3 and, just before it ends, writes its directory and environment
there. Shell scripts (`sh -c`) do it in an EXIT trap, Python (`-c`) and Node (`-e`) in a small
prelude that leaves the program's own names, line numbers and tracebacks alone. In bash an EXIT trap
of the script's own runs as well, right after the report. Any other program receives the session and
changes nothing in it, as does one that replaces itself (`exec`), is killed, or sets an EXIT trap in
another shell. Only differences count: a variable given for one call alone is not carried.

What arrives on the pipe is written by a hostile program. It can only ever become environment
variables and a directory of that same sandbox's next call, and is dropped as a whole when it is
malformed or too large.

The message: `capsule1 NUL directory NUL (NAME=value NUL)* NUL`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

MAX_MESSAGE = 256 * 1024
MAX_VARIABLES = 1024
MAX_BYTES = 128 * 1024  # of a session's variables, all together

_MAGIC = b"capsule1\0"
# The shell keeps these by itself; carrying them would only make noise.
_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_SHELL_OPTION = re.compile(r"-[a-zA-Z]*c")
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_NODES = frozenset({"node", "nodejs"})

# fd 3 is popular in scripts, 9 is not. `command -p` finds env whatever the script did to PATH.
_SHELL_REPORT = (
    r"""{ printf "capsule1\0%s\0" "${PWD-}"; command -p env -0; printf "\0"; } """
    ">&9 2>/dev/null || :"
)
_SHELL_PRELUDE = f"exec 9>&3 3>&-; trap '{_SHELL_REPORT}' EXIT; "

# For bash scripts that set traps. Whenever the EXIT trap has become another than ours, it is made
# into: report, then the script's own, which finds `$?` as it was in either branch of the `if`. Its
# condition is the one place where a status other than 0 ends nothing under `set -e`.
_BASH_PRELUDE = (
    "exec 9>&3 3>&-; "
    f"__capsule_carry() {{ local s=$?; {_SHELL_REPORT}; return $s; }}; "
    "__capsule_keep() { local s=$1 n=$'\\n' set; "
    'if [[ $BASHPID == "$$" ]]; then set=$(builtin trap -p EXIT); '
    'if [[ $set != *__capsule_carry* ]]; then eval "set -- $set"; '  # trap -- 'ACTION' EXIT
    'set="$n${3-}$n:$n"; '
    'builtin trap "if { __capsule_carry; } 2>/dev/null; then${set}else${set}fi" EXIT; '
    "fi; fi; return $s; }; "
    '[[ -o posix ]] || trap() { builtin trap "$@"; { __capsule_keep $?; } 2>/dev/null; }; '
    "builtin trap '{ __capsule_carry; } 2>/dev/null' EXIT; "
)
# A function in place of `trap` would change what these three do, so their scripts are left alone.
_BASH_TRAP = re.compile(r"\btrap\b")
_BASH_PSEUDO_SIGNAL = re.compile(r"\b(ERR|DEBUG|RETURN)\b")

_PYTHON_SOURCE = r"""
def boot():
    import atexit, fcntl, os, sys
    fd = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(3)
    pid = os.getpid()
    def carry():
        if os.getpid() != pid:
            return
        data = b"capsule1\0" + os.getcwdb() + b"\0"
        data += b"".join(k + b"=" + v + b"\0" for k, v in os.environb.items()) + b"\0"
        try:
            while data:
                data = data[os.write(fd, data):]
        except OSError:
            pass
    atexit.register(carry)
    show = sys.excepthook
    def hook(kind, error, trace):
        rest = trace and trace.tb_next
        while trace:
            if trace.tb_frame.f_code.co_filename == "<capsule>":
                rest = trace.tb_next
            trace = trace.tb_next
        show(kind, error.with_traceback(rest), rest)
    sys.excepthook = hook
    return compile(sys.argv.pop(1), "<string>", "exec", dont_inherit=True)
"""
# The code itself follows as an argument, so that `from __future__` may be its first line.
_PYTHON_PRELUDE = (
    f"exec((lambda g: exec(compile({_PYTHON_SOURCE!r}, '<capsule>', 'exec'), g)"
    " or g['boot']())({}))"
)

_NODE_PRELUDE = (
    "(()=>{try{const fs=process.getBuiltinModule?process.getBuiltinModule('fs'):require('fs');"
    "process.on('exit',()=>{try{const d=Buffer.from('capsule1\\0'+process.cwd()+'\\0'+"
    "Object.entries(process.env).map(([k,v])=>k+'='+v+'\\0').join('')+'\\0');"
    "for(let o=0;o<d.length;)o+=fs.writeSync(3,d,o)}catch{}})}catch{}})();"
)


@dataclass(frozen=True, slots=True)
class Session:
    """What differs from the sandbox's own environment, and where the next call starts."""

    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    cwd: str | None = None

    def apply(self, env: Mapping[str, str]) -> dict[str, str]:
        merged = {**env, **self.env}
        for name in self.unset:
            merged.pop(name, None)
        return merged


class Snapshot(NamedTuple):
    env: dict[str, str]
    cwd: str | None


def wrap(argv: tuple[str, ...]) -> tuple[str, ...] | None:
    """The same program, reporting at its end. None: this one cannot."""
    program = PurePosixPath(argv[0]).name
    at = next((i for i, word in enumerate(argv) if i and _takes_code(program, word)), 0)
    if not at or at + 1 >= len(argv) or not all(x.startswith("-") for x in argv[1:at]):
        return None
    head, code, rest = argv[: at + 1], argv[at + 1], argv[at + 2 :]
    if program in _SHELLS:
        return (*head, _shell_prelude(program, code) + code, *rest)
    if program in _NODES:
        return (*head, _NODE_PRELUDE + code, *rest)
    return (*head, _PYTHON_PRELUDE, code, *rest)


def prelude(carry: str | None, program: str, code: str) -> str | None:
    """What code in a file of its own begins with; Python code is loaded by `wrap` instead. None:
    this one cannot report.
    """
    match carry:
        case "sh":
            return _shell_prelude(PurePosixPath(program).name, code)
        case "node":
            return _NODE_PRELUDE
        case _:
            return None


def _shell_prelude(shell: str, code: str) -> str:
    sets_traps = _BASH_TRAP.search(code) and not _BASH_PSEUDO_SIGNAL.search(code)
    return _BASH_PRELUDE if shell == "bash" and sets_traps else _SHELL_PRELUDE


def _takes_code(program: str, option: str) -> bool:
    if program in _SHELLS:
        return _SHELL_OPTION.fullmatch(option) is not None
    if program in _NODES:
        return option in ("-e", "--eval")
    return _PYTHON.fullmatch(program) is not None and option == "-c"


def parse(message: bytes) -> Snapshot | None:
    """What the program reported last; None when that is malformed."""
    if len(message) > MAX_MESSAGE or not message.startswith(_MAGIC):
        return None
    # A child that inherited the pipe may have reported before; the last one is the program itself.
    last = message.rfind(b"\0\0" + _MAGIC)
    body = message[last + 2 if last >= 0 else 0 :]
    if not body.endswith(b"\0\0"):
        return None
    directory, *variables = body[len(_MAGIC) : -2].split(b"\0")
    if len(variables) > MAX_VARIABLES:
        return None
    return Snapshot(dict(filter(None, map(_variable, variables))), _directory(directory))


def update(session: Session, given: Mapping[str, str], after: Snapshot) -> Session:
    """What the program changed in what it was `given`. Too much: the session stays as it was."""
    env = dict(session.env)
    unset = set(session.unset)
    for name, value in after.env.items():
        if given.get(name) != value:
            env[name] = value
            unset.discard(name)
    for name in given.keys() - after.env.keys() - _OWN:
        env.pop(name, None)
        unset.add(name)
    size = sum(len(name) + len(value) for name, value in env.items()) + sum(map(len, unset))
    if len(env) + len(unset) > MAX_VARIABLES or size > MAX_BYTES:
        return session
    return Session(env, tuple(sorted(unset)), after.cwd or session.cwd)


def _variable(entry: bytes) -> tuple[str, str] | None:
    try:
        name, equals, value = entry.decode().partition("=")
    except UnicodeDecodeError:
        return None  # records are JSON, which has no place for other bytes
    return (name, value) if name and equals and name not in _OWN else None


def _directory(path: bytes) -> str | None:
    try:
        text = path.decode()
    except UnicodeDecodeError:
        return None
    return text if text.startswith("/") and len(path) <= 4096 else None
