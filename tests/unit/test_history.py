"""What sandboxes have used: who is looked at, how often, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.edge.e2b.control_views import metric
from capsule.errors import GoneError
from capsule.providers.local import cgroups
from capsule.service import CreateRequest, ExecCall, Service
from capsule.service.history import INTERVAL, PER_SECOND
from tests.support import eventually
from tests.unit.service_double import bench
from tests.unit.test_service_real import folder, serving

__all__ = ["folder"]

BUSY = ExecCall(("sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"))


async def test_many_take_turns(tmp_path: Path) -> None:
    async with bench(tmp_path, max_sandboxes=100) as desk:
        made = [(await desk.service.create(CreateRequest())).id for _ in range(PER_SECOND + 5)]
        history = desk.service.history
        for id in made[:-1]:
            history.follow(id)
        first, second = history._due(), history._due()
        assert first == made[:PER_SECOND]
        assert second[:4] == made[PER_SECOND:-1]  # then those that have given no answer
        await desk.service.delete(made[0])
        assert made[0] not in {*history._due(), *history._due()}


def uncounted(service: Service, id: str) -> bool:
    return "memory" in {each.what for each in service.get(id).unenforced}


@pytest.mark.real
async def test_memory_that_no_cgroup_counts_is_not_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of programs that run it is known all the same."""
    monkeypatch.setattr(cgroups, "find_here", lambda: cgroups.Layout(0))
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        assert uncounted(service, id)
        (sample,) = await service.history.of(id)
        assert sample.memory is None
        assert metric(service.get(id), sample).mem_used is None
        (told,) = await service.usages()
        assert told.usage.memory_bytes is None
        async with await service.start(id, ExecCall(("sleep", "20"))):
            assert ((await service.metrics(id)).memory_bytes or 0) > 0


@pytest.mark.real
async def test_a_sample_has_what_was_used(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash", idle_timeout=30.0))).id
        await service.exec(id, BUSY)
        active = service._sandboxes.find(id).active
        (first,) = await service.history.of(id)
        assert first.cpu_ms > 0 and first.cpus > 0
        assert uncounted(service, id) or (first.memory or 0) > 0
        assert await service.history.of(id) == (first,)  # of the same second
        assert service._sandboxes.find(id).active == active

        async def again() -> bool:
            return len(await service.history.of(id)) > 1

        await eventually(again, what="a second sample", within=INTERVAL)
        await service.delete(id)
        with pytest.raises(GoneError):
            await service.history.of(id)
