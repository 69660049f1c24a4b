"""Snapshots that leave the server as archives, and archives that become snapshots."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from capsule.errors import CapacityError, NotSupportedError
from capsule.model import Layer
from capsule.providers.cleanup import finish
from capsule.providers.contract import Portable
from capsule.service import snapshot_format, validate
from capsule.service.admission import Admission, new_id
from capsule.service.caller import DEFAULT_TENANT
from capsule.service.sandboxes import DESTROY_BUDGET, Parts
from capsule.service.snapshot_format import FORMAT, VERSION, Manifest
from capsule.service.snapshots import Snapshots
from capsule.service.template_names import shown
from capsule.service.values import Snapshot

MOST_IMPORTS = 8  # at once: each has a thread


class SnapshotMoves:
    def __init__(self, parts: Parts, snapshots: Snapshots, admission: Admission) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._admission = admission
        self._importing = 0

    async def export(self, name: str, tenant: str = DEFAULT_TENANT) -> AsyncGenerator[bytes, None]:
        """The snapshot as an archive. It may be deleted meanwhile; its layers stay until the end.

        Raises NotFoundError, NotSupportedError, TooLargeError, ForbiddenError before the first
        piece.
        """
        snapshot = self._snapshots.find(name, tenant)
        provider = self._portable(snapshot.provider)
        manifest = Manifest(
            format=FORMAT,
            version=VERSION,
            name=snapshot.name,
            template=snapshot.template,
            provider=snapshot.provider,
            created_at=snapshot.created_at,
            size=snapshot.size,
            files=snapshot.files,
            metadata=dict(snapshot.metadata),
        )
        with self._snapshots.held(snapshot.layers):
            ids = [layer.id for layer in snapshot.layers]
            members = provider.read_layers(ids, most_bytes=self._parts.config.max_snapshot)
            async with aclosing(members):
                async for piece in snapshot_format.pack(manifest, members):
                    yield piece

    async def import_(
        self,
        name: str,
        chunks: AsyncIterable[bytes],
        *,
        template: str | None = None,
        provider: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Snapshot:
        """A snapshot of this name from an archive, whoever wrote it; all or nothing.

        Template and provider are those that it names, unless others are given.

        Raises ConflictError (the name is taken), InvalidError, NotFoundError (the template),
        NotSupportedError, TooLargeError, NoSpaceError, CapacityError, and what `chunks` raises.
        """
        validate.name("name", name)
        with self._snapshots.claim(tenant, name), self._place():
            most = self._parts.config.max_snapshot
            manifest, members = await snapshot_format.unpack(chunks, most_bytes=most)
            async with aclosing(members):
                validate.metadata(manifest.metadata)
                base = self._admission.template(template or manifest.template, tenant)
                made = Snapshot(
                    name=name,
                    provider=self._admission.provider(provider or manifest.provider),
                    template=shown(base.name),
                    layers=(Layer(new_id()),),
                    created=self._parts.clock.now(),
                    metadata=dict(manifest.metadata),
                    tenant=tenant,
                )
                return await self._take_in(made, members)

    async def _take_in(self, made: Snapshot, members: AsyncGenerator[bytes, None]) -> Snapshot:
        provider = self._portable(made.provider)
        (layer,) = made.layers
        with self._snapshots.held(made.layers):
            try:
                most = self._parts.config.max_snapshot
                saved = await provider.write_layer(layer.id, members, most_bytes=most)
                made = replace(made, layers=(Layer(layer.id, saved.size, saved.files),))
                await self._snapshots.keep(made)
            except BaseException:
                await finish(provider.drop(layer.id), made.name, budget=DESTROY_BUDGET)
                raise
        return made

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._importing >= MOST_IMPORTS:
            raise CapacityError(
                f"the server takes in {self._importing} snapshots already",
                hint="try again when one of them is done",
                limit=MOST_IMPORTS,
            )
        self._importing += 1
        try:
            yield
        finally:
            self._importing -= 1

    def _portable(self, name: str) -> Portable:
        provider = self._snapshots.layered(name)
        if not isinstance(provider, Portable):
            raise NotSupportedError(
                f"provider {name} cannot move snapshots between servers",
                hint="GET /v1/capabilities lists the features of each provider",
            )
        return provider
