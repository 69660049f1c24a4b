"""Boxes made by a Docker Engine: a container each, with `capsule-agent` as its pid 1.

The provider decides (plan.py), asks the Engine (engine.py) and waits for the agent (box.py). A
container's name and labels are its record: they come into being with it and go with it, so there
is nothing that a killed server could leave unrecorded but a folder, which `owned` lists as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

import structlog

from capsule.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from capsule.host_errors import host_errors
from capsule.model import Handle, Isolation, SandboxId, SandboxSpec, Unenforced
from capsule.providers import box_layers
from capsule.providers.box_layers import BoxLayers
from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.contract import (
    Box,
    ByteStream,
    Capabilities,
    FileChange,
    Mark,
    Provider,
    Saved,
    VolumeLook,
)
from capsule.providers.docker import address, disks, hardening, plan, probe, transport
from capsule.providers.docker.agent_volume import AgentVolume
from capsule.providers.docker.box import (
    DockerBox,
    GvisorBox,
    NoSocketError,
    await_agent,
    follows_its_agent,
)
from capsule.providers.docker.disks import Disks, NoDiskError, on_disk
from capsule.providers.docker.engine import Engine
from capsule.providers.docker.filters import Filters
from capsule.providers.docker.forgotten import end_forgotten
from capsule.providers.docker.helpers import Helpers
from capsule.providers.docker.identity import record_of
from capsule.providers.docker.order import Host, Order, runtime_for
from capsule.providers.docker.plan import LABEL_BOX, LABEL_CREATED, LABEL_ID, LABEL_OWNER
from capsule.providers.docker.probe import Facts, Runtime
from capsule.providers.docker.settings import DockerSettings
from capsule.providers.docker.stdio import demultiplex
from capsule.providers.docker.supply import Found, Supply
from capsule.providers.docker.transport import Folders
from capsule.providers.docker.volumes import ContainerVolumes
from capsule.providers.identity import owner_of, safe
from capsule.providers.local.cores import Cores
from capsule.providers.local.views import visible_cpus
from capsule.providers.needs import missing_programs
from capsule.providers.relay.relays import Relays

log = structlog.get_logger(__name__)

UNDO_BUDGET = 40.0
ANSWER_WITHIN = 5.0
AT_ONCE = 1.0


class DockerProvider(Provider):
    name: ClassVar[str] = "docker"
    max_layers = box_layers.MOST

    def __init__(self, settings: DockerSettings) -> None:
        self.settings = settings
        self._folders = Folders(settings.run_dir / "docker")
        self._agent = settings.data_dir / "docker-agent"
        self._sudo = settings.data_dir / "docker-sudo"
        stages = settings.run_dir / "docker-disks"
        self._disks = Disks(settings.agent, settings.data_dir, stages)
        self._engine: Engine | None = None
        self._host: Host | None = None
        self._owner = ""  # who we are to the Engine, which may serve others too
        self._layers = BoxLayers(settings.data_dir / "docker-layers", owner=hardening.UID)

    async def open(self) -> None:
        try:
            with host_errors("the docker provider cannot be set up"):
                self._owner = await asyncio.to_thread(self._prepare)
            found = await self._facts()
            found.runtime(self.settings.runtime)
            await asyncio.to_thread(probe.check_agent, self.settings.agent, found)
            engine = await self._reach()
            filters = Filters(self.settings, found.arch or None)
            await filters.get("default")
            data = self._owner.partition("-")[0]
            podman = found.kind == "Podman"
            helpers = Helpers(engine, name=self._name, labels=self._labels)
            self._host = Host(
                engine=engine,
                facts=found,
                supply=Supply(engine, self.settings),
                cores=Cores(range(found.cpus)),
                relays=Relays(self._start_relay, "the Engine"),
                agent_volume=AgentVolume(engine, self.settings.agent, helpers),
                disks=self._disks,
                filters=filters,
                helpers=helpers,
                volumes=ContainerVolumes(engine, helpers, data, podman=podman),
            )
            await self._disks.open(self.settings.disk_backing, found)
            await self._host.volumes.open()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await host.relays.aclose()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def probe(self) -> Capabilities:
        found = self._host.facts if self._host else await self._facts()
        ways = {
            name: transport.choose(self.settings.transport, found, runtime)
            for name, runtime in found.runtimes.items()
        }
        diskless = self._disks.problem
        if self._host is None:
            diskless = await asyncio.to_thread(disks.why_not, self.settings.disk_backing, found)
        if ways.get(self.settings.runtime or found.default_runtime) == "engine":
            diskless = diskless or disks.BY_SOCKET_ONLY
        return probe.capabilities(
            found,
            self.settings,
            transports={name: transport.NAMES[way] for name, way in ways.items()},
            diskless=diskless,
            sized=self._host is not None and self._host.volumes.sized,
            images=await Supply(await self._reach(), self.settings).findings(),
        )

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        host = self._ready()
        runtime = runtime_for(spec, host.facts, self.settings)
        image = await self._image(host, spec)
        below = await self._layers.paths(spec.layers)
        cpus = host.cores.pick(visible_cpus(spec.limits, host.facts.cpus))
        while True:
            way = self._way(host, runtime)
            disk = way == "socket" and not host.disks.problem
            over = disk and bool(below) and not host.disks.flat and not runtime.gvisor
            order = Order(
                id=safe(sandbox_id),
                spec=spec,
                runtime=runtime,
                image=image,
                way=way,
                disk=disk,
                cpus=cpus,
                layers=below,
                over_layers=over,
            )
            try:
                return await self._launch(host, order)
            except NoSocketError as exc:
                if self.settings.transport != "auto" or way != "socket":
                    raise
                log.warning("no socket comes out", runtime=runtime.name, reason=exc.message)
                host.silent.add(runtime.name)
            except NoDiskError as exc:
                if self.settings.disk_backing != "auto" or not disk:
                    raise
                log.warning("disks are in memory from now on", reason=exc.message)
                host.disks.problem = exc.message

    def _way(self, host: Host, runtime: Runtime) -> str:
        if self.settings.transport == "auto" and runtime.name in host.silent:
            return "engine"
        return transport.choose(self.settings.transport, host.facts, runtime)

    async def _launch(self, host: Host, order: Order) -> Box:
        parts, record = await self._container(host, order)
        host.cores.take(order.id, order.cpus)
        try:
            if order.way == "socket":
                await to_the_end(self._folders.make(order.id))
            if order.disk:
                below = order.layers if order.over_layers else ()
                spec = order.spec
                points = on_disk(spec.volumes, spec.template.user.home)
                mount = host.disks.mount(order.id, spec.limits, below, points)
                await to_the_end(mount)
            return await self._bring_up(host, order, parts, record)
        except BaseException as exc:
            if not isinstance(exc, ConflictError):  # then it is somebody else's
                what = f"launch of {order.id}"
                await finish(self._undo(order.id), what, budget=UNDO_BUDGET)
            raise

    async def _bring_up(
        self, host: Host, order: Order, parts: plan.Parts, record: Mapping[str, Any]
    ) -> DockerBox:
        name, body = self._name(order.id), plan.container(parts, host.facts)
        # To remove a container that the Engine is still making is a race: each step is let finish.
        container = await self._create(host, order, name, body)
        await to_the_end(host.engine.start(container))
        if order.disk:
            await to_the_end(host.disks.let_go(order.id))
        box = self._box(host, order.id, {**record, "container": container})
        box.adjusted = lambda limits: plan.adjusted(parts, host.facts, limits)
        await await_agent(box, self._folders)
        if order.layers and not order.over_layers:
            await self._layers.fill(box, order.layers)
        await self._check_needs(host, order, box)
        return box

    async def _create(self, host: Host, order: Order, name: str, body: Mapping[str, Any]) -> str:
        try:
            return await to_the_end(host.engine.create(name, body))
        except NotFoundError:
            host.supply.forget(order.image.name)
            await self._image(host, order.spec)  # it was there just now
        except InvalidError as exc:
            if "bind source path does not exist" in exc.message:
                if str(host.disks.folder(order.id)) in exc.message:
                    raise NoDiskError("the Engine does not see what is mounted here") from exc
                raise NoSocketError("the Engine does not see this host's files") from exc
            raise UnavailableError(f"the sandbox could not be started: {exc.message}") from exc
        return await to_the_end(host.engine.create(name, body))

    async def _check_needs(self, host: Host, order: Order, box: DockerBox) -> None:
        template = order.spec.template
        known = (order.image.id, template.needs)
        if not template.needs or known in host.supply.checked:
            return
        missing = await missing_programs(box, template)
        if missing:
            raise NotFoundError(
                f"image {order.image.name} of template {template.name} has no {', '.join(missing)}",
                hint="install it in the image, or change `needs` of the template",
            )
        host.supply.checked.add(known)

    async def adopt(self, handle: Handle) -> Box | None:
        host = self._ready()
        sandbox_id = SandboxId(safe(handle.sandbox_id))
        record = dict(handle.data)
        if record.get("transport") == "socket":
            # An agent that answers says more than the Engine does, also while that is restarted.
            # Of one that does not the Engine knows whether it is gone, or paused.
            with contextlib.suppress(UnavailableError):
                return await self._answering(host, sandbox_id, record, within=AT_ONCE)
        found = await host.engine.inspect(self._name(sandbox_id))
        state = (found or {}).get("State") or {}
        if found is None or not (state.get("Running") or state.get("Paused")):
            log.info("box is gone", sandbox=sandbox_id, reason=state.get("Status", "no container"))
            return None
        record = record_of(found["Id"], found["Config"].get("Labels") or {})
        if state.get("Paused"):
            return self._box(host, sandbox_id, record)
        try:
            return await self._answering(host, sandbox_id, record)
        except UnavailableError:
            if await follows_its_agent(self._box(host, sandbox_id, record)):
                return None
            raise

    async def _answering(
        self,
        host: Host,
        sandbox_id: SandboxId,
        record: Mapping[str, Any],
        within: float = ANSWER_WITHIN,
    ) -> Box | None:
        box = self._box(host, sandbox_id, record)
        answer = await box.ping(within)
        if answer.get("id") != sandbox_id:
            return None
        host.cores.take(sandbox_id, record.get("cpus") or ())
        return box

    async def owned(self) -> AsyncIterator[Handle]:
        engine = await self._reach()
        seen = set()
        for found in await engine.containers(f"{LABEL_OWNER}={self._owner}"):
            labels = found.get("Labels") or {}
            sandbox_id = SandboxId(labels.get(LABEL_ID, ""))
            seen.add(sandbox_id)
            if self._host is not None and sandbox_id in self._host.helpers.ids:
                continue
            yield Handle(self.name, sandbox_id, record_of(found["Id"], labels))
        for name in await asyncio.to_thread(self._folders.names):
            if name not in seen:
                yield Handle(self.name, SandboxId(name), {})

    async def discard(self, handle: Handle) -> None:
        await self._undo(safe(handle.sandbox_id))

    async def save(
        self, box: Box, layer: str, *, full: bool, most_bytes: int, since: Mark | None = None
    ) -> Saved:
        self._ready()
        assert isinstance(box, DockerBox)
        return await self._layers.save(box, layer, full=full, most_bytes=most_bytes, since=since)

    async def merge(self, layer: str, stack: Sequence[str], *, count: int) -> Saved:
        return await self._layers.merge(layer, stack, count=count)

    async def diff(
        self, old: Sequence[str], new: Sequence[str], *, most: int
    ) -> Sequence[FileChange]:
        return await self._layers.diff(old, new, most=most)

    def read_layers(self, layers: Sequence[str], *, most_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._layers.give_out(layers, most_bytes=most_bytes)

    async def write_layer(
        self, layer: str, pieces: AsyncGenerator[bytes, None], *, most_bytes: int
    ) -> Saved:
        return await self._layers.take_in(layer, pieces, most_bytes=most_bytes)

    async def make_volume(self, id: str, *, size: int | None = None) -> None:
        await self._ready().volumes.make(id, size)

    async def look_at_volume(self, id: str) -> VolumeLook:
        return VolumeLook()  # the Engine would have to look at every file of every volume

    async def volumes(self) -> Sequence[str]:
        return await self._ready().volumes.ids()

    async def drop_volume(self, id: str) -> None:
        await self._ready().volumes.drop(id)

    async def settle(self, layers: Sequence[str]) -> None:
        await self._layers.settle()

    async def kept(self) -> Sequence[str]:
        return await self._layers.kept()

    async def drop(self, layer: str) -> None:
        await self._layers.drop(layer)

    async def _undo(self, sandbox_id: str) -> None:
        """As `_remove`, for what was perhaps being made when the Engine was killed."""
        engine = await self._reach()
        found = await engine.inspect(self._name(sandbox_id))
        unstarted = found is not None and found["State"].get("Status") == "created"
        if found is not None and unstarted and engine.address.socket is not None:
            await asyncio.to_thread(end_forgotten, str(found["Id"]))
        await self._remove(sandbox_id)

    async def _remove(self, sandbox_id: str) -> None:
        """The folder last: until then it is what `owned` finds."""
        engine = await self._reach()
        await engine.remove(self._name(sandbox_id))
        await self._disks.remove(sandbox_id)
        await self._folders.remove(sandbox_id)
        if self._host is not None:
            await self._host.relays.close(sandbox_id)
            self._host.cores.release(sandbox_id)

    def _name(self, sandbox_id: str) -> str:
        return f"capsule-{self._owner}-{sandbox_id}"

    def _labels(self, sandbox_id: str) -> dict[str, str]:
        created = f"{time.time():.3f}"
        return {LABEL_ID: sandbox_id, LABEL_OWNER: self._owner, LABEL_CREATED: created}

    def _box(self, host: Host, sandbox_id: SandboxId, record: Mapping[str, Any]) -> DockerBox:
        way = self._folders if record.get("transport") == "socket" else host.relays
        isolation = Isolation(record["isolation"])
        kind = GvisorBox if isolation is Isolation.GVISOR else DockerBox
        return kind(
            Handle(self.name, sandbox_id, record),
            isolation,
            [Unenforced(**each) for each in record.get("unenforced") or ()],
            host.engine,
            self._name(sandbox_id),
            connect=lambda: way.connect(sandbox_id),
            remove=lambda: self._remove(sandbox_id),
        )

    async def _container(self, host: Host, order: Order) -> tuple[plan.Parts, dict[str, Any]]:
        seccomp = order.spec.template.seccomp
        filter_, profile = await host.filters.get(seccomp)
        gaps = probe.unenforced(host.facts, order.runtime, disk=order.disk)
        record = {
            "isolation": order.runtime.isolation.value,
            "runtime": order.runtime.name,
            "transport": order.way,
            "image": order.image.name,
            "cpus": list(order.cpus),
            "unenforced": probe.as_json(gaps),
            "over_layers": order.over_layers,
        }
        parts = plan.Parts(
            id=order.id,
            image=order.image.name,
            hostname=order.spec.hostname,
            limits=order.spec.limits,
            runtime=order.runtime,
            cpus=order.cpus,
            filter=filter_,
            profile=await host.filters.for_engine(host.facts, seccomp, profile),
            mounted=await self._mounted(host, order),
            labels={**self._labels(order.id), LABEL_BOX: json.dumps(record)},
            volumes=order.image.volumes,
            disk=_binds(host.disks, order) if order.disk else None,
            over_layers=order.over_layers,
            user=order.spec.template.user,
            podman=host.facts.kind == "Podman",
            sudo=order.sudo,
            shared=await host.volumes.mounts(
                order.spec.volumes, order.image.name, gvisor=order.runtime.gvisor
            ),
        )
        return parts, record

    async def _mounted(self, host: Host, order: Order) -> plan.Mounted:
        if order.way == "engine":
            return transport.by_engine(await host.agent_volume.name(order.image.name))
        sudo = self._sudo if order.sudo else None
        return transport.by_socket(self._folders.path(order.id), self._agent, sudo)

    async def _start_relay(self, sandbox_id: str) -> ByteStream:
        engine = await self._reach()
        return demultiplex(await engine.exec(self._name(sandbox_id), transport.RELAY))

    async def _image(self, host: Host, spec: SandboxSpec) -> Found:
        name = self.settings.image_of(spec.template)
        return await host.supply.get(name, template=spec.template.name, progress=spec.progress)

    async def _facts(self) -> Facts:
        engine = await self._reach()
        version, info = await engine.version(), await engine.info()
        return await asyncio.to_thread(probe.facts, version, info, engine.address)

    async def _reach(self) -> Engine:
        """Also when it is not open: what is left behind can still be listed and removed."""
        if self._engine is None:
            found = await asyncio.to_thread(address.find, self.settings.host)
            self._engine = Engine(found, patience=self.settings.patience)
        return self._engine

    def _ready(self) -> Host:
        if self._host is None:
            raise UnavailableError("the docker provider is not open")
        return self._host

    def _prepare(self) -> str:
        """Makes our folders. Returns who we are: one server, told by both its directories."""
        self._folders.prepare()
        self.settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._layers.prepare()
        transport.copy_agent(self.settings.agent, self._agent)
        transport.copy_agent(self.settings.agent, self._sudo, transport.SUDO_MODE)
        return owner_of(self.settings.data_dir, self.settings.run_dir, "docker-id")


def _binds(disks: Disks, order: Order) -> Mapping[str, str]:
    return disks.binds(order.id, over_layers=order.over_layers)
