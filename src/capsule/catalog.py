"""Templates by name, as they come and go.

The built-in ones are in `capsule/templates/`; a folder of the configuration adds its own; builds
and imports write theirs into the data directory. A name that is taken is an error, unless it is a
built-in one and the newcomer says `override: true`: nobody replaces `python` by accident.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace as changed
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import BinaryIO

from capsule.errors import InvalidError
from capsule.host_errors import host_error
from capsule.model import Language, Template
from capsule.template_file import (
    CARRY_KINDS,
    SUFFIXES,
    Document,
    as_mapping,
    list_files,
    read_document,
    read_template,
    write_template,
)

__all__ = [
    "CARRY_KINDS",
    "PROGRAMS",
    "Catalog",
    "Origin",
    "as_mapping",
    "image_template",
    "load_catalog",
]
__all__ += ["read_template", "write_template", "written_folder"]

log = logging.getLogger(__name__)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PROGRAMS = ("python3", "node", "go", "bash", "sh")  # by which an image's languages are known
_PREFERRED = ("python", "javascript", "go", "bash", "sh")


class Origin(StrEnum):
    """Where a template comes from; only those that were made here can be removed."""

    BUILT_IN = "built-in"
    FOLDER = "folder"  # the configured one
    MADE = "made"  # by a build or an import


class Catalog(Mapping[str, Template]):
    """The templates by name: the built-in ones, those of the configured folder, and those made by
    builds and imports, which come and go while it is used, also by other processes.

    It tells what it read last. `stale` says whether there is something else by now, in some
    microseconds; `refresh` reads it, and blocks.
    """

    def __init__(self, extra_dir: Path | None = None, *, data_dir: Path | None = None) -> None:
        """Raises InvalidError naming the file, the field and the value, also when `extra_dir` is
        missing."""
        self._folder = written_folder(data_dir) if data_dir else None
        self._fixed: dict[str, Template] = {}
        self._origins: dict[str, Origin] = {}
        self._sources: dict[str, str] = {}
        self._read: dict[str, tuple[_Mark, Template | None]] = {}
        for file in list_files(resources.files("capsule") / "templates"):
            self._fix(file, Origin.BUILT_IN)
        for file in list_files(extra_dir) if extra_dir is not None else ():
            self._fix(file, Origin.FOLDER)
        self._all: Mapping[str, Template] = self._fixed
        self.refresh(strict=True)

    @classmethod
    def of(cls, templates: Mapping[str, Template]) -> Catalog:
        """These and no others. For those who have made up their mind: tests, and other programs."""
        if isinstance(templates, Catalog):
            return templates
        catalog = cls.__new__(cls)
        catalog._folder, catalog._read, catalog._sources = None, {}, {}
        catalog._fixed = catalog._all = dict(templates)
        catalog._origins = dict.fromkeys(templates, Origin.FOLDER)
        return catalog

    def __getitem__(self, name: str) -> Template:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def origin(self, name: str) -> Origin:
        return self._origins.get(name, Origin.MADE)

    def changed_at(self, name: str) -> float:
        """When one that was made was last written; 0 for others."""
        for mark, template in self._read.values():
            if template is not None and template.name == name:
                return mark[0] / 1e9
        return 0.0

    def stale(self) -> bool:
        return self._marks() != {name: mark for name, (mark, _) in self._read.items()}

    def refresh(self, *, strict: bool = False) -> None:
        """A file that is wrong counts as it was before, and is told in the log; with `strict` it
        is an InvalidError."""
        read: dict[str, tuple[_Mark, Template | None]] = {}
        for name, mark in sorted(self._marks().items()):
            known = self._read.get(name)
            if known is None or known[0] != mark:
                known = mark, self._made(name, known[1] if known else None, strict=strict)
            read[name] = known
        made = {template.name: template for _, template in read.values() if template}
        self._read, self._all = read, {**self._fixed, **made}

    def add(self, template: Template, *, replace: bool = False) -> Path:
        """Write it beside the others that were made. Raises ConflictError, InvalidError."""
        assert self._folder is not None  # whoever makes templates has a data directory
        path = write_template(self._folder, template, replace=replace)
        self.refresh()
        return path

    def discard(self, name: str) -> None:
        """Remove one that was made; nothing if there is none."""
        assert self._folder is not None
        self.refresh()
        for file, (_, template) in self._read.items():
            if template is not None and template.name == name:
                (self._folder / file).unlink(missing_ok=True)
        self.refresh()

    def _fix(self, file: Path | Traversable, origin: Origin) -> None:
        document = read_document(file)
        template = document.template()
        self._check_taken(document, template)
        self._fixed[template.name], self._origins[template.name] = template, origin
        self._sources[template.name] = str(file)

    def _check_taken(self, document: Document, template: Template) -> None:
        known = self._origins.get(template.name)
        if known is None or (known is Origin.BUILT_IN and document.override):
            return
        what, hint = self._sources[template.name], "rename one"
        if known is Origin.BUILT_IN:
            what, hint = "a built-in template", "say `override: true` to replace it"
        document.wrong("name", template.name, f"is taken by {what}", hint)

    def _made(self, name: str, before: Template | None, *, strict: bool) -> Template | None:
        assert self._folder is not None
        try:
            document = read_document(self._folder / name)
            template = document.template()
            self._check_taken(document, template)
        except InvalidError as error:
            if strict:
                raise
            log.warning("%s", error)
            return before
        return template

    def _marks(self) -> dict[str, _Mark]:
        found: dict[str, _Mark] = {}
        if self._folder is None:
            return found
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIXES) and entry.name[0] != ".":
                        about = entry.stat()
                        found[entry.name] = (about.st_mtime_ns, about.st_size, about.st_ino)
        except FileNotFoundError:
            return found  # nothing was made yet, or a file went while we looked: look again soon
        except OSError as error:
            raise host_error(f"cannot read the templates in {self._folder}", error) from error
        return found


_Mark = tuple[int, int, int]  # when a file was written, how long it is, and which one it is


def load_catalog(extra_dir: Path | None = None, *, data_dir: Path | None = None) -> Catalog:
    return Catalog(extra_dir, data_dir=data_dir)


def written_folder(data_dir: Path) -> Path:
    """Where builds and imports put the templates they write."""
    return data_dir / "templates"


def image_template(
    name: str,
    image: str,
    *,
    env: Mapping[str, str],
    programs: frozenset[str],
    like: Template,
    bare: bool = False,
) -> Template:
    """A template for an image, with the languages whose programs it has.

    `env` is the image's own, `programs` says which of PROGRAMS were found in it, `like` gives
    limits and the rest. Raises InvalidError where it has no language; with `bare` that is fine.
    """
    languages: dict[str, Language] = {}
    needs: set[str] = set()
    for builtin in _built_in():
        for key, language in builtin.languages.items():
            own = builtin.needs if language.name == builtin.default_language else ()
            if key not in languages and programs.issuperset((language.command[0], *own)):
                languages[key] = language
                needs.update((language.command[0], *own))
    found = [known for known in _PREFERRED if known in languages]
    if not found and not bare:
        raise InvalidError(
            f"image {image} has none of {', '.join(PROGRAMS[:-1])} and {PROGRAMS[-1]} in its path",
            hint="write a template by hand, with the commands that the image has",
        )
    env = {key: value for key, value in env.items() if _VARIABLE.fullmatch(key)}
    fixed = {key: value for key, value in like.env.items() if key != "PATH" or "PATH" not in env}
    return changed(
        like,
        name=name,
        description=f"the image {image}",
        root=f"image:{image}",
        languages=languages,
        default_language=found[0] if found else "",
        needs=tuple(sorted(needs)),
        shell=("/bin/bash", "-l") if "bash" in programs else ("/bin/sh", "-l"),
        env={**env, **fixed},
    )


def shipped() -> dict[str, dict[str, bytes]]:
    """The built-in templates that have a Dockerfile, and the files that it is built from."""
    found: dict[str, dict[str, bytes]] = {}
    for folder in (resources.files("capsule") / "templates").iterdir():
        if folder.is_dir() and (folder / "Dockerfile").is_file():
            files = sorted(folder.iterdir(), key=lambda file: file.name)
            found[folder.name] = {file.name: file.read_bytes() for file in files if file.is_file()}
    return dict(sorted(found.items()))


def shipped_context(name: str) -> BinaryIO:
    """What a built-in template is built from, as a tar. Blocks."""
    import tarfile  # costs 4 ms; few starts need it

    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for file, content in shipped()[name].items():
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    context.seek(0)
    return context


def _built_in() -> Iterator[Template]:
    for file in list_files(resources.files("capsule") / "templates"):
        yield read_document(file).template()
