"""Boxes in a cloud: sandboxes of E2B's, each with `capsule-agent` in it.

The provider asks the cloud (cloud.py) for a sandbox whose metadata name this server and the box,
puts the agent into it and starts it (plan.py), and reaches it through a relay that the cloud runs
beside it (carrier.py). The metadata are the record: they come into being with the sandbox and go
with it, so there is nothing that a killed server could leave unrecorded.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import ClassVar

import structlog

from capsule.errors import (
    CapsuleError,
    ConflictError,
    NotFoundError,
    NotSupportedError,
    UnavailableError,
)
from capsule.host_errors import host_errors
from capsule.link.unix import NobodyListensError
from capsule.model import Handle, SandboxId, SandboxSpec
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
)
from capsule.providers.e2b import plan, probe
from capsule.providers.e2b.box import E2bBox
from capsule.providers.e2b.carrier import Carrier
from capsule.providers.e2b.cloud import ID, OWNER, Cloud, Machine, Running
from capsule.providers.e2b.errors import LostError, in_doubt, no_key
from capsule.providers.e2b.keys import Keys
from capsule.providers.e2b.leases import Leases
from capsule.providers.e2b.plan import Place
from capsule.providers.e2b.settings import E2bSettings
from capsule.providers.identity import owner_of, safe
from capsule.providers.local import seccomp
from capsule.providers.needs import missing_programs
from capsule.providers.relay.relays import Relays

log = structlog.get_logger(__name__)

UNDO_BUDGET = 40.0
SCOUT_WITHIN = 20.0
READY_WITHIN = 20.0
ANSWER_WITHIN = 10.0
RELAY_WITHIN = 20.0
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1


class E2bProvider(Provider):
    name: ClassVar[str] = "e2b"
    max_layers = box_layers.MOST

    def __init__(self, settings: E2bSettings) -> None:
        self.settings = settings
        self._owner = ""  # who we are to the cloud, which serves others too
        self._agent = b""
        self._filters: dict[tuple[str, str], bytes] = {}
        self._clouds: dict[str, Cloud] = {}  # by key
        self._keys = Keys(settings.data_dir)
        self._places: dict[str, Place] = {}  # by the cloud's template
        self._checked: set[tuple[str, tuple[str, ...]]] = set()
        self._boxes: dict[str, tuple[Machine, Place]] = {}  # that we know, by our id
        self._launching: dict[str, Cloud] = {}  # by our id
        self._leases = Leases(settings.timeout)
        self._relays = Relays(self._start_relay, "E2B", within=RELAY_WITHIN)
        self._layers = BoxLayers(settings.data_dir / "e2b-layers", owner=1000)

    async def open(self) -> None:
        with host_errors("the e2b provider cannot be set up"):
            self._owner = await asyncio.to_thread(self._prepare)
        self._leases.open()

    def _prepare(self) -> str:
        mimetypes.init()  # else the first upload of the SDK's does, which reads files
        self.settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._layers.prepare()
        self._agent = self.settings.agent.read_bytes()
        return owner_of(self.settings.data_dir, self.settings.run_dir, "e2b-id")

    async def aclose(self) -> None:
        await self._leases.aclose()
        await self._relays.aclose()

    async def probe(self) -> Capabilities:
        cloud = self._cloud(self.settings.api_key) if self.settings.api_key else None
        return await probe.capabilities(cloud, self.settings, is_open=bool(self._owner))

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        id = safe(sandbox_id)
        self._check(spec)
        if id in self._boxes or id in self._launching:
            raise ConflictError(f"a box with this id exists already: {id}")
        cloud = self._launching[id] = self._cloud(spec.credential or self._key())
        try:
            layers = await self._layers.paths(spec.layers)
            machine = await self._create(cloud, id, spec)
            try:
                box = await self._bring_up(machine, id, spec)
                if layers:
                    await self._layers.fill(box, layers)
                await self._check_needs(spec, box)
            except BaseException as exc:
                if isinstance(exc, CapsuleError):  # the template may be another one by now
                    self._places.pop(self.settings.template_of(spec.template), None)
                await finish(self._remove(id, machine), f"launch of {id}", budget=UNDO_BUDGET)
                raise
            return box
        finally:
            del self._launching[id]
            self._forget_keys()

    def _check(self, spec: SandboxSpec) -> None:
        template = spec.template
        if template.network != "none":
            raise NotSupportedError(
                f"template {template.name} asks for network {template.network}",
                hint="the e2b provider gives none; set `network: none`",
            )
        if spec.volumes:
            raise NotSupportedError("the e2b provider has no volumes")

    async def _create(self, cloud: Cloud, id: str, spec: SandboxSpec) -> Machine:
        """Nothing is left of it when we are cancelled: what the cloud has made by then is ended."""
        template = self.settings.template_of(spec.template)
        making = asyncio.create_task(cloud.create(template, {OWNER: self._owner, ID: id}))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await finish(_unmake(making), f"launch of {id}", budget=UNDO_BUDGET)
            raise

    async def _bring_up(self, machine: Machine, id: SandboxId, spec: SandboxSpec) -> E2bBox:
        template = self.settings.template_of(spec.template)
        place = self._places.get(template)
        if place is None:
            place = self._places[template] = await self._scout(machine)
        probe.check_agent(self._agent, place)
        described = plan.box(id, spec, place, await self._filter(spec.template.seccomp, place))
        await machine.write(place.agent, self._agent, place.user)
        said: list[str] = []
        agent = await machine.start(
            plan.start(place), place.user, envs={"CAPSULE_BOX": described}, on_stderr=said.append
        )
        try:
            self._boxes[id] = machine, place
            record = {"cloud": machine.id, "template": template, **place.to_json()}
            if spec.credential:
                record["key"] = await asyncio.to_thread(self._keys.seal, spec.credential)
            box = self._box(Handle(self.name, id, record), machine, place)
            await self._await_agent(box, agent, said)
        finally:
            await finish(agent.let_go(), "stream of the agent", budget=5.0)
        self._leases.hold(machine)
        return box

    async def _scout(self, machine: Machine) -> Place:
        """As root first: not every cloud has one."""
        try:
            found = await machine.run(plan.SCOUT, plan.ROOT, within=SCOUT_WITHIN)
            place = plan.place_of(found.stdout) if not found.code else None
        except CapsuleError as exc:  # one that is not of the user's making comes again below
            log.info("no root in the cloud's sandbox", reason=exc.message)
            place = None
        if place is not None and place.mode == "uid":
            return place
        found = await machine.run(plan.SCOUT, None, within=SCOUT_WITHIN)
        return plan.place_of(found.stdout or found.stderr)

    async def _await_agent(self, box: E2bBox, agent: Running, said: list[str]) -> None:
        """Returns when the agent has answered. Raises UnavailableError as soon as it cannot."""
        over = asyncio.create_task(agent.ended())
        ready = asyncio.create_task(self._answers(box))
        try:
            await asyncio.wait({over, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                reason = "".join(said).strip()[-300:] or f"exit code {over.result().code}"
                raise UnavailableError(
                    f"the sandbox could not be started: its agent ended: {reason}"
                )
            ready.result()
        finally:
            for task in (over, ready):
                task.cancel()
            await asyncio.wait({over, ready})
            for task in (over, ready):
                if not task.cancelled():
                    task.exception()  # seen

    async def _answers(self, box: E2bBox) -> None:
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + READY_WITHIN, FIRST_PAUSE
        while True:
            try:
                await box.ping(max(give_up - loop.time(), FIRST_PAUSE))
                return
            except UnavailableError as exc:
                if loop.time() >= give_up:
                    raise UnavailableError(
                        f"the agent did not answer within {READY_WITHIN:g} seconds: {exc.message}"
                    ) from exc
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _check_needs(self, spec: SandboxSpec, box: E2bBox) -> None:
        template = spec.template
        name = self.settings.template_of(template)
        known = (name, template.needs)
        if not template.needs or known in self._checked:
            return
        if missing := await missing_programs(box, template):
            raise NotFoundError(
                f"E2B's template {name} has no {', '.join(missing)}, which template "
                f"{template.name} needs",
                hint="take another with CAPSULE_E2B_TEMPLATE, or change `needs` of the template",
            )
        self._checked.add(known)

    async def adopt(self, handle: Handle) -> Box | None:
        with in_doubt():
            return await self._adopt(handle)

    async def _adopt(self, handle: Handle) -> Box | None:
        id = safe(handle.sandbox_id)
        machine = await self._find(handle)
        if machine is None:
            return None
        try:
            seen = await machine.cloud.look(machine.id)
        except LostError:
            self._forget(id)
            return None
        if seen.sandbox_id != id:
            self._forget(id)
            return None
        place = plan.place_from(handle.data)
        if seen.paused:
            if place is not None:
                self._boxes[id] = machine, place
            return self._box(handle, machine, place)
        place = place or await self._scout(machine)
        self._boxes[id] = machine, place
        box = self._box(handle, machine, place)
        try:
            answer = await box.ping(ANSWER_WITHIN)
        except NobodyListensError:
            self._forget(id)
            return None
        if answer.get("id") != id:
            self._forget(id)
            return None
        self._leases.hold(machine)
        return box

    def _forget(self, id: str) -> None:
        log.info("box is gone", sandbox=id)
        if found := self._boxes.pop(id, None):
            self._leases.release(found[0])

    async def owned(self) -> AsyncIterator[Handle]:
        """Also of keys that came with a create, for as long as a box has them; what becomes of
        those keys is not the server's, so one that is refused keeps nobody from the others."""
        self._configured()
        for key, cloud in list(self._clouds.items()):
            try:
                with in_doubt():
                    found = [seen async for seen in cloud.list({OWNER: self._owner})]
            except UnavailableError as exc:
                if key == self.settings.api_key:
                    raise
                log.warning("sandboxes of a create's own key not listed", reason=exc.message)
                continue
            for seen in found:
                yield Handle(self.name, SandboxId(seen.sandbox_id), {"cloud": seen.id})

    async def discard(self, handle: Handle) -> None:
        id = safe(handle.sandbox_id)
        with in_doubt():
            machine = await self._find(handle)
        if machine is not None:
            await self._remove(id, machine)

    async def _find(self, handle: Handle) -> Machine | None:
        """The sandbox that a handle means; None: there is none."""
        id, cloud_id = safe(handle.sandbox_id), handle.data.get("cloud")
        known = self._boxes.get(id)
        if known is not None and cloud_id in (None, known[0].id):
            return known[0]
        if cloud_id:
            key = await asyncio.to_thread(self._keys.open, handle.data.get("key"))
            return Machine(self._cloud(key or self._key()), str(cloud_id))
        self._configured()
        for cloud in list(self._clouds.values()):
            async for seen in cloud.list({OWNER: self._owner, ID: id}):
                return Machine(cloud, seen.id)
        return None

    async def _remove(self, id: str, machine: Machine) -> None:
        self._leases.release(machine)
        with in_doubt():
            await to_the_end(machine.cloud.kill(machine.id))
        machine.gone = True
        if (known := self._boxes.get(id)) and known[0].id == machine.id:
            known[0].gone = True
            await self._relays.close(id)
            self._boxes.pop(id, None)
        self._forget_keys()

    def _box(self, handle: Handle, machine: Machine, place: Place | None) -> E2bBox:
        id = handle.sandbox_id
        return E2bBox(
            handle,
            machine,
            place,
            connect=lambda: self._relays.connect(id),
            pause=lambda: self._pause(id, machine),
            resume=lambda: self._resume(id, machine),
            remove=lambda: self._remove(id, machine),
        )

    async def _pause(self, id: str, machine: Machine) -> None:
        self._leases.release(machine)
        await self._relays.close(id)
        with in_doubt():
            await machine.cloud.pause(machine.id)

    async def _resume(self, id: str, machine: Machine) -> None:
        with in_doubt():
            await machine.wake()
            if id not in self._boxes:
                self._boxes[id] = machine, await self._scout(machine)
        self._leases.hold(machine)

    async def _start_relay(self, id: str) -> ByteStream:
        found = self._boxes.get(id)
        if found is None or found[0].gone:
            raise NotFoundError(f"no box {id}")
        machine, place = found
        with in_doubt(or_lost=True):
            return await Carrier.start(machine, plan.relay(place), place.user)

    async def save(
        self, box: Box, layer: str, *, full: bool, most_bytes: int, since: Mark | None = None
    ) -> Saved:
        assert isinstance(box, E2bBox)
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

    async def settle(self, layers: Sequence[str]) -> None:
        await self._layers.settle()

    async def kept(self) -> Sequence[str]:
        return await self._layers.kept()

    async def drop(self, layer: str) -> None:
        await self._layers.drop(layer)

    async def _filter(self, name: str, place: Place) -> bytes:
        known = (name, place.machine)
        if known not in self._filters:
            self._filters[known] = await asyncio.to_thread(self._compile, *known)
        return self._filters[known]

    def _compile(self, name: str, machine: str) -> bytes:
        profile = seccomp.load_profile(name, self.settings.profiles_dir)
        return seccomp.compile_profile(profile, machine)

    def _cloud(self, key: str) -> Cloud:
        if key not in self._clouds:
            self._clouds[key] = Cloud(self.settings, key)
        return self._clouds[key]

    def _key(self) -> str:
        if not self.settings.api_key:
            raise no_key()
        return self.settings.api_key

    def _forget_keys(self) -> None:
        """A key that came with a create is remembered for as long as it has a box."""
        used = {machine.cloud for machine, _ in self._boxes.values()}
        used.update(self._launching.values())
        kept = self.settings.api_key
        self._clouds = {k: each for k, each in self._clouds.items() if k == kept or each in used}

    def _configured(self) -> None:
        """What is there of ours is looked for with the key of the configuration as well."""
        if self.settings.api_key:
            self._cloud(self.settings.api_key)


async def _unmake(making: asyncio.Task[Machine]) -> None:
    machine = await making
    await machine.cloud.kill(machine.id)
