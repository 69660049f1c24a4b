"""Snapshots of sandboxes, on the server: `client.snapshots`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from ._drivers import AsyncDriver, SyncDriver
from ._files import Content, Progress, body_of, successful
from ._flow import Answer, Call, Flow, Handle, Open, Read, method, work
from ._landing import Landing
from ._rpc import accepted, naming, parse, rpc
from .values import SnapshotInfo


class _Given:
    """A Landing in a file that is the caller's."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write = file.write
        self.finish = file.flush

    def open(self) -> None: ...

    def close(self) -> None: ...


def _path(name: str) -> str:
    return f"/v1/snapshots/{quote(name, safe='')}/archive"


class SnapshotMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def list(self) -> Flow[list[SnapshotInfo]]:
        """All snapshots, oldest first."""
        body = yield from self._ask("list", {})
        return [SnapshotInfo.from_json(each) for each in body["snapshots"]]

    @method
    def get(self, name: str) -> Flow[SnapshotInfo]:
        """One snapshot."""
        return SnapshotInfo.from_json((yield from self._ask("get", {"name": name})))

    @method
    def delete(self, name: str) -> Flow[None]:
        """Remove it. Sandboxes that started from it go on."""
        yield from self._ask("delete", {"name": name}, repeatable=False)

    @method
    def export(
        self, name: str, local: str | Path | IO[bytes], *, progress: Progress | None = None
    ) -> Flow[int]:
        """Write it into the file `local` as a tar, for another server. Returns its size.

        `progress` is called with the count of bytes of every chunk.
        """
        handle: Handle = yield Open(Call("GET", _path(name)))
        yield from naming(accepted(handle), {"name": name})
        size = 0
        landing = Landing(Path(local), 0o600) if isinstance(local, str | Path) else _Given(local)
        try:
            yield from work(landing.open)
            while chunk := (yield Read(handle)):
                size += len(chunk)
                yield from work(functools.partial(landing.write, chunk))
                if progress is not None:
                    progress(len(chunk))
            yield from work(landing.finish)
        finally:
            landing.close()
        return size

    @method
    def import_(
        self,
        name: str,
        archive: Content,
        *,
        template: str | None = None,
        provider: str | None = None,
    ) -> Flow[SnapshotInfo]:
        """A snapshot of this name from what `export` wrote: a local `Path`, a file object, bytes,
        chunks. Template and provider are the archive's, unless others are given."""
        given = {"name": name, "template": template, "provider": provider}
        query = {key: given[key] for key in ("template", "provider") if given[key] is not None}
        headers = {"Content-Type": "application/x-tar"}
        call = Call("PUT", f"{_path(name)}?{urlencode(query)}", body_of(archive), headers)
        answer: Answer = yield from naming(successful(call), given)
        return SnapshotInfo.from_json(parse(answer))

    def _ask(self, name: str, params: Mapping[str, Any], *, repeatable: bool = True) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"snapshot.v1.{name}", params, retries=retries, repeatable=repeatable)


class Snapshots(SnapshotMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncSnapshots(SnapshotMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
