"""What tenants may use: the configuration's, or what an admin has set for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from capsule.config import Config
from capsule.errors import InvalidError
from capsule.service.accounts import AccountFile
from capsule.service.caller import check_tenant
from capsule.settings import brief

MOST = 2**62


@dataclass(frozen=True, slots=True)
class Quota:
    """0: no limit."""

    sandboxes: int = 0  # at the same time
    execs: int = 0  # at the same time
    memory: int = 0  # bytes that live sandboxes have together
    cpu_seconds: float = 0.0  # in each period
    storage: int = 0  # bytes of snapshots and volumes


QUOTAS = tuple(f.name for f in fields(Quota))


def check_quota(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidError."""
    for name, value in changes.items():
        kinds: tuple[type, ...] = (int, float) if name == "cpu_seconds" else (int,)
        good = type(value) in kinds and 0 <= value <= MOST
        if name not in QUOTAS or not good:
            raise InvalidError(f"{name}: {brief(value)} is no quota", field=name)
    return dict(changes)


def default_quota(config: Config) -> Quota:
    return Quota(**{name: getattr(config, f"tenant_{name}") for name in QUOTAS})


class Tenants:
    """In memory, as keys are; read again when the file was written by another process."""

    def __init__(self, config: Config, file: AccountFile) -> None:
        self.default = default_quota(config)
        self._file = file
        self._set: dict[str, Quota] = {}
        self.any_cpu = self.default.cpu_seconds > 0  # whether anybody's CPU time is limited

    def quota(self, tenant: str) -> Quota:
        return self._set.get(tenant, self.default)

    def named(self) -> list[str]:
        return list(self._set)

    async def read(self) -> None:
        self._take(await asyncio.to_thread(self._file.quotas))

    async def set(self, tenant: str, changes: Mapping[str, Any], *, reset: bool = False) -> Quota:
        """`reset` forgets first what was set. Raises InvalidError."""
        checked = check_quota(changes)
        await asyncio.to_thread(self._file.set_quota, check_tenant(tenant), checked, reset)
        await self.read()
        return self.quota(tenant)

    def _take(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        known = asdict(self.default)
        self._set = {
            tenant: replace(self.default, **{k: v for k, v in own.items() if k in known})
            for tenant, own in found.items()
        }
        every = (self.default, *self._set.values())
        self.any_cpu = any(quota.cpu_seconds for quota in every)
