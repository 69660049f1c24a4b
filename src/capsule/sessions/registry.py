"""The registry as it is now: what comes with Capsule, and what the configured folder adds.

An entry of the folder replaces the built-in one of its name. Files that change are read again when
somebody asks; one that is wrong by then counts as it was before, and is told among `problems`. At
the start it is an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import structlog

from capsule.errors import InvalidError, NotFoundError
from capsule.registry_file import (
    KINDS,
    Agent,
    Document,
    Entry,
    Environment,
    Prompt,
    Tool,
    read_entry,
)
from capsule.settings import brief
from capsule.template_file import SUFFIXES

log = structlog.get_logger(__name__)

_Mark = tuple[int, int, int]
_Key = tuple[str, str]  # kind, and the file's name or the entry's
E_ = TypeVar("E_", Environment, Agent, Tool, Prompt)


class Source(NamedTuple):
    entry: Entry
    document: Document


class _Read(NamedTuple):
    """A file as it was when it was last looked into."""

    mark: _Mark
    source: Source | None  # the last that was right
    problem: InvalidError | None = None


class Registry:
    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._built_in: dict[_Key, Source] = {}
        self._read: dict[_Key, _Read] = {}
        self._entries: Mapping[_Key, Source] = {}
        self.problems: tuple[InvalidError, ...] = ()

    async def open(self) -> None:
        """Raises InvalidError naming the first file that is wrong."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        for kind in KINDS:
            for file in _files(resources.files("capsule") / "registry" / kind):
                source = Source(*read_entry(kind, file, f"{kind}/{file.name}"))
                self._built_in[kind, source.entry.name] = source
        if self._folder is not None and not self._folder.is_dir():
            raise InvalidError(
                f"setting registry_dir: {self._folder} is not a directory", field="registry_dir"
            )
        self.refresh()
        if self.problems:
            raise self.problems[0]

    async def fresh(self) -> None:
        if self._marks() != {key: read.mark for key, read in self._read.items()}:
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read what has changed. Blocks."""
        read: dict[_Key, _Read] = {}
        for key, mark in sorted(self._marks().items()):
            known = self._read.get(key)
            read[key] = known if known and known.mark == mark else self._look(key, mark, known)
        problems = [each.problem for each in read.values() if each.problem]
        entries = dict(self._built_in)
        for (kind, _), (_, source, _) in read.items():
            if source is not None:
                problems += _taken(kind, source, entries)
                entries[kind, source.entry.name] = source
        problems += _dangling(entries)
        for problem in problems:
            log.warning("registry", problem=str(problem))
        self._read, self._entries, self.problems = read, entries, tuple(problems)

    def _look(self, key: _Key, mark: _Mark, before: _Read | None) -> _Read:
        assert self._folder is not None
        kind, name = key
        path = self._folder / kind / name
        try:
            return _Read(mark, Source(*read_entry(kind, path, str(path))))
        except InvalidError as error:
            return _Read(mark, before.source if before else None, error)

    def _marks(self) -> dict[_Key, _Mark]:
        found: dict[_Key, _Mark] = {}
        for kind in KINDS if self._folder else ():
            try:
                with os.scandir(f"{self._folder}/{kind}") as entries:
                    for each in entries:
                        if each.name.endswith(SUFFIXES) and each.name[0] != ".":
                            about = each.stat()
                            mark = (about.st_mtime_ns, about.st_size, about.st_ino)
                            found[kind, each.name] = mark
            except OSError:
                continue  # there is none of this kind, or it went while we looked
        return found

    def complaints(self) -> list[dict[str, Any]]:
        """The problems for those who need not know where the folder is."""
        told = []
        for problem in self.problems:
            body = problem.to_json()
            body["message"] = problem.message.replace(f"{self._folder}/", "")
            file = str(problem.details["file"]).removeprefix(f"{self._folder}/")
            told.append({**body, "details": {**problem.details, "file": file}})
        return told

    def all(self, kind: type[E_]) -> list[E_]:
        """By name."""
        found = [source.entry for _, source in sorted(self._entries.items(), key=lambda x: x[0])]
        return [entry for entry in found if isinstance(entry, kind)]

    def get(self, kind: type[E_], name: str) -> E_:
        """Raises NotFoundError."""
        folder = next(key for key, value in KINDS.items() if value is kind)
        source = self._entries.get((folder, name))
        if source is None:
            known = ", ".join(entry.name for entry in self.all(kind))
            raise NotFoundError(
                f"{folder[:-1]} {brief(name)} does not exist",
                hint=f"take one of: {known}",
                field=folder[:-1],
            )
        return cast(E_, source.entry)

    def environment(self, name: str) -> Environment | None:
        """By its name, or by one of its other names."""
        source = self._entries.get(("environments", name))
        if source is not None and isinstance(source.entry, Environment):
            return source.entry
        return next((each for each in self.all(Environment) if name in each.aliases), None)


def _files(folder: Traversable) -> Iterator[Traversable]:
    names = sorted(folder.iterdir(), key=lambda file: file.name)
    return (file for file in names if file.name.endswith(SUFFIXES))


def _taken(kind: str, source: Source, entries: Mapping[_Key, Source]) -> Iterator[InvalidError]:
    """Two files of one folder cannot have one name."""
    other = entries.get((kind, source.entry.name))
    if other is not None and os.path.isabs(other.document.file):
        yield _complaint(source, ("name",), f"is taken by {other.document.file}")


def _dangling(entries: Mapping[_Key, Source]) -> Iterator[InvalidError]:
    """What agents name has to be there. Environments may also be templates: those come and go."""
    for source in entries.values():
        agent = source.entry
        if not isinstance(agent, Agent):
            continue
        for index, name in enumerate(agent.tools):
            if ("tools", name) not in entries:
                yield _complaint(source, ("tools", str(index)), f"there is no tool {brief(name)}")
        if agent.prompt is not None and ("prompts", agent.prompt) not in entries:
            yield _complaint(source, ("prompt",), f"there is no prompt {brief(agent.prompt)}")


def _complaint(source: Source, where: tuple[str, ...], what: str) -> InvalidError:
    try:
        source.document.wrong(where, what)
    except InvalidError as error:
        return error
