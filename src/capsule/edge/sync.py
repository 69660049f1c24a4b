"""An editor's files into a sandbox: only what changed is written, and what is gone is removed.

What an earlier sync wrote is noted in the sandbox itself, with each file's hash, size and time:
the note lives exactly as long as the files do, also over a restart. A program may spoil it; that
harms nobody but its own sandbox, and then more is written than needed, or a file stays.

Nothing is changed before everything was looked at. A link or a folder that a program has put in
the place of a file is a conflict, not a way to somewhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from capsule.edge.file_tree import MAX_DEPTH, MAX_PATH, Tree, above, parents
from capsule.edge.paths import inside_workspace
from capsule.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    TooLargeError,
)
from capsule.model import MIB, WORKSPACE, FileStat
from capsule.service import Files
from capsule.settings import brief

NOTE = "/tmp/.capsule-sync.json"
MAX_NOTE = 8 * MIB
# What a program that plays with the note can cause.
_SPOILT = (NotFoundError, InvalidError, ForbiddenError, ConflictError, TooLargeError)


class Mark(msgspec.Struct, frozen=True):
    """A file as a sync left it."""

    hash: str
    size: int
    mtime: float


_UNKNOWN = Mark("", -1, 0.0)


class Note(msgspec.Struct):
    files: dict[str, Mark] = {}
    folders: list[str] = []


@dataclass(slots=True)
class Synced:
    written: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    unchanged: int = 0


async def sync(files: Files, tree: Tree, *, partial: bool) -> Synced:
    """Raises ConflictError, and what the files themselves do."""
    return await _Sync(files, tree, await _read_note(files), partial=partial).run()


class _Sync:
    def __init__(self, files: Files, tree: Tree, before: Note, *, partial: bool) -> None:
        self._files = files
        self._tree = tree
        self._before = before
        self._partial = partial
        self._there: dict[str, FileStat] = {}  # of the folders that matter, with what is in them
        self._done = Synced()

    async def run(self) -> Synced:
        tree = self._tree
        dropped = self._dropped()
        await self._look({*tree.paths(), *dropped})
        self._refuse_links()
        self._refuse_missing()
        self._refuse_other_kinds(going=set(dropped))
        for path in tree.deleted:
            await self._remove(path, recursive=True)
        for path in dropped:
            await self._remove(path)
        await self._remove_folders()
        for folder in tree.folders:
            if folder not in self._there:
                await self._files.mkdir(folder)
        await self._write_files(self._next_note())
        return self._done

    async def _write_files(self, note: Note) -> None:
        """Noted before and after: of a sync that breaks off, the next one knows what it meant to
        write."""
        changed = [path for path in self._tree.files if not self._is_there(path)]
        self._done.unchanged = len(self._tree.files) - len(changed)
        if changed:
            note.files |= dict.fromkeys(changed, _UNKNOWN)
            await _write_note(self._files, note)
        for path in changed:
            content = self._tree.files[path]
            stat = await self._files.write(path, content)
            note.files[path] = Mark(_hash(content), stat.size, stat.mtime)
            self._done.written.append(path)
        await _write_note(self._files, note)

    def _is_there(self, path: str) -> bool:
        mark, found = self._before.files.get(path), self._there.get(path)
        if mark is None or found is None or (mark.size, mark.mtime) != (found.size, found.mtime):
            return False
        return mark.hash == _hash(self._tree.files[path])

    def _dropped(self) -> list[str]:
        """What an earlier sync wrote and this tree has no more."""
        if self._partial:
            return []
        wanted = {*self._tree.files, *self._tree.kept, *self._tree.deleted}
        return [path for path in self._before.files if path not in wanted]

    async def _look(self, paths: Iterable[str]) -> None:
        folders = above(paths)
        folders.update(self._tree.folders, self._before.folders)
        await self._list("")
        for folder in sorted(folders):  # parents come first
            found = self._there.get(folder)
            if found is not None and found.type == "dir":
                await self._list(folder)

    async def _list(self, folder: str) -> None:
        where = f"{WORKSPACE}/{folder}" if folder else WORKSPACE
        prefix = f"{folder}/" if folder else ""
        for entry in (await self._files.list(where)).entries:
            self._there[prefix + entry.name] = entry

    def _refuse_links(self) -> None:
        """Also of folders on the way. What is to be removed may be a link: it goes itself."""
        tree = self._tree
        for path in (*tree.folders, *tree.files, *tree.kept):
            self._refuse_link(path)
        for folder in above(tree.deleted):
            self._refuse_link(folder)

    def _refuse_link(self, path: str) -> None:
        found = self._there.get(path)
        if found is not None and found.type == "symlink":
            raise ConflictError(
                f"{brief(path)} is a symbolic link that a program has made",
                hint="remove it in the container, or delete it with a sync",
                path=path,
            )

    def _refuse_missing(self) -> None:
        for path in self._tree.kept:
            if path not in self._there:
                raise ConflictError(
                    f"{brief(path)} is not in the container, and came without content",
                    hint="send its content",
                    path=path,
                )

    def _refuse_other_kinds(self, going: set[str]) -> None:
        going |= set(self._tree.deleted) | set(self._dropped_folders())
        wanted = [*((path, "dir") for path in self._tree.folders)]
        wanted += [(path, "file") for path in (*self._tree.files, *self._tree.kept)]
        for path, kind in wanted:
            found = self._there.get(path)
            if found is not None and found.type != kind and path not in going:
                raise ConflictError(
                    f"{brief(path)} is a {found.type} in the container, not a {kind}",
                    hint="remove it there, or delete it with a sync first",
                    path=path,
                )

    def _dropped_folders(self) -> list[str]:
        """Innermost first."""
        if self._partial:
            return []
        wanted = set(self._tree.folders)
        return sorted((f for f in self._before.folders if f not in wanted), reverse=True)

    async def _remove(self, path: str, *, recursive: bool = False) -> None:
        if path not in self._there or self._behind_a_link(path):
            return
        try:
            await self._files.remove(path, recursive=recursive)
        except NotFoundError:
            return
        finally:
            self._there.pop(path, None)
        self._done.deleted.append(path)

    async def _remove_folders(self) -> None:
        """Those that an earlier sync made, unless a program has put something into them."""
        for folder in self._dropped_folders():
            found = self._there.get(folder)
            if found is None or found.type != "dir" or self._behind_a_link(folder):
                continue
            try:
                await self._files.remove(folder)
            except (ConflictError, InvalidError, NotFoundError):
                continue
            self._there.pop(folder)
            self._done.deleted.append(folder)

    def _behind_a_link(self, path: str) -> bool:
        return any(
            (found := self._there.get(folder)) is not None and found.type != "dir"
            for folder in parents(path)
        )

    def _next_note(self) -> Note:
        """Of what stays. In a partial sync that is all of the earlier ones but what was deleted."""
        gone = set(self._tree.deleted) | set(self._done.deleted)
        kept = self._before.files if self._partial else {*self._tree.kept, *self._tree.files}
        files = {
            path: mark
            for path, mark in self._before.files.items()
            if path in kept and not gone & {path, *parents(path)}
        }
        folders = [f for f in self._before.folders if not gone & {f, *parents(f)}]
        return Note(files, list(dict.fromkeys([*folders, *self._tree.folders])))


async def _read_note(files: Files) -> Note:
    try:
        found = await files.read_bytes(NOTE, limit=MAX_NOTE)
        note = msgspec.json.decode(found.data, type=Note)
    except (*_SPOILT, msgspec.DecodeError):
        return Note()
    return Note(
        {path: mark for path, mark in note.files.items() if _is_ours(path)},
        [path for path in note.folders if _is_ours(path)],
    )


async def _write_note(files: Files, note: Note) -> None:
    try:
        if (await files.stat(NOTE)).type != "file":  # a link would be followed
            await files.remove(NOTE, recursive=True)
    except NotFoundError:
        pass
    except _SPOILT:
        return
    try:
        await files.write(NOTE, msgspec.json.encode(note), mode=0o600)
    except (*_SPOILT, NoSpaceError):
        return


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_ours(path: str) -> bool:
    """A path that a sync could have written. The depth of others would be paid for here."""
    if len(path) > MAX_PATH or path.count("/") > MAX_DEPTH:
        return False
    try:
        return inside_workspace(path, field="path") == path
    except InvalidError:
        return False
