"""What IPython understands and Python does not, as programs for E2B use it: code that is indented
as a whole, `!command`, and a few of `%magic`. Code without that is left as it is.
"""

from __future__ import annotations

import ast
import re

from capsule.edge.errors import invalid_field

_LINE = re.compile(r"^([ \t]*)([!%])(.*)$", re.MULTILINE)
_FIRST = re.compile(r"^([ \t]*+)\S", re.MULTILINE)
_SILENT = frozenset({"matplotlib", "config", "load_ext", "autoreload"})
_READ = 64 * 1024  # characters: it is read as Python here, where all others wait for that


def plain(code: str) -> str:
    """Raises InvalidError naming a magic that is not known. Of long code it is not undone."""
    code = _outdented(code)
    if len(code) > _READ or _LINE.search(code) is None or _is_python(code):
        return code
    return _LINE.sub(_said, code)


def _outdented(code: str) -> str:
    """By what the first line is indented by: so far as a line begins with that."""
    first = _FIRST.search(code)
    if first is None or not first[1]:
        return code
    return f"\n{code}".replace(f"\n{first[1]}", "\n")[1:]


def _is_python(code: str) -> bool:
    """A line may begin so within a text, or a sum."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _said(found: re.Match[str]) -> str:
    indent, mark, rest = found.groups()
    return indent + (_shell(rest) if mark == "!" else _magic(rest))


def _shell(command: str) -> str:
    """Its output is the run's, and it has no value."""
    how = f"{command.lstrip('!').strip()!r}, shell=True"
    return f'__import__("subprocess").run({how}) and None'


def _magic(line: str) -> str:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "pip":
        return _shell(f"python3 -m pip {rest}")
    if name == "cd":
        return f'__import__("os").chdir(__import__("os").path.expanduser({rest or "~"!r}))'
    if name in ("env", "set_env") and "=" in rest:
        variable, _, value = rest.partition("=")
        return f'__import__("os").environ[{variable.strip()!r}] = {value.strip()!r}'
    if name in _SILENT:
        return "pass"
    raise invalid_field(
        "code",
        f"%{name[:40]} is not known here",
        hint="there are !command, %pip, %cd and %env; the rest is plain Python",
    )
