"""What a client can do with volumes, once for JSON-RPC and REST."""

from __future__ import annotations

from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.drain import Gate
from capsule.service import Service, Volume
from capsule.service.caller import Caller


class VolumeVerbs:
    def __init__(self, service: Service, gate: Gate) -> None:
        self.service = service
        self.gate = gate

    async def create(self, caller: Caller, p: s.MakeVolume) -> v.VolumeView:
        self.gate.admit()
        made = await self.service.volumes.create(
            p.name, provider=p.provider, size=p.size, metadata=p.metadata, tenant=caller.tenant
        )
        return await self._view(made)

    async def list(self, caller: Caller, p: s.Nothing) -> v.VolumesView:
        found = self.service.volumes.list(caller.tenant)
        return v.VolumesView(volumes=[await self._view(each) for each in found])

    async def get(self, caller: Caller, p: s.OfVolume) -> v.VolumeView:
        return await self._view(self.service.volumes.find(p.name, caller.tenant))

    async def _view(self, volume: Volume) -> v.VolumeView:
        return v.VolumeView.of(volume, await self.service.volumes.look(volume))

    async def delete(self, caller: Caller, p: s.OfVolume) -> v.DeletedView:
        await self.service.volumes.delete(p.name, caller.tenant)
        return v.DeletedView()
