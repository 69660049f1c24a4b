"""The server, as users see it: where sandboxes come from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

import httpx

from ._arguments import millis, number, whole, wrong
from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow
from ._keys import AsyncKeys, Keys
from ._rpc import new_key, rpc
from ._sandbox import AsyncCapsule, Capsule
from ._sessions import AsyncSessions, Sessions
from ._snapshots import AsyncSnapshots, Snapshots
from ._target import Target
from ._templates import AsyncTemplates, Templates
from ._tenants import AsyncTenants, Tenants
from ._volumes import AsyncVolumes, Volumes
from ._webhooks import AsyncWebhooks, Webhooks
from .errors import InvalidError
from .values import PoolInfo, SandboxInfo

DEFAULT_URL = "http://localhost:8080"


class CreateOptions(TypedDict, total=False):
    ttl: float | None  # seconds; the template's, usually 600
    idle_timeout: float | None  # seconds without use after which it ends; 0: never
    memory: int | None  # bytes
    cpus: float | None  # cores
    processes: int | None
    disk: int | None  # bytes
    inodes: int | None
    open_files: int | None
    env: Mapping[str, str] | None
    metadata: Mapping[str, str] | None
    provider: str | None
    provider_key: str | None  # your own key for a provider that is a cloud
    runtime: str | None  # of the provider's engine, such as "runsc"
    on_timeout: str | None  # "delete" or "pause": at the end of its ttl, and when it is idle
    volumes: Sequence[Mapping[str, Any]] | None  # each {"name", "path", "read_only"}
    checkpoint: str | None  # "each": a restore point after each exec
    snapshot: str | None  # its files begin from it; so do its template and provider
    auto_resume: bool | None  # whoever uses it while it is paused wakes it
    ports: str | None  # "public": whoever knows its address may reach what listens in it
    idempotency_key: str | None


_LIMITS = ("memory", "cpus", "processes", "disk", "inodes", "open_files")


def _target(url: str | None, api_key: str | None, retries: int) -> Target:
    where = url or os.environ.get("CAPSULE_URL") or DEFAULT_URL
    headers = {"Accept-Encoding": "identity", "User-Agent": "capsule-sdk-python"}
    if key := (api_key or os.environ.get("CAPSULE_API_KEY") or "").strip():
        if not key.isascii() or not key.isprintable():
            raise InvalidError(
                "api_key is none: it has characters that a key cannot have",
                hint="check CAPSULE_API_KEY for line breaks and quotes",
                field="api_key",
            )
        headers["Authorization"] = f"Bearer {key}"
    return Target.at(_address(where), headers, whole("retries", retries, 0, 1000))


def _address(url: str) -> str:
    hint = f"write it like {DEFAULT_URL}"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise wrong("url", url, f"is not the address of a server: {error}", hint=hint) from error
    known = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 2**16
    if not known or parsed.query:
        raise wrong("url", url, "is not the address of a server", hint=hint)
    return url.rstrip("/")


def create_params(template: str, options: CreateOptions) -> dict[str, Any]:
    for name in set(options) - set(CreateOptions.__annotations__):
        # Python itself says so for plain parameters; a limit that is dropped in silence is none.
        raise TypeError(f"create() got an unexpected keyword argument {name!r}")
    params: dict[str, Any] = {**options, "template": template}
    if params.get("idempotency_key") is None:
        params["idempotency_key"] = new_key()
    limits = {name: params.pop(name, None) for name in _LIMITS}
    params["limits"] = {
        name: number(name, limit) for name, limit in limits.items() if limit is not None
    } or None
    for name, least in (("ttl", 0.001), ("idle_timeout", 0.0)):
        if (seconds := params.pop(name, None)) is not None:
            params[f"{name}_ms"] = millis(name, seconds, least=least)
    return params


class ClientMethods:
    _driver: SyncDriver | AsyncDriver

    def _list(
        self, metadata: Mapping[str, str] | None, state: str | None
    ) -> Flow[list[SandboxInfo]]:
        body = yield from self._rpc("list", {"metadata": metadata, "state": state})
        return [SandboxInfo.from_json(info) for info in body["sandboxes"]]

    def _create(self, template: str, options: CreateOptions) -> Flow[SandboxInfo]:
        params = create_params(template, options)
        given = {"template": template, **options}
        return SandboxInfo.from_json((yield from self._rpc("create", params, given)))

    def _get(self, id: str) -> Flow[SandboxInfo]:
        return SandboxInfo.from_json((yield from self._rpc("get", {"id": id})))

    def _pool(self) -> Flow[PoolInfo]:
        retries = self._driver.target.retries
        return PoolInfo.from_json((yield from rpc("pool.v1.status", {}, retries=retries)))

    def _rpc(
        self, name: str, params: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
    ) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"sandbox.v1.{name}", params, retries=retries, arguments=arguments)


class CapsuleClient(ClientMethods):
    """A connection to a Capsule server.

    `url` defaults to CAPSULE_URL, then to http://localhost:8080; `api_key` to CAPSULE_API_KEY.
    Safe to share between threads.
    """

    _driver: SyncDriver

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, retries: int = 2
    ) -> None:
        self._driver = SyncDriver(_target(url, api_key, retries))
        self.snapshots = Snapshots(self._driver)
        self.volumes = Volumes(self._driver)
        self.keys = Keys(self._driver)
        self.tenants = Tenants(self._driver)
        self.webhooks = Webhooks(self._driver)
        self.templates = Templates(self._driver)
        self.sessions = Sessions(self._driver)

    def create(self, template: str = "python", **options: Unpack[CreateOptions]) -> Capsule:
        """A new sandbox, running when this returns. `with` deletes it at the end."""
        return Capsule(self._driver, self._driver.run(self._create(template, options)))

    def get(self, id: str) -> Capsule:
        """An existing sandbox, to go on with."""
        return Capsule(self._driver, self._driver.run(self._get(id)))

    connect = get

    def list(
        self, *, metadata: Mapping[str, str] | None = None, state: str | None = None
    ) -> list[Capsule]:
        """Every sandbox of this server, oldest first; only those with these metadata and state."""
        found = self._driver.run(self._list(metadata, state))
        return [Capsule(self._driver, info) for info in found]

    def pool(self) -> PoolInfo:
        """What the server has ready, and who waits."""
        return self._driver.run(self._pool())

    def close(self) -> None:
        """Close the connections. Sandboxes live on."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCapsuleClient(ClientMethods):
    """A connection to a Capsule server, for asyncio. The same methods as CapsuleClient, awaited."""

    _driver: AsyncDriver

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, retries: int = 2
    ) -> None:
        self._driver = AsyncDriver(_target(url, api_key, retries))
        self.snapshots = AsyncSnapshots(self._driver)
        self.volumes = AsyncVolumes(self._driver)
        self.keys = AsyncKeys(self._driver)
        self.tenants = AsyncTenants(self._driver)
        self.webhooks = AsyncWebhooks(self._driver)
        self.templates = AsyncTemplates(self._driver)
        self.sessions = AsyncSessions(self._driver)

    async def create(
        self, template: str = "python", **options: Unpack[CreateOptions]
    ) -> AsyncCapsule:
        """A new sandbox, running when this returns. `async with` deletes it at the end."""
        return AsyncCapsule(self._driver, await self._driver.run(self._create(template, options)))

    async def get(self, id: str) -> AsyncCapsule:
        """An existing sandbox, to go on with."""
        return AsyncCapsule(self._driver, await self._driver.run(self._get(id)))

    connect = get

    async def list(
        self, *, metadata: Mapping[str, str] | None = None, state: str | None = None
    ) -> list[AsyncCapsule]:
        """Every sandbox of this server, oldest first; only those with these metadata and state."""
        found = await self._driver.run(self._list(metadata, state))
        return [AsyncCapsule(self._driver, info) for info in found]

    async def pool(self) -> PoolInfo:
        """What the server has ready, and who waits."""
        return await self._driver.run(self._pool())

    async def aclose(self) -> None:
        """Close the connections. Sandboxes live on."""
        await self._driver.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
