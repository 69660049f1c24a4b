"""What E2B's SDKs get from its control plane."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, field

from capsule.edge.e2b.access import Access
from capsule.edge.e2b.control_shapes import E2bNetwork
from capsule.edge.e2b.kept import id_of, names_of
from capsule.edge.e2b.template_names import told
from capsule.model import MIB, Limits, State
from capsule.service import Sandbox, Snapshot
from capsule.service.history import Sample

# What the SDKs take for granted grows with it; this is the one whose answers are given here.
ENVD_VERSION = "0.6.13"
CLIENT_ID = "capsule"
NOTE = "e2b.network"  # under this name a sandbox keeps the network that was asked for


class E2bError(msgspec.Struct, frozen=True, kw_only=True):
    code: int
    message: str


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class E2bSandbox(View, frozen=True, kw_only=True):
    """One that was made or connected to: how to reach it, and with what."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    envd_version: str
    envd_access_token: str
    domain: str
    alias: str | UnsetType = UNSET
    traffic_access_token: str | UnsetType = UNSET


class E2bMount(View, frozen=True, kw_only=True):
    name: str
    path: str


class E2bLifecycle(View, frozen=True, kw_only=True):
    auto_resume: bool
    on_timeout: str


class E2bListed(View, frozen=True, kw_only=True):
    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    state: str
    envd_version: str
    metadata: Mapping[str, str]
    volume_mounts: list[E2bMount]
    alias: str | UnsetType = UNSET


class E2bDetail(E2bListed, frozen=True, kw_only=True):
    envd_access_token: str
    domain: str
    allow_internet_access: bool
    lifecycle: E2bLifecycle
    network: E2bNetwork | UnsetType = UNSET
    pause_mode: str | UnsetType = UNSET


class E2bForked(View, frozen=True, kw_only=True):
    sandbox: E2bSandbox


class E2bSnapshotInfo(View, frozen=True, kw_only=True):
    snapshot_id: str = field(name="snapshotID")
    names: list[str]


class E2bMetric(View, frozen=True, kw_only=True):
    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int | None
    mem_total: int
    mem_cache: int
    disk_used: int | None
    disk_total: int


class E2bManyMetrics(View, frozen=True, kw_only=True):
    sandboxes: dict[str, E2bMetric]


def made(sandbox: Sandbox, access: Access, domain: str) -> E2bSandbox:
    closed = sandbox.ports != "public"
    return E2bSandbox(
        template_id=template_id(sandbox),
        sandbox_id=sandbox.id,
        client_id=CLIENT_ID,
        envd_version=ENVD_VERSION,
        envd_access_token=access.token(sandbox.id),
        domain=domain,
        alias=told(sandbox.template).name,
        traffic_access_token=access.traffic_token(sandbox.id) if closed else UNSET,
    )


def listed(sandbox: Sandbox) -> E2bListed:
    return E2bListed(**_common(sandbox))


def detail(sandbox: Sandbox, access: Access, domain: str) -> E2bDetail:
    on_timeout = "pause" if sandbox.on_timeout == "pause" else "kill"
    return E2bDetail(
        **_common(sandbox),
        envd_access_token=access.token(sandbox.id),
        domain=domain,
        allow_internet_access=False,  # no sandbox has any
        pause_mode=_PAUSES.get(sandbox.pause_kept, UNSET),
        network=network_of(sandbox) if NOTE in sandbox.notes else UNSET,
        lifecycle=E2bLifecycle(auto_resume=sandbox.auto_resume, on_timeout=on_timeout),
    )


def kept(snapshot: Snapshot) -> E2bSnapshotInfo:
    return E2bSnapshotInfo(snapshot_id=id_of(snapshot.name), names=names_of(snapshot))


_PAUSES = {"memory": "full", "files": "filesystem"}


def metric(sandbox: Sandbox, sample: Sample) -> E2bMetric:
    limits = sandbox.limits
    return E2bMetric(
        timestamp=datetime.fromtimestamp(sample.at, UTC),
        timestamp_unix=int(sample.at),
        cpu_count=cores(limits),
        cpu_used_pct=round(100 * sample.cpus / limits.cpus, 2),
        mem_used=sample.memory,
        mem_total=limits.memory,
        mem_cache=0,  # counted as used
        disk_used=sample.disk,
        disk_total=limits.disk,
    )


def _common(sandbox: Sandbox) -> dict[str, Any]:
    limits = sandbox.limits
    return {
        "template_id": template_id(sandbox),
        "sandbox_id": sandbox.id,
        "client_id": CLIENT_ID,
        "started_at": sandbox.created_at,
        "end_at": sandbox.expires_at,
        "cpu_count": cores(limits),
        "memory_mb": limits.memory // MIB,
        "disk_size_mb": limits.disk // MIB,
        "state": "paused" if sandbox.state is State.PAUSED else "running",
        "envd_version": ENVD_VERSION,
        "metadata": sandbox.metadata,
        "volume_mounts": [E2bMount(name=each.name, path=each.path) for each in sandbox.volumes],
        "alias": told(sandbox.template).name,
    }


def cores(limits: Limits) -> int:
    return max(1, math.ceil(limits.cpus))


def template_id(sandbox: Sandbox) -> str:
    """What another like it is made from."""
    return id_of(sandbox.snapshot) if sandbox.snapshot else str(told(sandbox.template))


def network_of(sandbox: Sandbox) -> E2bNetwork:
    """What was asked for; nothing: as it is for all."""
    return msgspec.json.decode(sandbox.notes.get(NOTE) or b"{}", type=E2bNetwork)


def https_ports(sandbox: Sandbox) -> list[int]:
    return (NOTE in sandbox.notes and network_of(sandbox).https_ports) or []


def domain_of(host: str) -> str:
    """Below which the ports of sandboxes are found, for who came to `host`: a number has no names
    below it, and loopback's has another name that does."""
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not colon:
        name = host
    try:
        loopback = ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return host
    return f"localhost{colon}{port}" if loopback else host
