"""What a client can do with snapshots and forks, once for JSON-RPC and REST."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.download import INERT, TAR, begun
from capsule.edge.drain import Gate
from capsule.service import Service
from capsule.service.caller import Caller


class SnapshotVerbs:
    def __init__(self, service: Service, gate: Gate) -> None:
        self.service = service
        self.gate = gate

    async def make(self, id: str, p: s.MakeSnapshot) -> v.SnapshotView:
        self.gate.admit()
        return v.SnapshotView.of(await self.service.snapshots.make(id, p.name, p.metadata))

    async def fork(self, id: str, p: s.Fork) -> v.ForkView:
        self.gate.admit()
        made = await self.service.fork(id, p.count, at=p.at)
        return v.ForkView(sandboxes=[v.SandboxView.of(each) for each in made])

    async def steps(self, id: str, p: s.Nothing) -> v.StepsView:
        return v.StepsView(steps=[v.StepView.of(each) for each in self.service.steps.list(id)])

    async def diff(self, id: str, p: s.Diff) -> v.DiffView:
        found = await self.service.steps.diff(id, p.old, p.new)
        return v.DiffView(changes=[v.FileChangeView.of(each) for each in found])

    async def undo(self, id: str, p: s.Undo) -> v.SandboxView:
        self.gate.admit()
        return v.SandboxView.of(await self.service.steps.undo(id, p.to))

    async def list(self, caller: Caller, p: s.Nothing) -> v.SnapshotsView:
        found = self.service.snapshots.list(caller.tenant)
        return v.SnapshotsView(snapshots=[v.SnapshotView.of(each) for each in found])

    async def get(self, caller: Caller, p: s.OfSnapshot) -> v.SnapshotView:
        return v.SnapshotView.of(self.service.snapshots.find(p.name, caller.tenant))

    async def delete(self, caller: Caller, p: s.OfSnapshot) -> v.DeletedView:
        await self.service.snapshots.delete(p.name, caller.tenant)
        return v.DeletedView()

    async def export(self, caller: Caller, p: s.OfSnapshot) -> Response:
        name = f'attachment; filename="{p.name}.tar"'
        headers = {"content-type": TAR, **INERT, "content-disposition": name}
        return await begun(self.service.moves.export(p.name, caller.tenant), headers)

    async def import_(
        self, caller: Caller, p: s.ImportSnapshot, chunks: AsyncIterator[bytes]
    ) -> v.SnapshotView:
        self.gate.admit()
        made = await self.service.moves.import_(
            p.name, chunks, template=p.template, provider=p.provider, tenant=caller.tenant
        )
        return v.SnapshotView.of(made)
