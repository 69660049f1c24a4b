"""Files of a sandbox. Small ones travel in a JSON-RPC call, anything larger as a stream."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from ._drivers import AsyncDriver, SyncDriver, chunks
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
from ._rpc import accepted, failure, parse, rpc
from ._sse import Decoder
from ._tar import Unpacker, pack
from .errors import NotFoundError, UnavailableError, from_json
from .values import Change, FileInfo, Transfer, Written

WORKSPACE = "/workspace"

# Below this, base64 in one JSON-RPC call is cheaper than a request of its own kind.
SMALL = 256 * 1024

Progress = Callable[[int], None]
Content = str | bytes | bytearray | Path | IO[bytes] | Iterable[bytes]


class FileMethods:
    _driver: SyncDriver | AsyncDriver

    def __init__(self, id: str) -> None:
        self.id = id

    @method
    def write_file(
        self, path: str, content: Content, *, mode: int = 0o644, append: bool = False
    ) -> Flow[Written]:
        """Write a file, replacing it in one step; missing folders are made.

        `content` is text, bytes, or what to stream from: a file object, a local `Path`, chunks.
        """
        body = _body(content)
        if isinstance(body, bytes) and len(body) <= SMALL:
            params = {"path": path, "content": _base64(body), "mode": mode, "append": append}
            reply = yield from self._rpc("writeFile", params, repeatable=not append)
        else:
            reply = yield from self._put("files", body, path=path, mode=f"{mode:o}", append=append)
        return Written(reply["path"], reply["size"])

    @method
    def read_file(self, path: str) -> Flow[bytes]:
        """The whole content of a file; see `read_stream` for large ones."""
        reply = yield from self._rpc("readFile", {"path": path, "length": SMALL})
        content = base64.b64decode(reply["content"])
        if len(content) < SMALL:
            return content
        answer: Answer = yield self._get("files", path=path)
        if answer.status >= 300:
            raise failure(answer)
        return answer.body

    @method
    def read_file_text(self, path: str, *, encoding: str = "utf-8") -> Flow[str]:
        content = yield from FileMethods.read_file.flow(self, path)
        return content.decode(encoding)

    @iterator
    def read_stream(self, path: str) -> Emitting[bytes]:
        """A file of any size, chunk by chunk."""
        yield from self._stream(self._get("files", path=path))

    @method
    def list_dir(self, path: str = WORKSPACE, *, recursive: bool = False) -> Flow[list[FileInfo]]:
        """The entries of a folder."""
        body = yield from self._rpc("listDir", {"path": path, "recursive": recursive})
        return [FileInfo.from_json(entry) for entry in body["entries"]]

    @method
    def stat(self, path: str, *, follow: bool = False) -> Flow[FileInfo]:
        """What is at `path`; with `follow`, what a symlink there leads to."""
        return (yield from self._stat(path, follow=follow))

    @method
    def exists(self, path: str) -> Flow[bool]:
        try:
            yield from self._stat(path, follow=False)
        except NotFoundError as error:
            # A sandbox that is gone is no answer to whether it has a file.
            if "path" not in error.details and "stage" not in error.details:
                yield from self._rpc("get", {})
            return False
        return True

    @method
    def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> Flow[None]:
        yield from self._rpc("mkdir", {"path": path, "parents": parents, "mode": mode})

    @method
    def move(self, source: str, target: str, *, overwrite: bool = True) -> Flow[None]:
        params = {"from": source, "to": target, "overwrite": overwrite}
        yield from self._rpc("move", params, repeatable=False)

    @method
    def remove(self, path: str, *, recursive: bool = False) -> Flow[None]:
        params = {"path": path, "recursive": recursive}
        yield from self._rpc("remove", params, repeatable=False)

    @method
    def upload(
        self, local: str | Path, path: str | None = None, *, progress: Progress | None = None
    ) -> Flow[Transfer]:
        """Copy a local file or folder to `path` (default: its own name in the workspace).

        `progress` is called with the count of bytes of every chunk.
        """
        source = Path(local)
        target = path or f"{WORKSPACE}/{source.resolve().name}"
        if (yield from work(source.is_dir)):
            body = _counted(pack(source), progress)
            reply = yield from self._put("archive", body, path=target)
            return Transfer(reply["files"], reply["bytes"])
        found = yield from work(source.stat)
        body = _counted(chunks(source), progress)
        mode = f"{found.st_mode & 0o777:o}"
        reply = yield from self._put("files", body, length=found.st_size, path=target, mode=mode)
        return Transfer(1, reply["size"])

    @method
    def download(
        self, path: str, local: str | Path, *, progress: Progress | None = None
    ) -> Flow[Transfer]:
        """Copy a file to the file `local`, or what is in a folder into the folder `local`."""
        info = yield from self._stat(path, follow=True)
        target = Path(local)
        if (yield from work(target.is_symlink)):
            target = yield from work(target.resolve)  # what it leads to is replaced, not the link
        report = progress or _ignore
        if info.is_dir:
            return (yield from self._download_folder(path, target, report))
        return (yield from self._download_file(path, target, report))

    def _download_file(self, path: str, target: Path, report: Progress) -> Flow[Transfer]:
        handle: Handle = yield Open(self._get("files", path=path))
        yield from accepted(handle)
        # Into a device or a pipe as it is: it must not be replaced by a file.
        whole = not (yield from work(target.exists)) or (yield from work(target.is_file))
        partial = target.with_name(f".{target.name}.partial") if whole else target
        file = yield from work(functools.partial(partial.open, "wb"))
        size = 0
        try:
            while chunk := (yield Read(handle)):
                size += len(chunk)
                yield from work(functools.partial(file.write, chunk))
                report(len(chunk))
            file.close()
            if whole:
                partial.replace(target)
        finally:
            file.close()
            if whole:
                partial.unlink(missing_ok=True)
        return Transfer(1, size)

    def _download_folder(self, path: str, target: Path, report: Progress) -> Flow[Transfer]:
        handle: Handle = yield Open(self._get("archive", path=path))
        yield from accepted(handle)
        unpacker = Unpacker(target)
        try:
            while chunk := (yield Read(handle)):
                yield from work(functools.partial(unpacker.feed, chunk))
                report(len(chunk))
            return (yield from work(unpacker.finish))
        finally:
            unpacker.close()

    @iterator
    def watch(self, path: str = WORKSPACE, *, recursive: bool = False) -> Emitting[Change]:
        """Changes below a folder while they happen, until you stop iterating."""
        call = self._get("watch", path=path, recursive=recursive)
        handle: Handle = yield Open(call)
        yield from accepted(handle)
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

    def _stat(self, path: str, *, follow: bool) -> Flow[FileInfo]:
        return FileInfo.from_json((yield from self._rpc("stat", {"path": path, "follow": follow})))

    def _rpc(
        self,
        name: str,
        params: Mapping[str, Any],
        *,
        timeout: float | None = None,
        repeatable: bool = True,
    ) -> Flow[Any]:
        return rpc(
            f"sandbox.v1.{name}",
            {"id": self.id, **params},
            retries=self._driver.target.retries,
            timeout=timeout,
            repeatable=repeatable,
        )

    def _get(self, what: str, **query: Any) -> Call:
        return Call("GET", self._path(what, query))

    def _put(
        self, what: str, body: Body, *, length: int | None = None, **query: Any
    ) -> Flow[dict[str, Any]]:
        """Sent once: a stream that was read from cannot be read again."""
        headers = {"Content-Type": "application/octet-stream"}
        if length is not None:
            headers["Content-Length"] = str(length)
        answer: Answer = yield Call("PUT", self._path(what, query), body, headers)
        if answer.status >= 300:
            raise failure(answer)
        return parse(answer)

    def _stream(self, call: Call) -> Emitting[bytes]:
        handle: Handle = yield Open(call)
        yield from accepted(handle)
        while chunk := (yield Read(handle)):
            yield Emit(chunk)

    def _path(self, what: str, query: Mapping[str, Any]) -> str:
        words = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items()}
        return f"/v1/sandboxes/{self.id}/{what}?{urlencode(words)}"


def _ignore(_: int) -> None: ...


def _counted(body: Iterable[bytes], progress: Progress | None) -> Iterator[bytes]:
    for chunk in body:
        yield chunk
        if progress is not None:
            progress(len(chunk))


def _body(content: Content) -> Body:
    if isinstance(content, str):
        return content.encode()
    return bytes(content) if isinstance(content, bytearray) else content


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
