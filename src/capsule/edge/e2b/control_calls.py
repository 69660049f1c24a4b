"""The control plane of E2B in terms of the service: each call is one of ours, or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec.structs import replace

from capsule.config import Config
from capsule.edge.drain import Gate
from capsule.edge.e2b import control_shapes as s
from capsule.edge.e2b import control_views as v
from capsule.edge.e2b import pages
from capsule.edge.e2b import sandbox_logs as logs
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.kept import chosen, is_kept, kept_as, wanted
from capsule.edge.e2b.secrets import check_no_secret
from capsule.edge.e2b.template_names import maybe
from capsule.edge.errors import invalid_field
from capsule.edge.presence import LOOK_AFTER, while_there
from capsule.errors import (
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    WrongStateError,
)
from capsule.model import State
from capsule.service import CreateRequest, Sandbox, Service, VolumeWish
from capsule.service.admission import new_id
from capsule.service.caller import Caller
from capsule.service.template_names import resolve
from capsule.service.tenant_templates import TenantTemplates

_NO_NETWORK = "sandboxes of this server have no network"
_SHOWN = {State.RUNNING: "running", State.PAUSED: "paused"}


class Query(NamedTuple):
    """Which sandboxes a list has, and from where on."""

    metadata: str = ""
    states: frozenset[str] = frozenset(_SHOWN.values())
    started_after: datetime | None = None
    template: str = ""
    newest_first: bool = True
    limit: int = pages.PAGE
    next_token: str = ""


class Control:
    def __init__(self, config: Config, service: Service, gate: Gate, access: Access) -> None:
        self._config = config
        self._service = service
        self._gate = gate
        self.access = access

    def domain(self, host: str) -> str:
        return self._config.sandbox_domain or v.domain_of(host)

    async def create(
        self, caller: Caller, p: s.E2bCreate, host: str, *, key: str | None, older: bool
    ) -> v.E2bSandbox:
        """`older`: by an SDK that asks for the internet without being asked to."""
        self._gate.admit()
        if not older and p.allow_internet_access:
            raise _no_network("allow_internet_access")
        if p.iam:
            raise InvalidError("iam: there are no workload identities here", hint="leave out iam")
        if p.auto_resume is not None and p.auto_resume.enabled and not p.auto_pause_memory:
            raise invalid_field("autoResume", "not with autoPauseMemory: false; connect to wake it")
        network = p.network or s.E2bNetwork()
        check_network(network)
        check_no_secret("envVars", (p.env_vars or {}).values())
        self._check_timeout(p.timeout)
        request = CreateRequest(
            **self._origin(p.template_id, caller),
            ttl=s.DEFAULT_TIMEOUT if p.timeout is None else max(p.timeout, 1),
            env=p.env_vars or {},
            metadata=p.metadata or {},
            on_timeout="pause" if p.auto_pause else "delete",
            auto_resume=p.auto_resume is not None and p.auto_resume.enabled,
            keep_memory=p.auto_pause_memory,
            volumes=tuple(VolumeWish(each.name, each.path) for each in p.volume_mounts or ()),
            ports="token" if network.allow_public_traffic is False else "public",
            request_host=network.mask_request_host or "",
            notes=noted(network) if p.network else {},
            idempotency_key=key,
        )
        made = await self._made(request, caller)
        self._service.history.follow(made.id)
        return v.made(made, self.access, self.domain(host))

    async def _made(self, request: CreateRequest, caller: Caller) -> Sandbox:
        try:
            return await while_there(self._service.create(request, caller), after=LOOK_AFTER)
        except GoneError as error:  # what the key has made; to E2B that is no 404
            raise ConflictError(error.message, hint=error.hint) from error

    def _origin(self, name: str, caller: Caller) -> dict[str, Any]:
        """A template, or a snapshot, whose id is a template's there."""
        bare = name.rpartition("/")[2].removesuffix(":default")
        built = maybe(bare).kept
        if resolve(self._service.catalog, built, caller.tenant) is not None:
            return {"template": built}
        if (kept := kept_as(bare)) and is_kept(self._service, kept, caller):
            return {"snapshot": kept}
        return {"template": bare}

    def _check_timeout(self, timeout: int | None) -> None:
        most = int(self._config.max_ttl)
        if timeout is not None and timeout > most:
            raise invalid_field("timeout", f"{timeout} seconds, at most {most}")

    async def connect(self, id: str, p: s.E2bConnect, host: str) -> tuple[v.E2bSandbox, bool]:
        """And whether it had to be woken."""
        self._gate.admit()
        self._check_timeout(p.timeout)
        timeout = s.DEFAULT_TIMEOUT if p.timeout is None else p.timeout
        woken = self.living(id).state is State.PAUSED
        if woken:
            await self._service.resume(id, memory=p.memory)
            found = await self._service.set_timeout(id, timeout)
        else:
            found = await self._service.extend(id, timeout)
        return v.made(found, self.access, self.domain(host)), woken

    def living(self, id: str) -> Sandbox:
        """Raises NotFoundError: one that failed or is about to end is none any more."""
        found = self._service.get(id)
        if found.state not in _SHOWN:
            raise NotFoundError(f"sandbox {id} is {found.state}: {found.reason or 'not yet there'}")
        return found

    def detail(self, id: str, host: str) -> v.E2bDetail:
        return v.detail(self.living(id), self.access, self.domain(host))

    async def kill(self, id: str) -> None:
        await self._service.delete(id)

    async def set_timeout(self, id: str, timeout: int) -> None:
        self._check_timeout(timeout)
        self.living(id)
        await self._service.set_timeout(id, timeout)

    async def refresh(self, id: str, duration: int) -> None:
        self.living(id)
        await self._service.extend(id, min(duration, self._config.max_ttl))

    async def pause(self, id: str, *, memory: bool) -> None:
        """Its time stands still. Raises WrongStateError."""
        if self.living(id).state is State.PAUSED:
            raise WrongStateError(f"sandbox {id} is paused already", hint="connect to it")
        await self._service.pause(id, memory=memory, hold=True)

    async def resume(self, id: str, p: s.E2bResume, host: str) -> v.E2bSandbox:
        """Raises WrongStateError."""
        if self.living(id).state is not State.PAUSED:
            raise WrongStateError(f"sandbox {id} is running already", hint="connect to it")
        timeout = s.FORK_TIMEOUT if p.timeout is None else p.timeout
        found, _ = await self.connect(id, replace(p, timeout=timeout), host)
        return found

    async def fork(self, id: str, p: s.E2bFork, host: str) -> Sequence[v.E2bForked]:
        self._gate.admit()
        self.living(id)
        self._check_timeout(p.timeout)
        made = await self._service.fork(id, p.count, ttl=max(p.timeout, 1))
        for each in made:
            self._service.history.follow(each.id)
        domain = self.domain(host)
        return [v.E2bForked(sandbox=v.made(each, self.access, domain)) for each in made]

    async def snapshot(self, id: str, p: s.E2bSnapshot) -> v.E2bSnapshotInfo:
        """Of its files; one of the same name is replaced."""
        self._gate.admit()
        tenant = self.living(id).tenant
        name = chosen(self._service, p.name, tenant) if p.name else new_id()
        return v.kept(await self._service.snapshots.make(id, name, {}, again=True))

    def snapshots(
        self, caller: Caller, *, sandbox: str, name: str, limit: int, token: str
    ) -> pages.Page[v.E2bSnapshotInfo]:
        matching = [
            each
            for each in self._service.snapshots.list(caller.tenant)
            if (not sandbox or each.sandbox == sandbox) and (not name or wanted(each, name))
        ]
        found = pages.page(matching, lambda x: (x.created, x.name), limit=limit, token=token)
        return pages.Page([v.kept(each) for each in found.items], found.next_token)

    async def delete_template(self, caller: Caller, id: str) -> None:
        """Or the snapshot that has this id."""
        kept = kept_as(id)
        if kept is not None and is_kept(self._service, kept, caller):
            await self._service.snapshots.delete(kept, caller.tenant)
        else:
            await TenantTemplates(self._service.templates).delete(caller, maybe(id).kept)

    async def set_network(self, id: str, p: s.E2bNetworkUpdate) -> None:
        """Instead of what it was to reach; who may reach it stays as it is."""
        before = v.network_of(self.living(id))
        if p.allow_internet_access:
            raise _no_network("allow_internet_access")
        network = s.E2bNetwork(
            allow_public_traffic=before.allow_public_traffic,
            mask_request_host=before.mask_request_host,
            allow_out=p.allow_out,
            deny_out=p.deny_out,
            dns_servers=p.dns_servers,
            egress_proxy=p.egress_proxy,
            rules=p.rules,
        )
        check_network(network)
        await self._service.annotate(id, noted(network))

    async def metrics(self, id: str, start: int | None, end: int | None) -> list[v.E2bMetric]:
        """Of the last hour, oldest first."""
        sandbox = self.living(id)
        return [
            v.metric(sandbox, each)
            for each in await self._service.history.of(id)
            if (start is None or each.at >= start) and (end is None or each.at < end + 1)
        ]

    async def logs(self, id: str, wanted: logs.Wanted) -> list[logs.E2bLogEntry]:
        """None of one that is paused: to look is no reason to wake it, and no activity."""
        if self.living(id).state is not State.RUNNING:
            return []
        return logs.chosen(await self._service.look_at_execs(id), wanted)

    async def last_metrics(self, caller: Caller, ids: Sequence[str]) -> v.E2bManyMetrics:
        """Of those that there are."""
        found: dict[str, v.E2bMetric] = {}
        for id in ids:
            try:
                self._service.own(caller, id)
                samples = await self.metrics(id, None, None)
            except (NotFoundError, GoneError):
                continue
            if samples:
                found[id] = samples[-1]
        return v.E2bManyMetrics(sandboxes=found)

    def list(self, caller: Caller, query: Query) -> pages.Page[v.E2bListed]:
        found = pages.page(
            self._matching(caller, query),
            _place,
            limit=query.limit,
            token=query.next_token,
            newest_first=query.newest_first,
        )
        return pages.Page([v.listed(each) for each in found.items], found.next_token)

    def _matching(self, caller: Caller, query: Query) -> Iterator[Sandbox]:
        wanted = pairs(query.metadata)
        template = query.template.removesuffix(":default")
        for each in self._service.list(metadata=wanted, tenant=caller.tenant):
            if _SHOWN.get(each.state) not in query.states:
                continue
            if query.started_after is not None and each.created_at < query.started_after:
                continue
            if not template or template in (each.template, v.template_id(each)):
                yield each


def check_network(network: s.E2bNetwork) -> None:
    """What cannot be given is refused, and not taken for granted. Nobody can be denied more than
    everything, so what only denies is kept as it is."""
    for name, given in (
        ("allowOut", network.allow_out),
        ("dnsServers", network.dns_servers),
        ("egressProxy", network.egress_proxy),
        ("rules", network.rules),
    ):
        if given:
            raise _no_network(f"network.{name}")


def _no_network(field: str) -> InvalidError:
    return invalid_field(field, f"cannot be given: {_NO_NETWORK}", hint=f"leave out {field}")


def noted(network: s.E2bNetwork) -> dict[str, str]:
    return {v.NOTE: msgspec.json.encode(network).decode()}


def pairs(text: str) -> dict[str, str]:
    """The SDKs quote names and values, and then the query that they make of them."""
    return {unquote(name): unquote(value) for name, value in parse_qsl(text, True)}


def states(text: Sequence[str]) -> frozenset[str]:
    given = {word.strip() for each in text for word in each.split(",") if word.strip()}
    known = frozenset(_SHOWN.values())
    if unknown := given - known:
        raise invalid_field("state", f"{min(unknown)!r} is none, allowed: {', '.join(known)}")
    return frozenset(given) or known


def _place(sandbox: Sandbox) -> pages.Place:
    return sandbox.created_at.timestamp(), sandbox.id


def aware(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
