"""What can be seen and set of tenants, once for JSON-RPC and REST: shapes in, views out."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, structs

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.service import Service
from capsule.service.caller import DEFAULT_TENANT, Caller, KeyScope
from capsule.service.quotas import Used
from capsule.service.tenants import QUOTAS, Quota

Amount = Annotated[int, Meta(ge=0, le=2**62)] | UnsetType


class OfTenant(s.Shape, kw_only=True, frozen=True):
    tenant: s.Name | None = None


class NewQuota(s.Shape, kw_only=True, frozen=True):
    """0: no limit."""

    sandboxes: Amount = UNSET
    execs: Amount = UNSET
    memory: Amount = UNSET
    cpu_seconds: Annotated[float, Meta(ge=0, le=2**53)] | UnsetType = UNSET
    storage: Amount = UNSET
    reset: bool = False


class SetTenant(NewQuota, kw_only=True, frozen=True):
    tenant: s.Name


class TenantView(v.View, frozen=True, kw_only=True):
    tenant: str
    quota: Quota
    used: Used
    cpu_until: datetime


class TenantsView(v.View, frozen=True, kw_only=True):
    tenants: list[TenantView]


class TenantVerbs:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, caller: Caller, p: s.Nothing) -> TenantsView:
        keyed = {key.tenant for key in await self._service.keys.list()}
        known = {DEFAULT_TENANT, *self._service.quotas.known(), *keyed}
        return TenantsView(tenants=[self._view(tenant) for tenant in sorted(known)])

    async def get(self, caller: Caller, p: OfTenant) -> TenantView:
        tenant = p.tenant or caller.tenant
        if tenant != caller.tenant:
            caller.require(KeyScope.ADMIN, "to look at another tenant")
        return self._view(tenant)

    async def set(self, caller: Caller, p: SetTenant) -> TenantView:
        given = {name: getattr(p, name) for name in QUOTAS}
        changes = {name: value for name, value in given.items() if value is not UNSET}
        await self._service.quotas.tenants.set(p.tenant, changes, reset=p.reset)
        return self._view(p.tenant)

    def _view(self, tenant: str) -> TenantView:
        quotas = self._service.quotas
        return TenantView(
            tenant=tenant,
            quota=quotas.tenants.quota(tenant),
            used=quotas.used(tenant),
            cpu_until=quotas.period_end(),
        )


def named(p: NewQuota, tenant: str) -> SetTenant:
    return s.checked(SetTenant(tenant=tenant, **structs.asdict(p)))
