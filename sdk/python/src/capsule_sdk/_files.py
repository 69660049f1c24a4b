"""Files of a sandbox, over REST: it carries content as it is and names that are not UTF-8.

A path is text, bytes, or a PurePosixPath, absolute or relative to the workspace. Text may hold what
`os.fsdecode` makes of such names; `FileInfo` has the exact ones as `name_bytes` and `path_bytes`.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlencode

from ._arguments import RemotePath, absolute, mode_digits, path_bytes, shown, wrong
from ._drivers import AsyncDriver, SyncDriver, chunks, known_size
from ._flow import (
    Answer,
    Body,
    Call,
    Emit,
    Emitting,
    Flow,
    Handle,
    Open,
    Read,
    iterator,
    method,
    work,
)
from ._landing import Landing
from ._rpc import accepted, failure, naming, parse, persist, rpc
from ._sse import Decoder
from ._tar import Unpacker, pack
from .errors import (
    ForbiddenError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    from_json,
)
from .values import Change, FileInfo, Transfer, Written

WORKSPACE = "/workspace"
MOST_ENTRIES = 1_000_000

Progress = Callable[[int], None]
Content = str | bytes | bytearray | memoryview | Path | IO[bytes] | Iterable[bytes]


class FileMethods:
    _driver: SyncDriver | AsyncDriver

    def __init__(self, id: str) -> None:
        self.id = id

    @method
    def write_file(
        self, path: RemotePath, content: Content, *, mode: int = 0o644, append: bool = False
    ) -> Flow[Written]:
        """Write a file, replacing it in one step; missing folders are made.

        `content` is text, bytes, or what to stream from: a file object, a local `Path`, chunks.
        """
        body = body_of(content)
        query = {"path": path_bytes(path), "mode": mode_digits(mode), "append": append}
        given = {"path": path, "mode": mode}
        again = isinstance(body, bytes) and not append
        reply = yield from self._put("files", query, given, body, repeatable=again)
        return Written(reply["path"], reply["size"])

    @method
    def read_file(self, path: RemotePath) -> Flow[bytes]:
        """The whole content of a file; see `read_stream` for large ones."""
        call = Call("GET", self._path("files", {"path": path_bytes(path)}))
        answer = yield from self._send(call, {"path": path}, repeatable=True)
        return answer.body

    @method
    def read_file_text(self, path: RemotePath, *, encoding: str = "utf-8") -> Flow[str]:
        """The whole content of a file as text. Raises UnicodeDecodeError where it is none."""
        content = yield from FileMethods.read_file.flow(self, path)
        return content.decode(encoding)

    @iterator
    def read_stream(self, path: RemotePath) -> Emitting[bytes]:
        """A file of any size, chunk by chunk."""
        handle = yield from self._open("files", {"path": path_bytes(path)}, {"path": path})
        while chunk := (yield Read(handle)):
            yield Emit(chunk)

    @method
    def list_dir(
        self, path: RemotePath = WORKSPACE, *, recursive: bool = False
    ) -> Flow[list[FileInfo]]:
        """The entries of a folder; with `recursive`, of those below it too."""
        return (yield from self._list(path_bytes(path), recursive, {"path": path}))

    @method
    def stat(self, path: RemotePath, *, follow: bool = False) -> Flow[FileInfo]:
        """What is at `path`; with `follow`, what a symlink there leads to."""
        return (yield from self._stat(path, follow=follow))

    @method
    def exists(self, path: RemotePath) -> Flow[bool]:
        """Whether there is anything at `path`, be it a symlink that leads nowhere."""
        try:
            yield from self._stat(path, follow=False)
        except NotFoundError as error:
            # A sandbox that is gone is no answer to whether it has a file.
            if "path" not in error.details and "stage" not in error.details:
                yield from self._rpc("get", {})
            return False
        return True

    @method
    def mkdir(self, path: RemotePath, *, parents: bool = True, mode: int = 0o755) -> Flow[None]:
        """Make a folder; with `parents`, those above it too, and it may be there already."""
        query = {"path": path_bytes(path), "parents": parents, "mode": mode_digits(mode)}
        given = {"path": path, "mode": mode}
        yield from self._ask("PUT", "dirs", query, given, repeatable=parents)

    @method
    def move(self, source: RemotePath, target: RemotePath, *, overwrite: bool = True) -> Flow[None]:
        """Move or rename; `overwrite=False` raises ConflictError where `target` exists."""
        ends = {"from": path_bytes(source, "source"), "to": path_bytes(target, "target")}
        given = {"source": source, "target": target}
        query = {**ends, "overwrite": overwrite}
        yield from self._ask("POST", "move", query, given, repeatable=False)

    @method
    def remove(self, path: RemotePath, *, recursive: bool = False) -> Flow[None]:
        """Remove a file, a symlink, or a folder; one that is not empty only with `recursive`."""
        query = {"path": path_bytes(path), "recursive": recursive}
        yield from self._ask("DELETE", "files", query, {"path": path}, repeatable=False)

    @method
    def upload(
        self,
        local: str | Path,
        path: RemotePath | None = None,
        *,
        progress: Progress | None = None,
    ) -> Flow[Transfer]:
        """Copy a local file or folder to `path` (default: its own name in the workspace).

        `progress` is called with the count of bytes of every chunk.
        """
        source = Path(local)
        target = f"{WORKSPACE}/{source.resolve().name}" if path is None else path
        query: dict[str, Any] = {"path": path_bytes(target)}
        given = {"path": target}
        if (yield from work(source.is_dir)):
            skipped: list[str] = []
            body = _counted(pack(source, skipped), progress)
            reply = yield from self._put("archive", query, given, body)
            return Transfer(reply["files"], reply["bytes"], tuple(skipped))
        found = yield from work(source.stat)
        length = yield from work(functools.partial(known_size, source))
        query["mode"] = mode_digits(found.st_mode & 0o777)
        body = _counted(chunks(source), progress)
        reply = yield from self._put("files", query, given, body, length=length)
        return Transfer(1, reply["size"])

    @method
    def download(
        self, path: RemotePath, local: str | Path, *, progress: Progress | None = None
    ) -> Flow[Transfer]:
        """Copy a file to the file `local`, or what is in a folder into the folder `local`."""
        info = yield from self._stat(path, follow=True)
        report = progress or _ignore
        if info.is_dir:
            folder = yield from work(Path(local).resolve)  # it may be a link to one
            return (yield from self._download_folder(path, folder, report))
        return (yield from self._download_file(path, Landing(Path(local), info.mode), report))

    def _download_file(
        self, path: RemotePath, landing: Landing, report: Progress
    ) -> Flow[Transfer]:
        handle = yield from self._open("files", {"path": path_bytes(path)}, {"path": path})
        size = 0
        try:
            yield from work(landing.open)
            while chunk := (yield Read(handle)):
                size += len(chunk)
                yield from work(functools.partial(landing.write, chunk))
                report(len(chunk))
            yield from work(landing.finish)
        finally:
            landing.close()
        return Transfer(1, size)

    def _download_folder(self, path: RemotePath, target: Path, report: Progress) -> Flow[Transfer]:
        handle = yield from self._open("archive", {"path": path_bytes(path)}, {"path": path})
        unpacker = Unpacker(target)
        try:
            while chunk := (yield Read(handle)):
                yield from work(functools.partial(unpacker.feed, chunk))
                report(len(chunk))
            return (yield from work(unpacker.finish))
        finally:
            unpacker.close()

    @iterator
    def watch(self, path: RemotePath = WORKSPACE, *, recursive: bool = False) -> Emitting[Change]:
        """Changes below a folder while they happen, until you stop iterating."""
        query = {"path": path_bytes(path), "recursive": recursive}
        handle = yield from self._open("watch", query, {"path": path})
        decoder = Decoder()
        while chunk := (yield Read(handle)):
            for event in decoder.feed(chunk):
                body = event.json()
                if event.event == "error":
                    raise from_json(body)
                if event.event == "change":
                    yield Emit(Change(body["change"], body["path"], body["is_dir"]))
        raise UnavailableError(
            "the server ended the watch", hint="watch again, after a new listing"
        )

    def _stat(self, path: RemotePath, *, follow: bool) -> Flow[FileInfo]:
        place = path_bytes(path)
        query = {"path": place, "follow": follow}
        body = yield from self._ask("GET", "stat", query, {"path": path})
        return FileInfo.from_json(body, absolute(place))

    def _list(
        self, folder: bytes, recursive: bool, given: Mapping[str, Any]
    ) -> Flow[list[FileInfo]]:
        """An entry's path is shown as text. Where a folder on the way has a name that is not UTF-8
        the text does not tell which one it is; such a folder is listed by itself."""
        query = {"path": folder, "recursive": recursive, "limit": MOST_ENTRIES}
        body = yield from self._ask("GET", "dirs", query, given)
        if body["truncated"] and len(body["entries"]) >= MOST_ENTRIES:
            raise TooLargeError(
                f"{shown(folder)} has more than {MOST_ENTRIES} entries",
                hint="list its folders one by one",
                path=shown(folder),
                limit=MOST_ENTRIES,
            )
        top = absolute(folder)
        beyond = len(shown(top).rstrip("/")) + 1
        found: list[FileInfo] = []
        for entry in body["entries"]:
            parent = entry["path"][beyond:].rpartition("/")[0]
            if "\ufffd" in parent:
                continue
            info = FileInfo.from_json(entry, parent=posixpath.join(top, parent.encode()))
            found.append(info)
            if recursive and info.is_dir and "\ufffd" in info.name:
                with contextlib.suppress(NotFoundError, ForbiddenError):  # as the server does
                    found += yield from self._list(info.path_bytes, True, given)
        return found

    def _rpc(
        self,
        name: str,
        params: Mapping[str, Any],
        *,
        timeout: float | None = None,
        repeatable: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> Flow[Any]:
        return rpc(
            f"sandbox.v1.{name}",
            {"id": self.id, **params},
            retries=self._driver.target.retries,
            timeout=timeout,
            repeatable=repeatable,
            arguments=arguments,
        )

    def _ask(
        self,
        verb: str,
        what: str,
        query: Mapping[str, Any],
        given: Mapping[str, Any],
        *,
        repeatable: bool = True,
    ) -> Flow[dict[str, Any]]:
        """A call without a body. `given` is what the caller wrote, for errors to name."""
        call = Call(verb, self._path(what, query))
        return parse((yield from self._send(call, given, repeatable=repeatable)))

    def _put(
        self,
        what: str,
        query: Mapping[str, Any],
        given: Mapping[str, Any],
        body: Body,
        *,
        length: int | None = None,
        repeatable: bool = False,
    ) -> Flow[dict[str, Any]]:
        headers = {"Content-Type": "application/octet-stream"}
        if length is not None:
            headers["Content-Length"] = str(length)
        call = Call("PUT", self._path(what, query), body, headers)
        return parse((yield from self._send(call, given, repeatable=repeatable)))

    def _send(self, call: Call, given: Mapping[str, Any], *, repeatable: bool) -> Flow[Answer]:
        # A stream that was read from cannot be read again.
        whole = call.body is None or isinstance(call.body, bytes)
        retries = self._driver.target.retries if whole else 0
        once = persist(lambda: successful(call), retries=retries, repeatable=repeatable)
        return (yield from naming(once, given))

    def _open(self, what: str, query: Mapping[str, Any], given: Mapping[str, Any]) -> Flow[Handle]:
        handle: Handle = yield Open(Call("GET", self._path(what, query)))
        yield from naming(accepted(handle), given)
        return handle

    def _path(self, what: str, query: Mapping[str, Any]) -> str:
        words = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items()}
        return f"/v1/sandboxes/{self.id}/{what}?{urlencode(words)}"


def successful(call: Call) -> Flow[Answer]:
    answer: Answer = yield call
    if answer.status >= 300:
        raise failure(answer)
    return answer


def _ignore(_: int) -> None: ...


def _counted(body: Iterable[bytes], progress: Progress | None) -> Iterator[bytes]:
    for chunk in body:
        yield chunk
        if progress is not None:
            progress(len(chunk))


def body_of(content: Content) -> Body:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    given: object = content
    if isinstance(given, bytes | Path | Iterable) or hasattr(given, "read"):
        return cast("Body", given)
    raise wrong("content", content, "is neither text, bytes, a file nor chunks")
