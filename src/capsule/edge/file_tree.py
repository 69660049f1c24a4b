"""The files of an editor as it keeps them: a tree of nodes, and the same as a list of paths.

[{"name": "src", "type": "folder", "children": [
    {"name": "index.js", "type": "file", "content": "…"},
    {"name": "logo.png", "type": "file", "content": "iVBO…", "encoding": "base64"}]}]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from capsule.edge.errors import invalid_field
from capsule.edge.files import decoded
from capsule.edge.paths import inside_workspace
from capsule.errors import TooLargeError
from capsule.settings import brief

MAX_NODES = 10_000
MAX_DEPTH = 64
MAX_PATH = 4000


class FileNode(msgspec.Struct, kw_only=True, frozen=True):
    """What else an editor keeps in a node (language, expanded …) is its own business."""

    name: str
    type: Literal["file", "folder"]
    content: str | None = None  # None: as it is in the container
    encoding: Literal["text", "base64"] = "text"
    children: list[FileNode] | None = None
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """Paths are relative to /workspace, parents before what is in them."""

    folders: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # with content
    kept: list[str] = field(default_factory=list)  # files without
    deleted: list[str] = field(default_factory=list)

    def paths(self) -> Iterator[str]:
        yield from self.folders
        yield from self.files
        yield from self.kept
        yield from self.deleted


def flatten(nodes: Sequence[FileNode]) -> Tree:
    """Raises InvalidError (names, base64, a path twice), TooLargeError."""
    walk = _Walk()
    walk.all(nodes, "", 0)
    return walk.tree


class _Walk:
    def __init__(self) -> None:
        self.tree = Tree()
        self._folders: set[str] = set()
        self._seen: set[str] = set()
        self._plain: set[str] = set()  # files, and what is to be deleted

    def all(self, nodes: Sequence[FileNode], parent: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _too_deep()
        for node in nodes:
            path = join(parent, inside_workspace(node.name, field="files"))
            self._see(path, node)
            if node.deleted or node.type == "file":
                self._plain.add(path)
            if node.deleted:
                self.tree.deleted.append(path)
                continue
            if path.rpartition("/")[0] not in self._folders:
                for folder in parents(path):
                    self._folder(folder)
            if node.type == "folder":
                self._folder(path)
                self.all(node.children or (), path, depth + 1)
            elif node.content is None:
                self.tree.kept.append(path)
            else:
                what = f"files: content of {brief(path)}"
                self.tree.files[path] = decoded(what, node.content, node.encoding)

    def _see(self, path: str, node: FileNode) -> None:
        if len(path.encode("utf-8", "surrogateescape")) > MAX_PATH:
            raise invalid_field("files", f"{brief(path)} has more than {MAX_PATH} bytes")
        if path.count("/") > MAX_DEPTH:  # a name may be a path
            raise _too_deep()
        if path in self._seen or (path in self._folders and node.type == "file"):
            raise invalid_field("files", f"{brief(path)} is there twice")
        self._seen.add(path)
        if len(self._seen) > MAX_NODES:
            raise TooLargeError(f"files: more than {MAX_NODES} of them", limit=MAX_NODES)

    def _folder(self, path: str) -> None:
        if path in self._folders:
            return
        if path in self._plain:
            raise invalid_field("files", f"{brief(path)} is no folder, and has something in it")
        self._folders.add(path)
        self.tree.folders.append(path)


def _too_deep() -> TooLargeError:
    return TooLargeError(f"files: deeper than {MAX_DEPTH} folders", limit=MAX_DEPTH)


def join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def parents(path: str) -> list[str]:
    """The folders that it is in, outermost first."""
    words = path.split("/")
    return ["/".join(words[:end]) for end in range(1, len(words))]


def above(paths: Iterable[str]) -> set[str]:
    """All the folders that these are in. Each is looked at once, however much is in it."""
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found
