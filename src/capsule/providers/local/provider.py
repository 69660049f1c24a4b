"""Boxes made of Linux namespaces, or of Landlock where the kernel grants no more.

The provider prepares (skeleton, disk image, filter, cgroup parents), decides (plan.py) and keeps
records; `capsule-agent` does the rest. A box belongs to nobody's process tree: its record, its
socket and its keeper outlive the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import structlog

from capsule.errors import CapsuleError, NotSupportedError, UnavailableError
from capsule.host_errors import host_errors
from capsule.link.link import AgentLink
from capsule.link.unix import NobodyListensError
from capsule.model import (
    Handle,
    Isolation,
    Limits,
    SandboxId,
    SandboxSpec,
    Template,
    Unenforced,
)
from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.contract import (
    Box,
    Capabilities,
    FileChange,
    Mark,
    Provider,
    Saved,
    VolumeLook,
)
from capsule.providers.identity import safe
from capsule.providers.local import (
    cgroups,
    enforcement,
    findings,
    plan,
    probe,
    records,
    remedies,
    scope,
    trial,
)
from capsule.providers.local.adjust import Adjuster
from capsule.providers.local.box import LocalBox, shut_down, way_to
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.filters import Filters
from capsule.providers.local.folders import make_folder
from capsule.providers.local.host import Host
from capsule.providers.local.launcher import Launcher, ask, launch_failure
from capsule.providers.local.layer_diff import compare
from capsule.providers.local.levels import Way, settle
from capsule.providers.local.probe import Facts
from capsule.providers.local.settings import LocalSettings
from capsule.providers.local.views import Views, visible_cpus

log = structlog.get_logger(__name__)

ADOPT_TIMEOUT = 5.0
UNDO_BUDGET = 20.0


class LocalProvider(Provider):
    name: ClassVar[str] = "local"
    max_layers = 24  # overlayfs takes their paths in one page

    def __init__(self, settings: LocalSettings) -> None:
        self.settings = settings
        self._boxes = settings.run_dir / "boxes"
        self._stage = settings.run_dir / "stage"
        self._spool = settings.data_dir / "spool"
        self._instance = hashlib.sha256(os.fsencode(self._boxes.absolute())).hexdigest()[:8]
        self._launcher = Launcher(
            settings.agent, settings.run_dir / "launcher", self._prepare_cgroups
        )
        self._cgroups = Cgroups(0)
        self._views = Views(settings.run_dir / "views")
        self._filters = Filters(settings.profiles_dir)
        self._facts: Facts | None = None
        self._host: Host | None = None

    async def open(self) -> None:
        try:
            with host_errors("the local provider cannot be set up"):
                await self._open()
        except BaseException:
            await self.aclose()
            raise

    async def _open(self) -> None:
        facts, way = await self._settle()
        if way is None:
            wanted = f"not the level {self.settings.isolation}"
            raise UnavailableError(
                f"this host allows {wanted if self.settings.isolation else 'no isolation level'}",
                hint=remedies.first(facts) or "`capsule doctor` shows the reasons and the fixes",
            )
        self._host = host = Host(self.settings, facts, way.level, way.backing)
        await asyncio.to_thread(self._prepare, host)
        # What the first create would otherwise wait for.
        await host.disks.entry("", Limits())
        await host.roots.get(Template("warm-up"))
        await self._filters.get("default", way.level, own_uid=host.facts.uid_ranges)

    async def _settle(self, *, every_level: bool = False) -> tuple[Facts, Way | None]:
        gathered = await self._gather()
        facts, way = await settle(gathered, self.settings, self._attempt, every_level=every_level)
        if facts.uid_ranges != gathered.uid_ranges:
            facts = await probe.look_at_layers(self._launcher, facts, self.settings.data_dir)
        return facts, way

    async def _attempt(self, way: Way) -> CapsuleError | None:
        """What fails where a box is made this way and used."""
        facts = replace(await self._gather(), uid_ranges=way.uid_ranges)
        self._host = host = Host(self.settings, facts, way.level, way.backing)
        await asyncio.to_thread(self._prepare_folders, host)
        failure = None
        try:
            box = await self.launch(trial.new_id(), trial.SPEC)
            try:
                await trial.exercise(box)
            except CapsuleError as error:
                failure = error
            finally:
                await to_the_end(box.destroy())
        except CapsuleError as error:
            failure = failure or error
        finally:
            self._host = None
        return failure

    async def aclose(self) -> None:
        self._host = None
        await self._launcher.aclose()

    async def probe(self) -> Capabilities:
        backing: str | None
        if self._host is not None:
            facts, backing = self._host.facts, self._host.disks.backing
        else:
            with host_errors("the local provider cannot be set up"):
                facts, way = await self._settle(every_level=True)
            backing = None if way is None else way.backing
        doctor = self._host is None  # a server asks once it is open, and must not wait
        return await asyncio.to_thread(
            findings.capabilities, facts, self.settings, backing, thorough=doctor
        )

    def expect(self) -> None:
        self._launcher.expect()

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        host = self._ready()
        self._check(host, spec)
        self.expect()
        with host_errors("the sandbox cannot be prepared"):
            own_uid = host.facts.uid_ranges
            filter_ = await self._filters.get(spec.template.seccomp, host.level, own_uid=own_uid)
            parts = await self._parts(host, sandbox_id, spec)
            request = await self._request(host, parts)
            request["fork_answer"] = filter_.fork_answer
        record = self._record(host, parts, request)
        records.create(parts.dir, record)
        host.cores.take(sandbox_id, parts.cpus)
        try:
            if parts.adjustable:
                with host_errors("the sandbox cannot be prepared"):
                    shown = visible_cpus(parts.limits, len(host.cores))
                    memory = parts.limits.memory
                    await asyncio.to_thread(self._views.make_own, sandbox_id, shown, memory)
            # Milliseconds. To remove half a box while the agent goes on making it is a race.
            reply, parts = await to_the_end(
                self._carry_out(host, parts, request, filter_.program, record)
            )
        except BaseException as exc:
            host.cores.release(sandbox_id)
            await finish(
                self._remove(parts.dir, record), f"launch of {sandbox_id}", budget=UNDO_BUDGET
            )
            if isinstance(exc, CapsuleError):
                raise launch_failure(exc) from exc
            raise
        record |= {"keeper": reply.get("pid", 0), "uid_base": reply.get("uid_base", 0)}
        records.complete(parts.dir, record)
        return self._box(host, sandbox_id, record, host.adjuster(parts))

    async def adopt(self, handle: Handle) -> Box | None:
        host = self._ready()
        directory = self._boxes / safe(handle.sandbox_id)
        record = await asyncio.to_thread(records.read, directory)
        if not record:
            return None
        try:
            answer = await _ping(directory)
        except NobodyListensError as exc:
            # Only this means that it is gone. An agent that is slow, or a host without file
            # descriptors, is no reason to give up somebody's sandbox.
            log.info("box is gone", sandbox=handle.sandbox_id, reason=exc.message)
            return None
        if answer.get("id") != handle.sandbox_id:
            return None
        host.cores.take(handle.sandbox_id, _cpus(record))
        return self._box(host, handle.sandbox_id, record)

    async def owned(self) -> AsyncIterator[Handle]:
        for name, record in await asyncio.to_thread(lambda: list(records.read_all(self._boxes))):
            yield Handle(self.name, SandboxId(name), _handle_data(record))

    async def discard(self, handle: Handle) -> None:
        directory = self._boxes / safe(handle.sandbox_id)
        record = await asyncio.to_thread(records.read, directory)
        if record is not None:
            await self._remove(directory, record or {**handle.data})
        await asyncio.to_thread(self._views.drop_own, handle.sandbox_id)
        if self._host is not None:
            self._host.cores.release(handle.sandbox_id)
            self._host.watchers.release(handle.sandbox_id)

    async def save(
        self, box: Box, layer: str, *, full: bool, most_bytes: int, since: Mark | None = None
    ) -> Saved:
        host = self._ready()
        self._require_layers(host)
        link = AgentLink(box.connect)
        watch = since is not None and await host.watchers.admit(box.handle.sandbox_id)
        return await host.layers.save(
            link, layer, full=full, most_bytes=most_bytes, since=since, watch=watch
        )

    async def merge(self, layer: str, stack: Sequence[str], *, count: int) -> Saved:
        return await self._ready().layers.merge(layer, stack, count=count)

    async def diff(
        self, old: Sequence[str], new: Sequence[str], *, most: int
    ) -> Sequence[FileChange]:
        layers = self._ready().layers

        def work() -> Sequence[FileChange]:
            return compare([*map(layers.path, old)], [*map(layers.path, new)], most)

        with host_errors("layers cannot be compared"):
            return await asyncio.to_thread(work)

    def read_layers(self, layers: Sequence[str], *, most_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._ready().layers.give_out(layers, most_bytes=most_bytes)

    async def write_layer(
        self, layer: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        host = self._ready()
        self._require_layers(host)
        return await host.layers.take_in(layer, pieces, most_bytes=most_bytes)

    async def settle(self, layers: Sequence[str]) -> None:
        await self._ready().layers.settle()

    async def kept(self) -> Sequence[str]:
        with host_errors("layers cannot be listed"):
            return await asyncio.to_thread(self._ready().layers.ids)

    async def drop(self, layer: str) -> None:
        with host_errors("a layer cannot be removed"):
            await asyncio.to_thread(self._ready().layers.remove, layer)

    async def make_volume(self, id: str, *, size: int | None = None) -> None:
        host = self._ready()
        self._require_layers(host)
        with host_errors("the volume cannot be made"):
            await to_the_end(asyncio.to_thread(host.volumes.make, id, size))

    async def look_at_volume(self, id: str) -> VolumeLook:
        with host_errors("the volume cannot be looked at"):
            return await asyncio.to_thread(self._ready().volumes.look, id)

    async def volumes(self) -> Sequence[str]:
        return await asyncio.to_thread(self._ready().volumes.ids)

    async def drop_volume(self, id: str) -> None:
        with host_errors("the volume cannot be removed"):
            await asyncio.to_thread(self._ready().volumes.remove, id)

    def _check(self, host: Host, spec: SandboxSpec) -> None:
        """Raises NotSupportedError for what this provider, or this host, cannot give."""
        if spec.template.network != "none":
            raise NotSupportedError(
                f"template {spec.template.name} asks for network {spec.template.network}",
                hint="the local provider gives none; set `network: none`",
            )
        if runtime := spec.runtime or spec.template.runtime:
            raise NotSupportedError(
                f"the local provider has no runtimes: {runtime}",
                hint="take the docker provider for it",
                field="runtime",
            )
        if spec.layers or spec.volumes:
            self._require_layers(host)

    def _require_layers(self, host: Host) -> None:
        if "snapshot" not in host.features:
            why = host.facts.tries["layers"].why
            if host.level is not Isolation.NAMESPACES:
                why = f"a sandbox of the level {host.level} has no disk of its own"
            raise NotSupportedError(
                f"this host cannot keep the files of sandboxes as layers: {why}",
                hint="`capsule doctor` shows the fix",
            )

    async def _remove(self, directory: Path, record: Mapping[str, Any]) -> None:
        """A keeper that lives is asked first: a record from before it began lacks its pid."""
        with contextlib.suppress(CapsuleError):
            await shut_down(way_to(directory))
        if records.exists(directory):
            await self._sweep(directory, record)
        await self._drop_view(directory.name, record)

    async def _drop_view(self, box: str, record: Mapping[str, Any]) -> None:
        if record.get("own_view"):
            await asyncio.to_thread(self._views.drop_own, box)

    async def _sweep(self, directory: Path, record: Mapping[str, Any]) -> None:
        base = int(record.get("uid_base") or 0)
        by_uid = record.get("user") == "uid" and base > 0
        await self._launcher.sweep(
            {
                "dir": str(directory),
                "cgroups": [str(each) for each in record.get("cgroups") or ()],
                "pid": int(record.get("keeper") or 0),
                "disk_dir": record.get("disk_dir"),
                "uid": base + plan.UID if by_uid else 0,
            }
        )
        if records.exists(directory):
            raise UnavailableError(f"not everything of the box could be removed: {directory}")

    async def _gather(self) -> Facts:
        if self._facts is None:
            await self._launcher.start()
            data_dir = self.settings.data_dir
            self._facts = await probe.gather(self._launcher, data_dir, self._cgroups)
        return self._facts

    def _prepare_cgroups(self, launcher: int) -> None:
        """In a thread, for each new launcher: its scope ends with it, unless boxes live there."""
        ask = scope.asker(self.settings.cgroup_scope, launcher)
        before, self._cgroups = (
            self._cgroups,
            cgroups.prepare(cgroups.find_here(), os.geteuid(), ask),
        )
        if lost := before.bases.keys() - self._cgroups.bases.keys():
            why = self._cgroups.problems
            log.warning("limits are no longer enforced", controllers=sorted(lost), reasons=why)
        if self._facts is not None:
            self._facts = replace(self._facts, cgroups=self._cgroups)
        if self._host is not None:
            self._host.learn(replace(self._host.facts, cgroups=self._cgroups))

    def _ready(self) -> Host:
        if self._host is None:
            raise UnavailableError("the local provider is not open")
        return self._host

    def _prepare(self, host: Host) -> None:
        """Only by who has the data directory alone: it removes what is half made."""
        self._prepare_folders(host)
        if "snapshot" in host.features:
            host.layers.prepare()
            host.volumes.prepare()
            host.watchers.prepare([*records.read_all(self._boxes)])

    def _prepare_folders(self, host: Host) -> None:
        _check_reach(host.facts, self.settings.data_dir, self.settings.run_dir)
        private = 0o700
        passing = 0o711 if host.facts.uid_ranges else private
        make_folder(self.settings.data_dir, passing)
        make_folder(self.settings.run_dir, passing)
        make_folder(self._boxes, private)
        make_folder(self._spool, private)
        make_folder(self._stage, 0o755)
        for name in ("root", "disk"):
            make_folder(self._stage / name, 0o755)
        left = [*records.read_all(self._boxes)]
        if not left:
            self._views.clear()
        self._views.drop_lost(self._boxes)
        host.facts.cgroups.remove_lost(self._instance, dict(left))
        host.disks.prepare()
        plan.learn_host()

    async def _parts(self, host: Host, sandbox_id: SandboxId, spec: SandboxSpec) -> plan.Parts:
        shown = visible_cpus(spec.limits, len(host.cores))
        root = await host.roots.get(spec.template)
        unique = f"{safe(sandbox_id)}-{self._instance}"
        disk = await host.disks.entry(unique, spec.limits)
        layers = [await asyncio.to_thread(host.layers.path, each) for each in spec.layers]
        volumes = [
            (await asyncio.to_thread(host.volumes.place, each.id), each) for each in spec.volumes
        ]
        problems = {
            each.name: await asyncio.to_thread(host.volumes.make_ready, each.id)
            for each in spec.volumes
        }
        adjustable = spec.adjustable and enforcement.adjusts(
            host.facts, host.level, host.disks.backing
        )
        view = None if root is None else await self._view(shown, spec.limits.memory)
        if adjustable:
            view = self._views.own(sandbox_id)
        return plan.Parts(
            id=sandbox_id,
            unique=unique,
            hostname=spec.hostname,
            limits=spec.limits,
            dir=self._boxes / sandbox_id,
            stage=self._stage,
            spool=self._spool,
            disk=disk,
            cpus=host.cores.pick(shown),
            root=root,
            view=view,
            layers=tuple(layers),
            volumes=tuple(volumes),
            unenforced=tuple(
                Unenforced(f"volume {name}", found.why, found.fix)
                for name, found in problems.items()
                if found is not None
            ),
            volumes_folder=host.volumes.folder,
            adjustable=adjustable,
            user=spec.template.user,
            sudo=spec.template.sudo,
        )

    async def _request(self, host: Host, parts: plan.Parts) -> dict[str, Any]:
        if plan.counts_tasks(host.level, host.facts):
            return await asyncio.to_thread(plan.request, host.level, parts, host.facts)
        return plan.request(host.level, parts, host.facts)

    async def _carry_out(
        self,
        host: Host,
        parts: plan.Parts,
        request: dict[str, Any],
        program: bytes,
        record: dict[str, Any],
    ) -> tuple[dict[str, Any], plan.Parts]:
        """With the answer, what was launched: the cgroups of a new launcher may count less."""
        try:
            return await self._launcher.launch(request, program), parts
        except NobodyListensError:
            counted = enforcement.adjusts(host.facts, host.level, host.disks.backing)
            parts = replace(parts, adjustable=parts.adjustable and counted)
            again = await self._request(host, parts)
            again["fork_answer"] = request["fork_answer"]
            record |= self._record(host, parts, again) | {"own_view": record["own_view"]}
            records.complete(parts.dir, record)
            return await self._launcher.launch(again, program), parts

    async def _view(self, cpus: int, memory: int) -> Path:
        known = self._views.known(cpus, memory)
        if known is None:
            known = await asyncio.to_thread(self._views.make, cpus, memory)
        return known

    def _record(self, host: Host, parts: plan.Parts, request: dict[str, Any]) -> dict[str, Any]:
        disk_dir = host.disks.directory(parts.unique)
        return {
            "version": 1,
            "id": parts.id,
            "created": time.time(),
            "isolation": host.level.value,
            "user": request["user"]["mode"],
            "cgroups": [each["dir"] for each in request["cgroups"]],
            "disk_dir": str(disk_dir) if disk_dir else None,
            "cpus": list(parts.cpus),
            "own_view": parts.adjustable,
            "unenforced": enforcement.as_json((*host.unenforced, *parts.unenforced)),
        }

    def _box(
        self,
        host: Host,
        sandbox_id: SandboxId,
        record: Mapping[str, Any],
        adjuster: Adjuster | None = None,
    ) -> LocalBox:
        return LocalBox(
            Handle(self.name, sandbox_id, _handle_data(record)),
            self._boxes / sandbox_id,
            Isolation(record.get("isolation", host.level)),
            [Unenforced(**each) for each in record.get("unenforced", ())],
            sweep=lambda: self._sweep(self._boxes / sandbox_id, record),
            gone=lambda: self._gone(host, sandbox_id, record),
            adjuster=adjuster,
        )

    async def _gone(self, host: Host, box: SandboxId, record: Mapping[str, Any]) -> None:
        host.cores.release(box)
        host.watchers.release(box)
        await self._drop_view(box, record)


async def _ping(directory: Path) -> dict[str, Any]:
    agent = way_to(directory)
    try:
        return await ask(agent.connect_last, {"op": "ping"}, timeout=ADOPT_TIMEOUT)
    except NobodyListensError:
        raise
    except UnavailableError:
        await asyncio.sleep(0.05)  # it may have died while we asked: then nobody is there now
    return await ask(agent.connect_last, {"op": "ping"}, timeout=ADOPT_TIMEOUT)


def _handle_data(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("created", "isolation", "user", "cgroups", "disk_dir", "keeper", "uid_base", "cpus")
    return {name: record[name] for name in kept if name in record}


def _cpus(record: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(cpu for cpu in record.get("cpus") or () if isinstance(cpu, int))


def _check_reach(facts: Facts, *paths: Path) -> None:
    """A box's pid 1 is another user on the host, and mounts from below these directories."""
    if not facts.uid_ranges:
        return
    for path in paths:
        for parent in path.resolve().parents:
            if parent.exists() and not parent.stat().st_mode & 0o001:
                raise UnavailableError(
                    f"the users of sandboxes cannot reach {path}: {parent} is closed to others",
                    hint=f"chmod o+x {parent}, or use another data_dir and run_dir",
                )
