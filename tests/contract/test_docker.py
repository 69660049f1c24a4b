"""The Docker provider keeps the contract: with runc and with gVisor, by sockets and through the
Engine."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from capsule.model import Handle, Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.harness import Leftovers, NewProvider
from capsule.testing.suite import *  # noqa: F403  # the tests
from tests.support.engine import EngineApi
from tests.support.images import Images

pytestmark = pytest.mark.real


class Kind(NamedTuple):
    runtime: str
    transport: str


@pytest.fixture(
    params=[Kind("runc", "socket"), Kind("runc", "engine"), Kind("runsc", "socket")],
    ids=lambda kind: f"{kind.runtime}-{kind.transport}",
)
def kind(request: pytest.FixtureRequest, engine: EngineApi) -> Kind:
    found: Kind = request.param
    if found.runtime != "runc":
        request.getfixturevalue("runsc")
    return found


@pytest.fixture(name="template")
def template_of_an_image(images: Images) -> Template:
    return Template("conformance", image=images.python)


@pytest.fixture
def new_provider(
    kind: Kind, docker_url: str, run_dir: Path, agent_binary: Path
) -> Iterator[NewProvider]:
    settings = DockerSettings(
        run_dir,
        run_dir,
        agent_binary,
        host=docker_url,
        runtime=kind.runtime,
        transport=kind.transport,
        pull="never",
    )
    yield lambda: DockerProvider(settings)


@pytest.fixture(name="leftovers")
def leftovers_of_a_container(engine: EngineApi, run_dir: Path) -> Leftovers:
    def look(handle: Handle) -> list[str]:
        container = str(handle.data.get("container", "none"))
        found = [c["Id"] for c in engine.containers(f"capsule.id={handle.sandbox_id}")]
        folder = run_dir / "docker" / handle.sandbox_id
        found += [str(folder)] if folder.exists() else []
        return found + _groups(container) + _processes(container)

    return look


def _groups(container: str) -> list[str]:
    base = "/sys/fs/cgroup"
    return [
        path for depth in ("*", "*/*", "*/*/*") for path in glob.glob(f"{base}/{depth}/{container}")
    ]


def _processes(container: str) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, container)]


def _belongs(pid: str, container: str) -> bool:
    try:
        return container in Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
