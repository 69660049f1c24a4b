"""API keys, on the server: `client.keys`. They take a key with the scope `admin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, method
from ._rpc import rpc
from .values import _known


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """An API key. `key` is what its holder sends; only the answer that made it has it."""

    id: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    state: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    used_at: datetime | None = None
    key: str = field(default="", repr=False)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> KeyInfo:
        names = ("created_at", "expires_at", "revoked_at", "used_at")
        times = {name: datetime.fromisoformat(body[name]) for name in names if body.get(name)}
        return _known(cls, {**body, **times, "scopes": tuple(body["scopes"])})


class KeyMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def create(
        self,
        *,
        tenant: str | None = None,
        scopes: Sequence[str] = ("run",),
        name: str = "",
        ttl: float | None = None,
    ) -> Flow[KeyInfo]:
        """A new key; `key` of the answer is what its holder sends, and cannot be had again.

        `tenant` is whom it is for (the caller's own if it is not given), `scopes` are some of
        read, run and admin, `ttl` is its life in seconds.
        """
        millis = None if ttl is None else round(ttl * 1000)
        params = {"tenant": tenant, "scopes": list(scopes), "name": name, "ttl_ms": millis}
        return KeyInfo.from_json((yield from self._ask("create", params, repeatable=False)))

    @method
    def list(self, *, tenant: str | None = None) -> Flow[list[KeyInfo]]:
        """All keys, oldest first, without their secrets."""
        body = yield from self._ask("list", {"tenant": tenant})
        return [KeyInfo.from_json(each) for each in body["keys"]]

    @method
    def revoke(self, id: str) -> Flow[KeyInfo]:
        """Refuse it from now on."""
        return KeyInfo.from_json((yield from self._ask("revoke", {"key_id": id})))

    def _ask(self, name: str, params: Mapping[str, Any], *, repeatable: bool = True) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"key.v1.{name}", params, retries=retries, repeatable=repeatable)


class Keys(KeyMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncKeys(KeyMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
