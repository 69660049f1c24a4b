"""The Docker provider keeps the contract: with runc and with gVisor, by sockets and through the
Engine."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from capsule.model import Handle, Template
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.harness import Leftovers, NewProvider
from capsule.testing.suite import *  # noqa: F403  # the tests
from tests.contract.shelf import (
    MakeProvider,
    launch_of_ones_own,
    provider_of_ones_own,
    shelves,
    subject_that_is_shared,
)
from tests.support.engine import PATIENCE, EngineApi
from tests.support.images import Images

__all__ = ["launch_of_ones_own", "provider_of_ones_own", "shelves", "subject_that_is_shared"]

# One loop for all: the boxes that tests share, and the provider that holds them, live in it.
pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


# What gVisor does not do as Linux does.
KNOWN = {
    "test_programs_see_a_terminal": "gVisor has /dev/tty, but opens it for nobody",
    "test_devices_are_refused[runsc-socket-/dev/tty]": "gVisor answers EIO for /dev/tty",
    "test_signals_reach_the_foreground": "gVisor's /proc does not tell the foreground group",
    "test_memory": "memory over the limit ends gVisor's kernel, and with it the box",
    "test_a_child_out_of_memory_is_not_the_programs_end": "as test_memory",
    "test_a_memory_hog_does_not_take_the_agent_along": "as test_memory",
    "test_the_agent_answers_during_a_fork_bomb": "to count processes takes gVisor's /proc seconds",
}


class Kind(NamedTuple):
    runtime: str
    transport: str


@pytest.fixture(
    params=[
        Kind("runc", "socket"),
        Kind("runc", "engine"),
        # Its forks take 20 times as long: the limit is for what hangs.
        pytest.param(Kind("runsc", "socket"), marks=pytest.mark.timeout(60)),
    ],
    ids=lambda kind: f"{kind.runtime}-{kind.transport}",
)
def box_kind(request: pytest.FixtureRequest, engine: EngineApi) -> Kind:
    found: Kind = request.param
    if found.runtime != "runc":
        request.getfixturevalue("runsc")
    return found


@pytest.fixture(autouse=True)
def known_deviations(request: pytest.FixtureRequest, box_kind: Kind) -> None:
    names = (request.node.name, request.node.originalname)
    reasons = [KNOWN[name] for name in names if name in KNOWN]
    if box_kind.runtime != "runsc":
        return
    if request.node.originalname == "test_cpus":
        pytest.skip("gVisor tells programs another time than the host's: see test_docker_boxes.py")
    if reasons:
        request.applymarker(pytest.mark.xfail(reason=reasons[0], strict=True))


@pytest.fixture(name="template")
def template_of_an_image(images: Images) -> Template:
    return Template("conformance", image=images.python)


def provider_of(kind: Kind, url: str, where: Path, agent: Path) -> DockerProvider:
    return DockerProvider(
        DockerSettings(
            where,
            where,
            agent,
            host=url,
            runtime=kind.runtime,
            transport=kind.transport,
            patience=PATIENCE,
            pull="never",
        )
    )


@pytest.fixture(scope="session")
def backend(engine: EngineApi) -> EngineApi:
    return engine


@pytest.fixture
def make_provider(box_kind: Kind, docker_url: str, agent_binary: Path) -> MakeProvider:
    return lambda where: provider_of(box_kind, docker_url, where, agent_binary)


@pytest.fixture
def new_provider(box_kind: Kind, docker_url: str, run_dir: Path, agent_binary: Path) -> NewProvider:
    return lambda: provider_of(box_kind, docker_url, run_dir, agent_binary)


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
