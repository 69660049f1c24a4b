"""Secrets of tenants: values that are taken and never given back.

data_dir/secrets/ has a file for each tenant, for the server's user alone. They are not encrypted:
the key would lie beside them. All versions but the last are forgotten.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from capsule.errors import (
    ConflictError,
    InternalError,
    InvalidError,
    NotFoundError,
    TooLargeError,
)
from capsule.host_errors import host_errors
from capsule.service.clock import Clock
from capsule.settings import brief

MOST = 200  # of a tenant
MOST_VALUE = 64 * 1024
PREFIX = "sec_"
_NAME = re.compile(r"[^{}/\x00-\x1f\x7f-\x9f]{1,128}")


@dataclass(frozen=True, slots=True)
class Secret:
    id: str
    name: str
    value: str = field(repr=False)  # no log has it
    version: int
    created: float  # wall clock
    updated: float
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def updated_at(self) -> datetime:
        return datetime.fromtimestamp(self.updated, UTC)


class Vault:
    def __init__(self, data_dir: Path, clock: Clock) -> None:
        self._folder = data_dir / "secrets"
        self._clock = clock
        self._lock = asyncio.Lock()  # what is read is what is written over

    async def list(self, tenant: str) -> list[Secret]:
        """Oldest first."""
        return await asyncio.to_thread(_read, self._file(tenant))

    async def find(self, tenant: str, key: str) -> Secret:
        """By id or name. Raises NotFoundError."""
        return _found(await self.list(tenant), key)

    async def create(
        self, tenant: str, name: str, value: str, metadata: Mapping[str, str]
    ) -> Secret:
        """Raises InvalidError, ConflictError (the name is taken), TooLargeError, NoSpaceError."""
        name = _name(name)
        _check(value, metadata)
        async with self._lock:
            known = await self.list(tenant)
            if any(each.name == name for each in known):
                raise ConflictError(f"secret {brief(name)} exists already", hint="update it")
            if len(known) >= MOST:
                raise TooLargeError(f"{len(known)} secrets, at most {MOST}", hint="delete one")
            now = self._clock.now()
            id = PREFIX + secrets.token_hex(12)
            made = Secret(id, name, value, 1, now, now, dict(metadata))
            await self._write(tenant, [*known, made])
        return made

    async def update(
        self, tenant: str, key: str, value: str, metadata: Mapping[str, str] | None
    ) -> Secret:
        """Its next version. Raises NotFoundError, InvalidError, TooLargeError, NoSpaceError."""
        _check(value, metadata or {})
        async with self._lock:
            known = await self.list(tenant)
            before = _found(known, key)
            after = replace(
                before,
                value=value,
                version=before.version + 1,
                updated=self._clock.now(),
                metadata=before.metadata if metadata is None else dict(metadata),
            )
            await self._write(tenant, [after if x.id == before.id else x for x in known])
        return after

    async def delete(self, tenant: str, key: str) -> None:
        """Raises NotFoundError."""
        async with self._lock:
            known = await self.list(tenant)
            gone = _found(known, key)
            await self._write(tenant, [each for each in known if each.id != gone.id])

    def _file(self, tenant: str) -> Path:
        return self._folder / f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.json"

    async def _write(self, tenant: str, known: builtins.list[Secret]) -> None:
        with host_errors("the secrets cannot be written"):
            await asyncio.to_thread(_write, self._file(tenant), msgspec.json.encode(known))


def _found(known: list[Secret], key: str) -> Secret:
    wanted = key.lower()
    for each in known:
        if wanted in (each.id, each.name):
            return each
    raise NotFoundError(f"secret {brief(key)} does not exist", hint="list the secrets")


def _name(text: str) -> str:
    name = text.lower()
    if not _NAME.fullmatch(name) or name.startswith(PREFIX):
        raise InvalidError(
            f"name: {brief(text)} cannot be one, allowed: up to 128 characters without '{{', '}}'"
            f" and '/', which do not begin with {PREFIX}",
            field="name",
        )
    return name


def _check(value: str, metadata: Mapping[str, str]) -> None:
    if len(value.encode("utf-8", "surrogatepass")) > MOST_VALUE:
        raise TooLargeError(f"value: larger than {MOST_VALUE} bytes", limit=MOST_VALUE)
    sizes = [(len(k.encode()), len(v.encode())) for k, v in metadata.items()]
    if len(sizes) > 32 or sum(map(sum, sizes)) > 8192 or any(k > 128 or v > 1024 for k, v in sizes):
        raise InvalidError(
            "metadata: up to 32 entries, names of 128 and values of 1024 bytes, 8192 in all",
            field="metadata",
        )


def _read(path: Path) -> list[Secret]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Secret])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError:  # its words could have a value in them
        raise InternalError(f"{path} is not readable", hint="mend it, or remove it") from None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
