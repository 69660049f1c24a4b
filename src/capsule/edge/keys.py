"""What an admin can do with keys, once for JSON-RPC and REST: shapes in, views out."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.service import Service
from capsule.service.accounts import Key, moment
from capsule.service.caller import Caller


class CreateKey(s.Shape, kw_only=True, frozen=True):
    tenant: s.Name | None = None
    scopes: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("run",)
    name: Annotated[str, Meta(max_length=256)] = ""
    ttl_ms: Annotated[int, Meta(ge=1000, le=100 * s.YEAR_MS)] | None = None


class ListKeys(s.Shape, kw_only=True, frozen=True):
    tenant: s.Name | None = None


class OfKey(s.Shape, kw_only=True, frozen=True):
    key_id: s.Id


class KeyView(v.View, frozen=True, kw_only=True):
    id: str
    tenant: str
    name: str
    scopes: list[str]
    state: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    used_at: datetime | None
    key: str | UnsetType = UNSET

    @classmethod
    def of(cls, key: Key, now: float, *, token: str | UnsetType = UNSET) -> KeyView:
        made = moment(key.created)
        assert made is not None
        return cls(
            id=key.id,
            tenant=key.tenant,
            name=key.name,
            scopes=[str(scope) for scope in key.scopes],
            state=key.state(now),
            created_at=made,
            expires_at=moment(key.expires),
            revoked_at=moment(key.revoked),
            used_at=moment(key.used),
            key=token,
        )


class KeysView(v.View, frozen=True, kw_only=True):
    keys: list[KeyView]


class KeyVerbs:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, caller: Caller, p: CreateKey) -> KeyView:
        made = await self._service.keys.create(
            tenant=p.tenant or caller.tenant,
            scopes=p.scopes,
            name=p.name,
            ttl=None if p.ttl_ms is None else p.ttl_ms / 1000,
        )
        return KeyView.of(made.key, self._service.keys.now(), token=made.token)

    async def list(self, caller: Caller, p: ListKeys) -> KeysView:
        found = await self._service.keys.list(p.tenant)
        now = self._service.keys.now()
        return KeysView(keys=[KeyView.of(key, now) for key in found])

    async def revoke(self, caller: Caller, p: OfKey) -> KeyView:
        key = await self._service.keys.revoke(p.key_id)
        return KeyView.of(key, self._service.keys.now())
