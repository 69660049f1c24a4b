"""What E2B's SDKs send to its control plane. What they do not know of is left out, and fields that
nobody knows here are let through: newer SDKs have more of them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

DEFAULT_TIMEOUT = 300
FORK_TIMEOUT = 15  # as E2B's own; also of the older way to resume
_MOST = 2**31

Seconds = Annotated[int, Meta(ge=0, le=_MOST)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=256)]
Texts = Annotated[list[Text], Meta(max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Body(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    pass


class AutoResume(Body, kw_only=True, frozen=True):
    enabled: bool = False


class Mount(Body, kw_only=True, frozen=True):
    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]


class E2bNetwork(Body, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who may reach it, and what it may reach."""

    allow_public_traffic: bool | None = None
    allow_out: Texts | None = None
    deny_out: Texts | None = None
    dns_servers: Texts | None = None
    egress_proxy: dict[str, Any] | None = None
    mask_request_host: Text | None = None
    https_ports: Annotated[list[Port], Meta(max_length=256)] | None = None
    rules: dict[str, Any] | None = None


class E2bNetworkUpdate(Body, kw_only=True, frozen=True, forbid_unknown_fields=True):
    allow_out: Texts | None = None
    deny_out: Texts | None = None
    dns_servers: Texts | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)


class E2bCreate(Body, kw_only=True, frozen=True):
    template_id: Name = msgspec.field(name="templateID")
    timeout: Seconds | None = None
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    secure: bool | None = None  # of older SDKs; every sandbox is
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: E2bNetwork | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: Annotated[list[Mount], Meta(max_length=16)] | None = None


class E2bConnect(Body, kw_only=True, frozen=True):
    timeout: Seconds | None = None
    memory: bool = True


class E2bResume(E2bConnect, kw_only=True, frozen=True):
    auto_pause: bool | None = None


class E2bPause(Body, kw_only=True, frozen=True):
    memory: bool = True
    require_healthy_guest: bool = False  # an agent that does not answer cannot be paused anyway


class E2bFork(Body, kw_only=True, frozen=True):
    timeout: Seconds = FORK_TIMEOUT
    count: Annotated[int, Meta(ge=1, le=20)] = 1


class E2bSnapshot(Body, kw_only=True, frozen=True):
    name: Name | None = None
    memory: bool = True  # it is of files in either case


class E2bTimeout(Body, kw_only=True, frozen=True):
    timeout: Seconds


class E2bRefresh(Body, kw_only=True, frozen=True):
    duration: Annotated[int, Meta(ge=0, le=3600)] = 60
