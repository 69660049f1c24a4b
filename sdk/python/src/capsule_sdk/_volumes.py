"""Volumes, on the server: `client.volumes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, method
from ._rpc import rpc
from .values import VolumeInfo


class VolumeMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def create(
        self,
        name: str,
        *,
        size: int | None = None,
        provider: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Flow[VolumeInfo]:
        """An empty volume: `create(volumes=[{"name": name, "path": "/workspace/data"}])`.

        `size`: the most bytes that it holds. Raises NotSupportedError where the server cannot see
        to that.
        """
        params = {"name": name, "size": size, "provider": provider, "metadata": metadata}
        return VolumeInfo.from_json((yield from self._ask("create", params, repeatable=False)))

    @method
    def list(self) -> Flow[list[VolumeInfo]]:
        """All volumes, oldest first."""
        body = yield from self._ask("list", {})
        return [VolumeInfo.from_json(each) for each in body["volumes"]]

    @method
    def get(self, name: str) -> Flow[VolumeInfo]:
        """One volume."""
        return VolumeInfo.from_json((yield from self._ask("get", {"name": name})))

    @method
    def delete(self, name: str) -> Flow[None]:
        """Remove it with all that is in it. Raises ConflictError while a sandbox has it."""
        yield from self._ask("delete", {"name": name}, repeatable=False)

    def _ask(self, name: str, params: Mapping[str, Any], *, repeatable: bool = True) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"volume.v1.{name}", params, retries=retries, repeatable=repeatable)


class Volumes(VolumeMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncVolumes(VolumeMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
