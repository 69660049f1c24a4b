"""Snapshots of sandboxes, on the server: `client.snapshots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, method
from ._rpc import rpc
from .values import SnapshotInfo


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
