"""A server whose sandboxes are containers, and what there is of them: the Engine's word, the
kernel's and the store's.

    async with containers(nursery, docker) as machine:
        …

asks the same questions at its end as `machine.running`, of the Engine instead of the launcher.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.footprint import (
    SETTLED,
    Footprint,
    differing,
    look,
    names_in,
    processes,
    records_of,
)
from tests.faults.machine import Machine, checked, machine
from tests.support.engine import Engine, EngineError
from tests.support.images import Images
from tests.support.nursery import Nursery

TRANSPORTS = ["socket", "engine"]
ALIVE = ("running", "paused")
AGENT = "capsule-agent-"  # a volume that stays, for the next box
# What only makes a test wait: until something is tried again, and a connection is not kept.
SOONER = {
    "capsule.service.sandboxes:RETRY": 1.0,
    "capsule.service.reaper:RETRY": 1.0,
    "capsule.providers.docker.engine:_KEPT": 0.2,
}
TEMPLATE = """\
override: true
image: {image}
languages:
  sh: {{file: "{{id}}.sh", command: [sh, "{{file}}"]}}
shell: [/bin/sh]
limits: {{memory: 64MiB, disk: 16MiB}}
"""


@dataclass(slots=True)
class Containers(Footprint):
    """What a server has on its Engine, which nobody else uses, beside what it has on the host."""

    local: Footprint = field(default_factory=Footprint)
    containers: dict[str, str] = field(default_factory=dict)  # id of the sandbox → state
    volumes: set[str] = field(default_factory=set)
    transport: str = "socket"

    def differences(self, *, serving: bool = True) -> list[str]:
        local = self.local
        found = local.differences(serving=serving and bool(local.launchers))
        disks = len(self.rows) + len(local.launchers)  # each may hold one for the next box
        found += [f"loop device: {name}" for name in self.loops[disks:]]
        rows = {id: state for id, state in self.rows.items() if id not in local.rows}
        live = {id for id, state in rows.items() if state != "failed"}
        found += [f"{id} is still {state}" for id, state in rows.items() if state not in SETTLED]
        found += differing("containers", set(self.containers), live)
        dead = {id: state for id, state in self.containers.items() if state not in ALIVE}
        found += [f"container of {id} is {state}" for id, state in dead.items()]
        found += differing("folders", self.folders, live if self.transport == "socket" else set())
        for controller, ids in self.cgroups.items():
            found += differing(f"{controller} cgroups", ids, live)
        found += [f"volume: {name}" for name in self.volumes if not name.startswith(AGENT)]
        found += [f"zombie: {process}" for process in self.zombies]
        return found


class DockerMachine(Machine):
    """`docker` has no other user. Its images are those of the tests, by way of `template`."""

    def __init__(self, nursery: Nursery, base: Path, docker: Engine, **settings: str) -> None:
        self.docker = docker
        self.transport = settings.get("DOCKER_TRANSPORT", "socket")
        named = {
            "PROVIDER": "docker",
            "DOCKER_HOST": docker.url,
            "DOCKER_PULL": "never",
            "DOCKER_TRANSPORT": self.transport,
            "TEMPLATES_DIR": str(base / "templates"),
            **settings,
        }
        super().__init__(nursery, base, **named)
        self.how = {"replace": SOONER}
        (base / "templates").mkdir()
        self.template("shell", Images(docker.api).alpine)

    def template(self, name: str, image: str) -> None:
        (self.base / "templates" / f"{name}.yaml").write_text(TEMPLATE.format(image=image))

    def footprint(self) -> Footprint:
        listed = self.docker.api.containers("capsule.owner")
        ids = {each["Id"]: each["Labels"]["capsule.id"] for each in listed}
        inside = frozenset(pid for pid in processes() if self._runs(pid))
        serving = self.pid if self.code() is None else None
        ignored = self.not_ours() | inside
        local = look(self.base, server=serving, ignored=ignored, since=self.since)
        ours = docker_rows(self.base)
        seen = Containers(rows=local.rows, transport=self.transport, local=local)
        local.rows = {id: state for id, state in local.rows.items() if id not in ours}
        seen.loops, local.loops = local.loops, []
        seen.containers = {ids[each["Id"]]: each["State"] for each in listed}
        seen.folders = set(names_in(self.base / "run/docker"))
        seen.cgroups = dict(self._cgroups(ids))
        seen.volumes = {each["Name"] for each in self.docker.api.get("/volumes")["Volumes"] or ()}
        zombies = [p for p in processes().values() if p.state == "Z" and self._runs(p.pid)]
        seen.zombies = zombies
        return seen

    def _cgroups(self, ids: dict[str, str]) -> Iterator[tuple[str, set[str]]]:
        """Whose containers have one, by controller."""
        for parent in _groups(self.docker):
            yield parent.parent.name, {ids.get(name, name) for name in _folders_in(parent)}

    def _runs(self, pid: int) -> bool:
        """In one of the Engine's containers."""
        with suppress(OSError):
            return self.docker.folder.name in Path(f"/proc/{pid}/cgroup").read_text()
        return False

    def container(self, id: str) -> str:
        """Of a sandbox."""
        (found,) = self.docker.api.containers(f"capsule.id={id}")
        return str(found["Id"])

    def pid_of(self, id: str) -> int:
        """The box's pid 1, on the host."""
        state = self.docker.api.get(f"/containers/{self.container(id)}/json")["State"]
        return int(state["Pid"])

    def relays(self, id: str) -> set[int]:
        """What the Engine started beside a sandbox's agent."""
        members, running = _members(self.docker, self.container(id)), processes()
        outsiders = {
            pid for pid in members if pid in running and running[pid].parent not in members
        }
        return outsiders - {self.pid_of(id)}


def docker_rows(base: Path) -> set[str]:
    """The sandboxes in the store that are containers."""
    return {id for id, _, body in records_of(base) if body["provider"] == "docker"}


def _folders_in(parent: Path) -> list[str]:
    return [each.name for each in parent.iterdir() if each.is_dir()]


def _groups(docker: Engine) -> list[Path]:
    """The cgroup of an Engine, in every hierarchy."""
    base, name = Path("/sys/fs/cgroup"), docker.folder.name
    return [*base.glob(name), *base.glob(f"*/{name}")]


def _members(docker: Engine, container: str) -> list[int]:
    file = _groups(docker)[0] / container / "cgroup.procs"
    return [int(pid) for pid in file.read_text().split()]


@asynccontextmanager
async def containers(
    nursery: Nursery, docker: Engine, **settings: str
) -> AsyncIterator[DockerMachine]:
    """A server on `docker`, which has nothing of it left at the end."""
    async with unstarted(nursery, docker, **settings) as made, checked(made):
        yield made


@asynccontextmanager
async def unstarted(
    nursery: Nursery, docker: Engine, **settings: str
) -> AsyncIterator[DockerMachine]:
    def make(nursery: Nursery, base: Path, **named: str) -> DockerMachine:
        return DockerMachine(nursery, base, docker, **named)

    async with machine(nursery, make, **settings) as made:
        assert isinstance(made, DockerMachine)
        try:
            yield made
        finally:
            for each in docker.api.containers("capsule.owner") if docker.api.answers() else ():
                with suppress(EngineError):
                    docker.api.remove(each["Id"])
