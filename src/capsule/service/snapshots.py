"""Snapshots: what sandboxes have written, under a name; and forks, which need none.

A snapshot is a record: a template and a stack of layers. A layer is a provider's; it lives for as
long as a snapshot or a sandbox has it in its stack, and is `held` while neither has it yet. What
nobody has is dropped: at the start, when a snapshot is deleted, after a sandbox has ended, and
every minute. So a server that is killed at any point leaves at most a layer that the next one
drops.

    _drop_soon ─▶ drop layers   one task (ended by Snapshots.aclose), while there are layers of
                                sandboxes and boxes that are over: nobody waits for it
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from typing import NamedTuple

import structlog

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
)
from capsule.model import Layer, State, Step
from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.contract import Box, Layered, Mark, Merging, Saved
from capsule.service import validate
from capsule.service.admission import new_id
from capsule.service.caller import DEFAULT_TENANT, named
from capsule.service.entry import Entry
from capsule.service.former import Former
from capsule.service.keepsakes import Keepsakes
from capsule.service.sandboxes import DESTROY_BUDGET, Parts, Sandboxes
from capsule.service.tasks import Tasks
from capsule.service.template_names import shown
from capsule.service.together import Together
from capsule.service.values import CreateRequest, Sandbox, Snapshot, VolumeWish
from capsule.settings import brief

log = structlog.get_logger(__name__)

KIND = "snapshot"
MAX_FORKS = 20


class _Stacks(NamedTuple):
    """What a sandbox's layers were found in, and their names."""

    steps: tuple[Step, ...]
    layers: tuple[Layer, ...]
    names: frozenset[str]


class Snapshots:
    def __init__(self, parts: Parts, sandboxes: Sandboxes) -> None:
        self._parts = parts
        self._sandboxes = sandboxes
        self._known: dict[str, Snapshot] = {}  # by whose they are, and their names
        self._keepsakes = Keepsakes(parts.config.data_dir / "kept" / KIND, Snapshot)
        self._unsure = False  # there may be snapshots that nobody knows
        self._names: set[str] = set()  # being made
        self.check: Callable[[Snapshot], None] = _pass  # told when tenants have quotas
        self._coming: dict[str, Snapshot] = {}  # checked, and not known yet
        self._held: Counter[str] = Counter()  # layers in use that no record may have
        self._stacks: dict[str, _Stacks] = {}  # of sandboxes with steps, as they last were
        self._ended: deque[tuple[str, frozenset[str]]] = deque()  # layers that may be nobody's now
        self._dropping = False
        self._tasks = Tasks()

    async def open(self) -> None:
        """After the sandboxes were adopted: what nobody has is dropped."""
        found = await self._keepsakes.open()
        self._unsure = found.unreadable > 0
        recorded = {_key(s): s for s in await self._parts.store.load_kept(KIND, Snapshot)}
        kept = {_key(snapshot): snapshot for snapshot in found.kept}
        self._known = {**recorded, **kept}
        for key, snapshot in kept.items():
            if recorded.get(key) != snapshot:
                log.warning("snapshot without its record taken up again", snapshot=key)
                await self._note(snapshot)
        for key in recorded.keys() - kept.keys():
            await self._keepsakes.keep(key, key, recorded[key])
        await self.sweep()
        self._sandboxes.ended, self._sandboxes.parted = self._let_go, self._part

    async def aclose(self) -> None:
        """After the last sandbox has ended. What is not dropped by then the next server drops."""
        self._sandboxes.parted = _pass  # a box that goes later
        await self._tasks.aclose()

    def find(self, name: str, tenant: str = DEFAULT_TENANT) -> Snapshot:
        """Raises NotFoundError."""
        found = self._known.get(named(tenant, validate.name("snapshot", name)))
        if found is None:
            raise NotFoundError(
                f"snapshot {brief(name)} does not exist",
                hint="list the snapshots to see what there is",
                field="snapshot",
            )
        return found

    def charged(self, tenant: str) -> Iterator[Snapshot]:
        """What counts for its quota: those that are being kept, too."""
        every = (*self._known.values(), *self._coming.values())
        return (each for each in every if each.tenant == tenant)

    def list(self, tenant: str = DEFAULT_TENANT) -> list[Snapshot]:
        """Oldest first."""
        own = [each for each in self._known.values() if each.tenant == tenant]
        return sorted(own, key=lambda each: each.created)

    async def make(
        self,
        id: str,
        name: str,
        metadata: Mapping[str, str],
        *,
        over_quota: bool = False,
        again: bool = False,
    ) -> Snapshot:
        """Keep a sandbox's files as they are at one moment, for which it stands still. It belongs
        to whom the sandbox belongs. `over_quota`: rather than that they are lost; `again`: instead
        of those that have the name.

        Raises ConflictError (the name is taken), NotSupportedError, TooLargeError, NoSpaceError,
        and what keeps the sandbox from being used.
        """
        entry = self._sandboxes.find(id)
        validate.metadata(metadata)
        before = self._known.get(named(entry.tenant, name))
        with self.claim(entry.tenant, validate.name("name", name), again=again):
            async with self.saved(entry) as (layers, _):
                made = Snapshot(
                    name=name,
                    provider=entry.provider,
                    template=shown(entry.template.name),
                    layers=layers,
                    created=self._parts.clock.now(),
                    metadata=dict(metadata),
                    tenant=entry.tenant,
                    sandbox=entry.id,
                )
                await self.keep(made, over_quota=over_quota)
        if before is not None:
            await self.sweep()
        return made

    def owners(self) -> set[str]:
        return {each.tenant for each in self._known.values()}

    async def keep(self, made: Snapshot, *, over_quota: bool = False) -> None:
        """On return it outlives a crash of the machine. Raises ForbiddenError (a quota)."""
        if not over_quota:
            self.check(made)
        key = _key(made)
        self._coming[key] = made
        try:
            await self.layered(made.provider).settle([layer.id for layer in made.layers])
            await self._keepsakes.keep(key, key, made)
            await self._noted(made)
            self._known[key] = made
        finally:
            del self._coming[key]

    async def _noted(self, made: Snapshot) -> None:
        try:
            await self._note(made)
        except BaseException:
            forget = self._keepsakes.forget(_key(made))
            await finish(forget, f"snapshot {_key(made)}", budget=DESTROY_BUDGET)
            raise

    async def _note(self, made: Snapshot) -> None:
        await self._parts.store.save_kept(KIND, _key(made), made.created, made)

    @contextmanager
    def claim(self, tenant: str, name: str, *, again: bool = False) -> Iterator[None]:
        key = named(tenant, name)
        if (key in self._known and not again) or key in self._names:
            raise ConflictError(
                f"snapshot {name} exists already", hint="take another name, or delete it first"
            )
        self._names.add(key)
        try:
            yield
        finally:
            self._names.discard(key)

    async def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Sandboxes that started from it go on; its layers go with the last of them."""
        snapshot = self.find(name, tenant)
        key = _key(snapshot)
        await self._keepsakes.forget(key)
        try:
            await self._parts.store.remove_kept(KIND, key)
        except BaseException:
            again = self._keepsakes.keep(key, key, snapshot)
            await finish(again, f"snapshot {key}", budget=DESTROY_BUDGET)
            raise
        self._known.pop(key, None)
        await self.sweep()

    async def fork(self, id: str, count: int, ttl: float | None = None) -> builtins.list[Sandbox]:
        """So many sandboxes with the same files, limits, environment and labels; all or none."""
        entry = self._sandboxes.find(id)
        validate.count("count", count, 1, MAX_FORKS)
        async with self.saved(entry) as (layers, _):
            return await self.start_all(entry, layers, count, ttl)

    async def start_all(
        self, entry: Entry, layers: tuple[Layer, ...], count: int, ttl: float | None = None
    ) -> builtins.list[Sandbox]:
        validate.count("count", count, 1, MAX_FORKS)
        request = _same(entry) if ttl is None else replace(_same(entry), ttl=ttl)
        group = Together(count)
        with self.held(layers):
            tasks = [
                asyncio.create_task(
                    self._sandboxes.create(request, layers=layers, tenant=entry.tenant, group=group)
                )
                for _ in range(count)
            ]
            try:
                return await _all(tasks)
            except BaseException:
                group.fail()
                await finish(self._undo(tasks), f"fork {entry.id}", budget=DESTROY_BUDGET)
                raise

    async def _undo(self, tasks: builtins.list[asyncio.Task[Sandbox]]) -> None:
        """A launch takes milliseconds: let each come to its end, and end it."""
        results = await asyncio.gather(*tasks, return_exceptions=True)
        made = [result.id for result in results if isinstance(result, Sandbox)]
        await asyncio.gather(*(self._sandboxes.delete(id, "its fork failed") for id in made))

    @asynccontextmanager
    async def saved(
        self, entry: Entry, *, since: Mark | None = None, on: tuple[Layer, ...] = ()
    ) -> AsyncIterator[tuple[tuple[Layer, ...], Saved]]:
        """What the sandbox's files are made of now. Held until whoever wants them has a record.
        `on`: what it was made of at `since`, of which no more may be told than what changed."""
        provider = self.layered(entry.provider)
        name = new_id()
        try:
            with self.held((Layer(name), *entry.layers), on):
                layers, saved = await self._save(entry, provider, name, since)
                yield ((layers[0], *on) if saved.delta else layers), saved
        finally:
            if not self._has(name):
                await finish(provider.drop(name), f"layer {name}", budget=DESTROY_BUDGET)

    @asynccontextmanager
    async def merged(
        self, entry: Entry, stack: tuple[Layer, ...], count: int
    ) -> AsyncIterator[tuple[Layer, ...]]:
        """The same files, of fewer layers: the topmost are one. Held as by `saved`."""
        provider: object = self.layered(entry.provider)
        if not isinstance(provider, Merging):
            raise NotSupportedError(f"provider {entry.provider} cannot merge layers")
        name = new_id()
        try:
            with self.held((Layer(name), *stack)):
                saved = await provider.merge(name, [layer.id for layer in stack], count=count)
                # A hole was not counted when it was written.
                size = min(saved.size, sum(layer.size for layer in stack[:count]))
                yield (Layer(name, size, saved.files), *stack[count:])
        finally:
            if not self._has(name):
                await finish(provider.drop(name), f"layer {name}", budget=DESTROY_BUDGET)

    @contextmanager
    def held(self, *stacks: tuple[Layer, ...]) -> Iterator[None]:
        """They are not dropped meanwhile, whoever else lets go of them."""
        names = [layer.id for stack in stacks for layer in stack]
        self._held.update(names)
        try:
            yield
        finally:
            self._held.subtract(names)
            self._held += Counter()  # forgets those that are at 0

    async def _save(
        self, entry: Entry, provider: Layered, name: str, since: Mark | None
    ) -> tuple[tuple[Layer, ...], Saved]:
        async with entry.shifting:
            if entry.state is not State.PAUSED:
                entry.running()
            if entry.box is None:
                raise entry.refusal()
            full = len(entry.layers) + 1 >= provider.max_layers
            try:
                saved = await self._ask(entry.box, provider, name, full, since)
            except CapsuleError as error:
                raise _explained(entry, error) from error
        top = Layer(name, saved.size, saved.files)
        return ((top,) if full or saved.whole else (top, *entry.layers)), saved

    async def _ask(
        self, box: Box, provider: Layered, name: str, full: bool, since: Mark | None
    ) -> Saved:
        most = self._parts.config.max_snapshot
        if since is not None and since.layers:
            try:
                return await provider.save(box, name, full=full, most_bytes=most, since=since)
            except (InvalidError, NotFoundError) as error:
                # A folder was renamed, or the layer before is not as it was.
                log.info("saved as a whole", layer=name, reason=error.message)
                since = Mark()
        return await provider.save(box, name, full=full, most_bytes=most, since=since)

    def layered(self, name: str) -> Layered:
        provider: object = self._parts.providers.get(name)
        if not isinstance(provider, Layered):
            raise NotSupportedError(
                f"provider {name} cannot keep the files of a sandbox",
                hint="GET /v1/capabilities lists the features of each provider",
            )
        return provider

    def _in_use(self) -> set[str]:
        held = {name for name, count in self._held.items() if count > 0}
        kept = (layer.id for each in self._known.values() for layer in each.layers)
        entries = self._sandboxes.entries.values()
        former = (box.layers for each in entries for box in each.formers)
        return held.union(kept, *former, *map(self._layers_of, entries))

    def _has(self, layer: str) -> bool:
        """Whether it is in use. To be asked often: it looks at few things of each sandbox."""
        entries = self._sandboxes.entries.values()
        return (
            self._held[layer] > 0
            or any(layer in self._layers_of(each) for each in entries)
            or any(layer in former.layers for each in entries for former in each.formers)
            or any(layer == own.id for each in self._known.values() for own in each.layers)
        )

    def _layers_of(self, entry: Entry) -> frozenset[str]:
        """A sandbox may have 200 steps of 16 layers each."""
        if not entry.steps:
            return frozenset(layer.id for layer in entry.layers)
        found = self._stacks.get(entry.id)
        if found is None or found.steps is not entry.steps or found.layers is not entry.layers:
            stacks = (entry.layers, *(step.layers for step in entry.steps))
            names = frozenset(layer.id for stack in stacks for layer in stack)
            found = self._stacks[entry.id] = _Stacks(entry.steps, entry.layers, names)
        return found.names

    async def sweep(self) -> None:
        """Drop the layers that nobody has."""
        if self._unsure:
            return
        for gone in self._stacks.keys() - self._sandboxes.entries.keys():
            del self._stacks[gone]
        for provider in self._parts.providers.values():
            if not isinstance(provider, Layered):
                continue
            try:
                kept = await provider.kept()
                for layer in set(kept) - self._in_use():
                    if not self._has(layer):  # as it is now
                        await provider.drop(layer)
            except CapsuleError as error:
                log.warning("layers not removed yet", reason=error.message)

    def _let_go(self, entry: Entry) -> None:
        """A sandbox has ended."""
        layers = self._layers_of(entry)
        self._stacks.pop(entry.id, None)
        self._drop_soon(entry.provider, layers)

    def _part(self, entry: Entry, former: Former) -> None:
        self._drop_soon(entry.provider, former.layers)

    def _drop_soon(self, provider: str, layers: frozenset[str]) -> None:
        if self._unsure or not layers:
            return
        self._ended.append((provider, layers))
        if not self._dropping:
            self._dropping = True
            self._tasks.spawn(self._drop_ended(), "drop layers")

    async def _drop_ended(self) -> None:
        try:
            while self._ended:
                await self._drop_layers(*self._ended[0])
        finally:
            self._dropping = False

    async def _drop_layers(self, name: str, layers: frozenset[str]) -> None:
        try:
            provider = self.layered(name)
            for layer in layers:
                if not self._has(layer):
                    await to_the_end(provider.drop(layer))
        except CapsuleError as error:
            log.warning("layers not removed yet", provider=name, reason=error.message)
        finally:
            self._ended.popleft()


def _key(snapshot: Snapshot) -> str:
    return named(snapshot.tenant, snapshot.name)


def _explained(entry: Entry, error: CapsuleError) -> CapsuleError:
    """It may have been ended meanwhile."""
    return error if entry.ending is None else entry.refusal()


def _same(entry: Entry) -> CreateRequest:
    return CreateRequest(
        template=shown(entry.template.name),
        ttl=entry.ttl,
        idle_timeout=entry.idle_timeout,
        limits=asdict(entry.limits),
        env=entry.env,
        metadata=entry.metadata,
        provider=entry.provider,
        provider_key=entry.credential,
        runtime=entry.runtime or None,
        on_timeout=entry.on_timeout,
        auto_resume=entry.auto_resume,
        keep_memory=entry.keep_memory,
        checkpoint="each" if entry.steps else "none",
        volumes=tuple(VolumeWish(v.name, v.path, v.read_only) for v in entry.volumes),
        notes=entry.notes,
        ports=entry.ports,
        request_host=entry.request_host,
    )


async def _all(tasks: list[asyncio.Task[Sandbox]]) -> list[Sandbox]:
    """Their results, or the first error."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [task.result() for task in tasks]


def _pass(*_: object) -> None:
    pass
