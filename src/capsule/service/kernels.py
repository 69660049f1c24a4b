"""Which kernel keeps a language's interpreter alive, and how it is started."""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from pathlib import PurePosixPath
from typing import NamedTuple

from capsule.errors import NotSupportedError
from capsule.model import Language, Template
from capsule.service.code import find_language

_FILE = "{file}"
# Node ends itself when code was stopped in the middle of a callback, unless it is told not to look.
_STOPPABLE = "--no-force-async-hooks-checks"


class _Kind(NamedTuple):
    kernel: str
    source: str  # a file in capsule/kernels/
    program: re.Pattern[str]
    options: tuple[str, ...]  # the last one takes the source
    threaded: bool = False  # it has threads of its own, and may hang where it cannot have them


_KINDS = (
    _Kind("python", "python.py", re.compile(r"(python|pypy)(3(\.\d+)?)?", re.A), ("-u", "-c")),
    _Kind("node", "node.js", re.compile(r"node(js)?", re.A), (_STOPPABLE, "-e"), threaded=True),
    _Kind("bash", "bash.sh", re.compile(r"bash", re.A), ("-c",)),
)


class Start(NamedTuple):
    language: str
    kernel: str
    source: str
    command: tuple[str, ...]  # without the source

    async def argv(self) -> tuple[str, ...]:
        if self.source not in _sources:  # read once, and not in the loop
            file = resources.files("capsule") / "kernels" / self.source
            _sources[self.source] = await asyncio.to_thread(file.read_text, "utf-8")
        return (*self.command, _sources[self.source])


_sources: dict[str, str] = {}


def start_of(template: Template, name: str | None) -> Start:
    """Raises NotFoundError (the language), NotSupportedError (it has no live interpreter)."""
    language = find_language(template, name)
    kind = _kind(language)
    if kind is None:
        names = able(template)
        raise NotSupportedError(
            f"language {language.name} of template {template.name} has no live interpreter",
            hint=f"it has one for: {', '.join(names)}" if names else "take a template that has one",
            field="language",
        )
    command = (*language.command[:-1], *kind.options)
    return Start(language.name, kind.kernel, kind.source, command)


def is_threaded(kernel: str) -> bool:
    return any(kind.threaded for kind in _KINDS if kind.kernel == kernel)


def able(template: Template) -> list[str]:
    """Its languages that have a live interpreter."""
    return sorted({each.name for each in template.languages.values() if _kind(each)})


def _kind(language: Language) -> _Kind | None:
    """By its program, where the template runs code as PROGRAM [OPTION…] FILE."""
    program = PurePosixPath(language.command[0]).name
    if language.command[-1] != _FILE or _FILE in language.command[:-1]:
        return None
    return next((kind for kind in _KINDS if kind.program.fullmatch(program)), None)
