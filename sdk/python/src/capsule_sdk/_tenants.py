"""What tenants may use, on the server: `client.tenants`. To set it takes the scope `admin`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, method
from ._rpc import rpc
from .values import _known


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """What a tenant may use and uses; 0 in `quota`: no limit. `cpu_until` ends the period."""

    tenant: str
    quota: Mapping[str, float]
    used: Mapping[str, float | None]
    cpu_until: datetime

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> TenantInfo:
        return _known(cls, {**body, "cpu_until": datetime.fromisoformat(body["cpu_until"])})


class TenantMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def get(self, tenant: str | None = None) -> Flow[TenantInfo]:
        """What a tenant may use, and uses now; the caller's own if none is named."""
        return TenantInfo.from_json((yield from self._ask("get", {"tenant": tenant})))

    @method
    def list(self) -> Flow[list[TenantInfo]]:
        """All of them, by name."""
        body = yield from self._ask("list", {})
        return [TenantInfo.from_json(each) for each in body["tenants"]]

    @method
    def set(
        self,
        tenant: str,
        *,
        sandboxes: int | None = None,
        execs: int | None = None,
        memory: int | None = None,
        cpu_seconds: float | None = None,
        storage: int | None = None,
        reset: bool = False,
    ) -> Flow[TenantInfo]:
        """What is not given stays; 0: no limit. `reset` first forgets what was set, so that the
        server's configuration counts."""
        quota = {
            "sandboxes": sandboxes,
            "execs": execs,
            "memory": memory,
            "cpu_seconds": cpu_seconds,
            "storage": storage,
            "reset": reset or None,
        }
        return TenantInfo.from_json((yield from self._ask("set", {"tenant": tenant, **quota})))

    def _ask(self, name: str, params: Mapping[str, Any]) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"tenant.v1.{name}", params, retries=retries, repeatable=True)


class Tenants(TenantMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncTenants(TenantMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
