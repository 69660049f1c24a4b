"""What `capsule run` was asked to run: code, a script, or standard input; and in which language."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from capsule.errors import InvalidError, NotFoundError
from capsule.model import WORKSPACE, Language, Template

LANGUAGES = {
    ".py": "python",
    ".js": "javascript",
    ".cjs": "javascript",
    ".mjs": "module",
    ".go": "go",
    ".sh": "bash",
    ".bash": "bash",
}


class Source(NamedTuple):
    code: bytes
    name: str | None = None  # a script's file name; None: there is no file
    from_stdin: bool = False

    @property
    def language(self) -> str | None:
        return LANGUAGES.get(Path(self.name).suffix) if self.name else None


def find_source(text: str) -> Source:
    """`-` is standard input; an existing file is a script; one word that ends like a script's name
    was meant as one; all else is code."""
    if text == "-":
        return Source(sys.stdin.buffer.read(), from_stdin=True)
    path = Path(text)
    if _is_file(path):
        return Source(_read(path), path.name)
    if path.suffix in LANGUAGES and not any(c.isspace() or c in "()'\";" for c in text):
        raise NotFoundError(
            f"no such file: {text}", hint="check the path; code is given as one quoted argument"
        )
    return Source(text.encode())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # far too long for a name, or a NUL: it is code
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidError(f"cannot read {path}: {error.strerror}") from error


class Choice(NamedTuple):
    template: Template
    language: Language


def choose(
    catalog: Mapping[str, Template], source: Source, template: str | None, language: str | None
) -> Choice:
    """The template that was named, or else one whose main language it is; first those that need no
    image."""
    wanted = language or source.language
    if template is not None:
        return _in_template(catalog, template, wanted)
    if wanted is None:
        return _in_template(catalog, "python", None)
    for each in sorted(catalog.values(), key=lambda t: (not _is_main(t, wanted), t.root != "host")):
        if wanted in each.languages:
            return Choice(each, each.languages[wanted])
    known = sorted({name for each in catalog.values() for name in each.languages})
    raise NotFoundError(f"no template runs {wanted}", hint=f"there is {', '.join(known)}")


def _is_main(template: Template, language: str) -> bool:
    found = template.languages.get(language)
    return found is not None and found == template.languages.get(template.default_language)


def _in_template(catalog: Mapping[str, Template], name: str, language: str | None) -> Choice:
    if name not in catalog:
        raise NotFoundError(f"no such template: {name}", hint=f"there is {', '.join(catalog)}")
    template = catalog[name]
    wanted = language or template.default_language
    if wanted not in template.languages:
        known = ", ".join(template.languages)
        raise NotFoundError(f"template {name} does not run {wanted}", hint=f"it runs {known}")
    return Choice(template, template.languages[wanted])


class Copy(NamedTuple):
    """A local file and where it goes."""

    source: Path
    target: str
    mode: int


def find_copies(path: Path, folder: str = WORKSPACE) -> Iterator[Copy]:
    """What `--file` brings in: a file, or every file of a folder, under its own name."""
    target = f"{folder}/{path.resolve().name}"
    if path.is_dir():
        for child in sorted(path.iterdir()):
            yield from find_copies(child, target)
    elif path.is_file():
        yield Copy(path, target, 0o755 if path.stat().st_mode & 0o100 else 0o644)
    elif path.exists():
        raise InvalidError(f"neither a file nor a folder: {path}")
    else:
        raise NotFoundError(f"no such file: {path}", hint="--file takes a local path")
