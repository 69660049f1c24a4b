"""Snapshots, forks and steps of containers: what the local provider does, a container does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from capsule.config import Config
from capsule.errors import ForbiddenError
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.service import ExecCall
from tests.contract.conftest import folder as make_folder
from tests.support import backends
from tests.support.backends import CATALOG, Backend
from tests.support.engine import PATIENCE, EngineApi
from tests.support.images import Images
from tests.unit import (
    test_service_real,
    test_snapshots_real,
    test_steps_real,
    test_volumes_real,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


class Kind(NamedTuple):
    runtime: str
    transport: str
    disk: str

    @property
    def copies(self) -> bool:
        return self.disk == "memory" or self.runtime == "runsc"


KINDS = (
    Kind("runc", "socket", "loop"),
    Kind("runc", "engine", "memory"),
    Kind("runsc", "socket", "loop"),
    Kind("runsc", "socket", "memory"),
)


def settings_of(kind: Kind, url: str, config: Config, agent: Path) -> DockerSettings:
    return DockerSettings(
        config.data_dir,
        config.run_dir,
        agent,
        host=url,
        runtime=kind.runtime,
        transport=kind.transport,
        disk_backing=kind.disk,
        patience=PATIENCE,
        pull="never",
    )


def backend_of(kind: Kind, engine: EngineApi, image: str, agent: Path) -> Backend:
    def boxes(folder: Path) -> list[str]:
        ours = (folder / "d" / "docker-id").read_text().strip()
        found = (each["Labels"] for each in engine.containers("capsule.owner"))
        return [one["capsule.id"] for one in found if one["capsule.owner"].startswith(ours)]

    def volumes(folder: Path) -> list[str]:
        ours = (folder / "d" / "docker-id").read_text().strip()
        filters = json.dumps({"label": [f"capsule.data={ours}"]})
        return [each["Name"] for each in engine.get("/volumes", filters=filters)["Volumes"] or ()]

    catalog = {
        name: replace(CATALOG[name], image=image, limits=replace(CATALOG[name].limits, cpus=1.0))
        for name in ("bash", "python")
    }
    return Backend(
        "docker",
        lambda config: DockerProvider(settings_of(kind, engine.url, config, agent)),
        catalog,
        None,
        "docker-layers",
        boxes,
        volumes,
        sized=False,  # the tests' Engine is on no file system with quotas
        copies=kind.copies,
    )


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest, engine: EngineApi) -> Kind:
    found: Kind = request.param
    if found.runtime != "runc":
        request.getfixturevalue("runsc")
    return found


@pytest.fixture
def folder(kind: Kind, engine: EngineApi, images: Images, agent_binary: Path) -> Iterator[Path]:
    with make_folder() as path:
        backend = backend_of(kind, engine, images.python, agent_binary)
        backends.register(path, backend)
        yield path
        for volume in backend.volumes(path) if (path / "d" / "docker-id").exists() else ():
            engine.call("DELETE", f"/volumes/{volume}")


def _tests(module: ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


for module in (test_snapshots_real, test_steps_real, test_volumes_real):
    globals().update(_tests(module))


async def test_programs_do_not_reach_what_is_below_their_files(folder: Path) -> None:
    async with test_service_real.serving(folder) as service:
        id = await test_snapshots_real.make(service, "echo x > f")
        await service.snapshots.make(id, "one", {})
        user = await test_snapshots_real.restore(service, "one")
        text = "cat f; echo y > f; ls /.capsule /.capsule/upper /.capsule/upper/workspace"
        done = await service.exec(user, ExecCall(("sh", "-c", text)))
        assert done.stdout == b"x\n" and done.stderr.count(b"ermission denied") == 3
        files = service.files(user)
        with pytest.raises(ForbiddenError):
            await files.read_bytes("/.capsule/upper/workspace/f", limit=10)
