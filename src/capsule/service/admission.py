"""From a request for a sandbox to the entry it becomes, with everything checked."""

from __future__ import annotations

import hashlib
import secrets
from base64 import b32encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError, NotSupportedError
from capsule.model import Layer, SandboxId, SandboxSpec, Step, Template, VolumeMount
from capsule.providers.contract import Capabilities
from capsule.service import validate
from capsule.service.caller import DEFAULT_TENANT
from capsule.service.clock import Clock
from capsule.service.entry import Entry
from capsule.service.template_names import no_template, resolve
from capsule.service.values import (
    DEFAULT_TEMPLATE,
    PORT_ACCESS,
    CreateRequest,
    Snapshot,
    VolumeWish,
)
from capsule.settings import brief

_encode = msgspec.json.Encoder(order="deterministic").encode


def fingerprint(request: object) -> str:
    """Says whether two requests with the same key ask for the same."""
    return hashlib.blake2b(_encode(request), digest_size=16).hexdigest()


def new_id() -> SandboxId:
    """80 random bits: none is found by guessing. Short, as it is part of a socket's path."""
    return SandboxId(b32encode(secrets.token_bytes(10)).decode().lower())


class Admission:
    def __init__(
        self,
        config: Config,
        catalog: Mapping[str, Template],
        capabilities: Mapping[str, Capabilities],
        clock: Clock,
        *,
        late: frozenset[str] = frozenset(),
    ) -> None:
        """`late`: providers that are opened when a sandbox first needs them."""
        self._config = config
        self._catalog = catalog
        self._capabilities = capabilities
        self._clock = clock
        self._late = late
        # Told when there are some: whose they are, and the user's home, come last.
        self.mounts: Callable[[Sequence[VolumeWish], str, str, str], tuple[VolumeMount, ...]]
        self.snapshot: Callable[[str, str], Snapshot]

    def admit(
        self,
        request: CreateRequest,
        layers: tuple[Layer, ...] = (),
        tenant: str = DEFAULT_TENANT,
    ) -> Entry:
        """Raises InvalidError, NotFoundError, NotSupportedError, TooLargeError."""
        config = self._config
        request, layers = self._begin_from(request, layers, tenant)
        template = self.template(request.template, tenant)
        validate.env(request.env)
        validate.metadata(request.metadata)
        ttl = min(template.ttl, config.max_ttl) if request.ttl is None else request.ttl
        idle = config.idle_timeout if request.idle_timeout is None else request.idle_timeout
        ttl = validate.seconds("ttl", ttl, 1.0, config.max_ttl)
        now, wall = self._clock.monotonic(), self._clock.now()
        return Entry(
            id=new_id(),
            template=template,
            provider=self.provider(request.provider),
            runtime=validate.name("runtime", request.runtime) if request.runtime else "",
            credential=self._credential(request),
            limits=validate.limits(request.limits, template.limits, config),
            env=dict(request.env),
            metadata=dict(request.metadata),
            ttl=ttl,
            idle_timeout=validate.seconds("idle_timeout", idle, 0.0, config.max_ttl),
            created=wall,
            expires=wall + ttl,
            deadline=now + ttl,
            active=now,
            checked=now,
            key=validate.key(request.idempotency_key),
            on_timeout=self._on_timeout(request),
            auto_resume=request.auto_resume,
            keep_memory=request.keep_memory,
            layers=layers,
            snapshot=request.snapshot or "",
            steps=self._first_step(request, layers, wall),
            volumes=self._volumes(request, tenant, template.user.home),
            ports=validate.choice("ports", request.ports, PORT_ACCESS),
            request_host=validate.request_host(request.request_host),
            tenant=tenant,
            notes=dict(request.notes),
        )

    def template(self, name: str, tenant: str) -> Template:
        template = resolve(self._catalog, name, tenant)
        if template is None:
            raise no_template(self._catalog, name, tenant, "template")
        return template

    def _begin_from(
        self, request: CreateRequest, layers: tuple[Layer, ...], tenant: str
    ) -> tuple[CreateRequest, tuple[Layer, ...]]:
        """With the snapshot's template and provider, and its layers."""
        if not request.snapshot:
            return request, layers
        base = self.snapshot(request.snapshot, tenant)
        for name, given, its in (
            ("template", request.template, base.template),
            ("provider", request.provider, base.provider),
        ):
            if given not in (None, its, DEFAULT_TEMPLATE):
                raise InvalidError(
                    f"{name}: snapshot {base.name} is of {its}, not of {brief(given)}",
                    hint=f"leave out {name}, or take another snapshot",
                    field=name,
                )
        self.require("snapshot", base.provider, field="snapshot")
        return replace(request, template=base.template, provider=base.provider), base.layers

    def _first_step(
        self, request: CreateRequest, layers: tuple[Layer, ...], now: float
    ) -> tuple[Step, ...]:
        if validate.choice("checkpoint", request.checkpoint, ("none", "each")) == "none":
            return ()
        self.require("snapshot", self.provider(request.provider), field="checkpoint")
        return (Step(0, layers, now),)

    def _volumes(self, request: CreateRequest, tenant: str, home: str) -> tuple[VolumeMount, ...]:
        if not request.volumes:
            return ()
        provider = self.provider(request.provider)
        self.require("volume", provider, field="volumes", what="mount volumes")
        return self.mounts(request.volumes, provider, tenant, home)

    def _on_timeout(self, request: CreateRequest) -> str:
        wanted = validate.choice("on_timeout", request.on_timeout, ("delete", "pause"))
        if wanted == "pause":
            self.require("pause", self.provider(request.provider), field="on_timeout")
        return wanted

    def _credential(self, request: CreateRequest) -> str:
        if request.provider_key:
            provider, what = self.provider(request.provider), "take a key of the caller's"
            self.require("key", provider, field="provider_key", what=what)
        return request.provider_key

    def require(self, feature: str, provider: str, *, field: str, what: str = "") -> None:
        """Of a provider that is not open yet nobody knows; then the box itself is asked."""
        found = self._capabilities.get(provider)
        if found is not None and feature not in found.features:
            raise NotSupportedError(
                f"provider {provider} cannot {what or f'{feature} sandboxes'} here",
                hint="GET /v1/capabilities and `capsule doctor` say what it can do, and why not",
                field=field,
            )

    def provider(self, name: str | None) -> str:
        name = self._config.provider if name is None else name
        if isinstance(name, str) and name in self._late:
            return name
        found = self._capabilities.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(sorted({*self._capabilities, *self._late}))
            raise NotFoundError(
                f"provider {brief(name)} is not set up",
                hint=f"take one of: {known}",
                field="provider",
            )
        if not found.usable:
            raise NotSupportedError(
                f"provider {name} cannot be used on this host", hint="run: capsule doctor"
            )
        return name


def spec_of(entry: Entry) -> SandboxSpec:
    return SandboxSpec(
        template=entry.template,
        limits=entry.limits,
        runtime=entry.runtime,
        layers=tuple(layer.id for layer in entry.layers),
        volumes=entry.volumes,
        credential=entry.credential,
        progress=entry.tell,
    )


def create_fingerprint(request: CreateRequest) -> str:
    return fingerprint(replace(request, idempotency_key=None, provider_key=""))
