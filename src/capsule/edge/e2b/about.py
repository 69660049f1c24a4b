"""What envd says about its sandbox: what it uses, and the variables it was given."""

from __future__ import annotations

import math
import time

from starlette.requests import Request
from starlette.responses import Response

from capsule.edge.e2b.guests import Guest
from capsule.edge.e2b.rpc import Call, json
from capsule.service import Service


class About:
    def __init__(self, service: Service) -> None:
        self._service = service

    def calls(self) -> dict[tuple[str, str], Call]:
        return {("GET", "/envs"): self.envs, ("GET", "/metrics"): self.metrics}

    async def envs(self, guest: Guest, request: Request) -> Response:
        return json(guest.sandbox.env)

    async def metrics(self, guest: Guest, request: Request) -> Response:
        used, limits = await self._service.metrics(guest.id), guest.sandbox.limits
        samples = await self._service.history.of(guest.id)
        cpus = samples[-1].cpus if samples else 0.0
        return json(
            {
                "ts": int(time.time()),
                "cpu_count": max(1, math.ceil(limits.cpus)),
                "cpu_used_pct": round(100 * cpus / limits.cpus, 2),
                "mem_total": limits.memory,
                "mem_used": used.memory_bytes,
                "disk_total": limits.disk,
                "disk_used": used.disk_bytes,
            }
        )
