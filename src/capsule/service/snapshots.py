"""Snapshots: what sandboxes have written, under a name; and forks, which need none.

A snapshot is a record: a template and a stack of layers. A layer is a provider's; it lives for as
long as a snapshot or a sandbox has it in its stack, and is `held` while neither has it yet. What
nobody has is dropped: at the start, when a snapshot is deleted, and every minute. So a server that
is killed at any point leaves at most a layer that the next one drops.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict

import structlog

from capsule.errors import CapsuleError, ConflictError, NotFoundError, NotSupportedError
from capsule.model import Layer, State
from capsule.providers.cleanup import finish
from capsule.providers.contract import Layered
from capsule.service import validate
from capsule.service.admission import new_id
from capsule.service.entry import Entry
from capsule.service.sandboxes import DESTROY_BUDGET, Parts, Sandboxes
from capsule.service.values import CreateRequest, Sandbox, Snapshot
from capsule.settings import brief

log = structlog.get_logger(__name__)

KIND = "snapshot"
MAX_FORKS = 20


class Snapshots:
    def __init__(self, parts: Parts, sandboxes: Sandboxes) -> None:
        self._parts = parts
        self._sandboxes = sandboxes
        self._known: dict[str, Snapshot] = {}
        self._names: set[str] = set()  # being made
        self._held: set[str] = set()  # layers that no record has yet

    async def open(self) -> None:
        """After the sandboxes were adopted: what nobody has is dropped."""
        for snapshot in await self._parts.store.load_kept(KIND, Snapshot):
            self._known[snapshot.name] = snapshot
        await self.sweep()

    def find(self, name: str) -> Snapshot:
        """Raises NotFoundError."""
        found = self._known.get(name) if isinstance(name, str) else None
        if found is None:
            raise NotFoundError(
                f"snapshot {brief(name)} does not exist",
                hint="list the snapshots to see what there is",
                field="snapshot",
            )
        return found

    def list(self) -> list[Snapshot]:
        """Oldest first."""
        return sorted(self._known.values(), key=lambda each: each.created)

    async def make(self, id: str, name: str, metadata: Mapping[str, str]) -> Snapshot:
        """Keep a sandbox's files as they are at one moment, for which it stands still.

        Raises ConflictError (the name is taken), NotSupportedError, TooLargeError, NoSpaceError,
        and what keeps the sandbox from being used.
        """
        entry = self._sandboxes.find(id)
        validate.metadata(metadata)
        with self._claim(validate.name("name", name)):
            async with self._saved(entry) as layers:
                made = Snapshot(
                    name=name,
                    provider=entry.provider,
                    template=entry.template.name,
                    layers=layers,
                    created=self._parts.clock.now(),
                    metadata=dict(metadata),
                )
                await self._keep(made)
        return made

    async def _keep(self, made: Snapshot) -> None:
        await self._parts.store.save_kept(KIND, made.name, made.created, made)
        self._known[made.name] = made

    @contextmanager
    def _claim(self, name: str) -> Iterator[None]:
        if name in self._known or name in self._names:
            raise ConflictError(
                f"snapshot {name} exists already", hint="take another name, or delete it first"
            )
        self._names.add(name)
        try:
            yield
        finally:
            self._names.discard(name)

    async def delete(self, name: str) -> None:
        """Sandboxes that started from it go on; its layers go with the last of them."""
        self.find(name)
        await self._parts.store.remove_kept(KIND, name)
        self._known.pop(name, None)
        await self.sweep()

    async def fork(self, id: str, count: int) -> builtins.list[Sandbox]:
        """So many sandboxes with the same files, limits, environment and labels; all or none."""
        validate.count("count", count, 1, MAX_FORKS)
        entry = self._sandboxes.find(id)
        async with self._saved(entry) as layers:
            request = _same(entry)
            tasks = [
                asyncio.create_task(self._sandboxes.create(request, layers=layers))
                for _ in range(count)
            ]
            try:
                return await _all(tasks)
            except BaseException:
                await finish(self._undo(tasks), f"fork {id}", budget=DESTROY_BUDGET)
                raise

    async def _undo(self, tasks: builtins.list[asyncio.Task[Sandbox]]) -> None:
        """A launch takes milliseconds: let each come to its end, and end it."""
        results = await asyncio.gather(*tasks, return_exceptions=True)
        made = [result.id for result in results if isinstance(result, Sandbox)]
        await asyncio.gather(*(self._sandboxes.delete(id, "its fork failed") for id in made))

    @asynccontextmanager
    async def _saved(self, entry: Entry) -> AsyncIterator[tuple[Layer, ...]]:
        """What the sandbox's files are made of now. Held until whoever wants them has a record."""
        provider = self._layered(entry.provider)
        name = new_id()
        self._held.update((name, *(layer.id for layer in entry.layers)))
        try:
            yield await self._save(entry, provider, name)
        finally:
            self._held.difference_update((name, *(layer.id for layer in entry.layers)))
            if name not in self._in_use():
                await finish(provider.drop(name), f"layer {name}", budget=DESTROY_BUDGET)

    async def _save(self, entry: Entry, provider: Layered, name: str) -> tuple[Layer, ...]:
        async with entry.shifting:
            if entry.state is not State.PAUSED:
                entry.running()
            if entry.box is None:
                raise entry.refusal()
            full = len(entry.layers) + 1 >= provider.max_layers
            most = self._parts.config.max_snapshot
            try:
                saved = await provider.save(entry.box, name, full=full, most_bytes=most)
            except CapsuleError as error:
                raise _explained(entry, error) from error
        top = Layer(name, saved.size, saved.files)
        return (top,) if full else (top, *entry.layers)

    def _layered(self, name: str) -> Layered:
        provider: object = self._parts.providers.get(name)
        if not isinstance(provider, Layered):
            raise NotSupportedError(
                f"provider {name} cannot keep the files of a sandbox",
                hint="GET /v1/capabilities lists the features of each provider",
            )
        return provider

    def _in_use(self) -> set[str]:
        stacks = [each.layers for each in self._known.values()]
        stacks += [entry.layers for entry in self._sandboxes.entries.values()]
        return self._held.union(layer.id for stack in stacks for layer in stack)

    async def sweep(self) -> None:
        """Drop the layers that nobody has."""
        for provider in self._parts.providers.values():
            if not isinstance(provider, Layered):
                continue
            try:
                for layer in await provider.kept():
                    if layer not in self._in_use():
                        await provider.drop(layer)
            except CapsuleError as error:
                log.warning("layers not removed yet", reason=error.message)


def _explained(entry: Entry, error: CapsuleError) -> CapsuleError:
    """It may have been ended meanwhile."""
    return error if entry.ending is None else entry.refusal()


def _same(entry: Entry) -> CreateRequest:
    return CreateRequest(
        template=entry.template.name,
        ttl=entry.ttl,
        idle_timeout=entry.idle_timeout,
        limits=asdict(entry.limits),
        env=entry.env,
        metadata=entry.metadata,
        provider=entry.provider,
        runtime=entry.runtime or None,
        on_timeout=entry.on_timeout,
        auto_resume=entry.auto_resume,
    )


async def _all(tasks: list[asyncio.Task[Sandbox]]) -> list[Sandbox]:
    """Their results, or the first error."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [task.result() for task in tasks]
