"""What a sandbox has used where no cgroup counts it; tests/e2b/test_state.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.edge.e2b.control_views import metric
from capsule.providers.local import cgroups
from capsule.service import CreateRequest, ExecCall, Service
from tests.support import eventually
from tests.unit.test_service_real import folder, serving

__all__ = ["folder"]


def uncounted(service: Service, id: str) -> bool:
    return "memory" in {each.what for each in service.get(id).unenforced}


@pytest.mark.real
async def test_memory_that_no_cgroup_counts_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of programs that run is known without a cgroup."""
    monkeypatch.setattr(cgroups, "find_here", lambda: cgroups.Layout(0))
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id

        async def counted() -> bool:
            return ((await service.metrics(id)).memory_bytes or 0) > 0

        assert uncounted(service, id)
        (sample,) = await service.history.of(id)
        assert sample.memory is None
        assert metric(service.get(id), sample).mem_used is None
        (told,) = await service.usages()
        assert told.usage.memory_bytes is None
        async with await service.start(id, ExecCall(("sleep", "20"))):
            await eventually(counted, what="the memory of a program that runs")
