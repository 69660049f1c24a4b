"""What an Engine can do, as it says itself; the reason and the fix for what it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from capsule.errors import NotSupportedError
from capsule.model import Isolation, Unenforced
from capsule.providers.contract import Capabilities, Finding
from capsule.providers.docker.address import Address
from capsule.providers.docker.settings import DockerSettings

# runsc's values of --host-uds under which a socket bound inside can be reached from outside.
_SOCKETS_OUT = frozenset({"all", "create"})


@dataclass(frozen=True, slots=True)
class Runtime:
    """An OCI runtime of the Engine's."""

    name: str
    gvisor: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def isolation(self) -> Isolation:
        return Isolation.GVISOR if self.gvisor else Isolation.CONTAINER

    @property
    def lets_sockets_out(self) -> bool:
        return not self.gvisor or self._flag("host-uds") in _SOCKETS_OUT

    def _flag(self, name: str) -> str:
        """The last value of --name=value among its arguments, as runsc reads them."""
        words = [word.lstrip("-").partition("=") for word in self.arguments]
        values = [value for key, _, value in words if key == name]
        return values[-1] if values else ""

    def findings(self) -> Iterable[Finding]:
        if not self.gvisor:
            return
        yield Finding(
            f"runtime {self.name}: host-uds",
            self.lets_sockets_out,
            "agents are reached by their own sockets"
            if self.lets_sockets_out
            else "agents are reached through the Engine, which is slower",
            "" if self.lets_sockets_out else _flag_fix(self.name, "--host-uds=all"),
        )
        offline = self._flag("network") in ("none", "")
        yield Finding(
            f"runtime {self.name}: network",
            offline,
            "sandboxes have no network in any case" if offline else "it may use the host's network",
            "" if offline else _flag_fix(self.name, "--network=none"),
        )


def _flag_fix(name: str, flag: str) -> str:
    return f'add "{flag}" to runtimes.{name}.runtimeArgs in /etc/docker/daemon.json'


@dataclass(frozen=True, slots=True)
class Facts:
    """The Engine as the provider sees it. What plan.py decides, it decides from this."""

    version: str
    api: str
    kind: str  # Docker or Podman
    arch: str  # as uname says it
    cpus: int
    cgroups: int  # 1 or 2; 0: none
    limits: frozenset[str]  # of memory, cpus, processes: what it can enforce
    runtimes: Mapping[str, Runtime]
    default_runtime: str
    rootless: bool
    remapped: bool  # containers' users are mapped to others
    live_restore: bool
    shares_root: bool  # root of a container is our own uid on this host

    def runtime(self, name: str | None) -> Runtime:
        wanted = name or self.default_runtime
        found = self.runtimes.get(wanted)
        if found is None:
            raise NotSupportedError(
                f"the Docker Engine has no runtime {wanted!r}",
                hint=f"it has {', '.join(sorted(self.runtimes))}; "
                "others are added in /etc/docker/daemon.json",
                field="runtime",
            )
        return found


def facts(version: Mapping[str, Any], info: Mapping[str, Any], address: Address) -> Facts:
    """Looks at the owner of the Engine's socket. What an Engine does not tell, it has not."""
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    rootless = any(option.startswith("name=rootless") for option in options)
    remapped = any(option.startswith("name=userns") for option in options)
    # Docker Desktop has a socket here, and runs in a machine of its own.
    elsewhere = "docker desktop" in str(info.get("OperatingSystem")).lower()
    components = [str(part.get("Name")) for part in version.get("Components") or ()]
    return Facts(
        version=str(info.get("ServerVersion") or version.get("Version") or "unknown"),
        api=str(version.get("ApiVersion")),
        kind="Podman" if any("Podman" in name for name in components) else "Docker",
        arch=str(info.get("Architecture") or version.get("Arch") or ""),
        cpus=max(int(info.get("NCPU") or 0), 1),
        cgroups=int(info.get("CgroupVersion") or 0),
        limits=_limits(info),
        runtimes=_runtimes(info.get("Runtimes") or {}),
        default_runtime=str(info.get("DefaultRuntime") or "runc"),
        rootless=rootless,
        remapped=remapped,
        live_restore=bool(info.get("LiveRestoreEnabled")),
        shares_root=not remapped and not elsewhere and _same_root(address, rootless),
    )


def _limits(info: Mapping[str, Any]) -> frozenset[str]:
    fields = {"memory": "MemoryLimit", "cpus": "CpuCfsQuota", "processes": "PidsLimit"}
    # An Engine that leaves a field out is one that does not know the question.
    return frozenset(limit for limit, field in fields.items() if info.get(field, True))


def _runtimes(told: Mapping[str, Any]) -> dict[str, Runtime]:
    return {name: _runtime(name, about or {}) for name, about in told.items()}


def _runtime(name: str, about: Mapping[str, Any]) -> Runtime:
    program = PurePosixPath(str(about.get("path") or about.get("runtimeType") or name)).name
    return Runtime(
        name,
        gvisor="runsc" in program or "gvisor" in program or name.startswith("runsc"),
        arguments=tuple(str(word) for word in about.get("runtimeArgs") or ()),
    )


def _same_root(address: Address, rootless: bool) -> bool:
    """A box's folder is closed to all but its owner: the container's root must be just that."""
    if address.socket is None:
        return False
    if not rootless:
        return os.geteuid() == 0
    try:
        return os.stat(address.socket).st_uid == os.geteuid()
    except OSError:
        return False


_MACHINES = {62: "x86_64", 183: "aarch64"}  # in the header of a program, by the ELF standard


def check_agent(agent: Path, found: Facts) -> None:
    """Raises NotSupportedError when the Engine's machines cannot run it. Reads the file."""
    with agent.open("rb") as file:
        header = file.read(20)
    built = _MACHINES.get(int.from_bytes(header[18:20], "little"), "another machine")
    theirs = {"amd64": "x86_64", "arm64": "aarch64"}.get(found.arch, found.arch)
    if theirs and built != theirs:
        raise NotSupportedError(
            f"the Docker Engine runs on {theirs}, and the agent is built for {built}",
            hint="let CAPSULE_AGENT name a capsule-agent for it",
        )


FEATURES = frozenset({"adjust", "pause", "snapshot", "volume"})


def capabilities(
    found: Facts,
    settings: DockerSettings,
    *,
    transports: Mapping[str, str],
    diskless: str,
    sized: bool,
    images: list[Finding],
) -> Capabilities:
    """`transports` by runtime; `diskless`: why a box of the default runtime has no disk; `sized`:
    whether volumes are held to a size."""
    name = settings.runtime or found.default_runtime
    runtime = found.runtimes.get(name)
    return Capabilities(
        provider="docker",
        usable=runtime is not None,
        isolation=runtime.isolation if runtime else Isolation.NONE,
        features=FEATURES | ({"volume_size"} if sized else frozenset()),
        unenforced=tuple(unenforced(found, runtime, disk=not diskless)) if runtime else (),
        findings=(*_findings(found, name, transports), _disk(diskless), *images),
    )


def _findings(found: Facts, name: str, transports: Mapping[str, str]) -> Iterable[Finding]:
    mode = ", rootless" if found.rootless else ", user namespaces" if found.remapped else ""
    yield Finding("engine", True, f"{found.kind} {found.version}, API {found.api}{mode}")
    known = name in found.runtimes
    yield Finding(
        "runtime",
        known,
        f"{name}; there are {', '.join(sorted(found.runtimes))}",
        "" if known else f"install {name}, and name it in /etc/docker/daemon.json",
    )
    gvisor = [runtime for runtime in found.runtimes.values() if runtime.gvisor]
    yield Finding(
        "gvisor",
        bool(gvisor),
        f"runtime {', '.join(r.name for r in gvisor)}" if gvisor else "the Engine has no runsc",
        "" if gvisor else "install runsc, then `runsc install` and restart the Engine",
    )
    for runtime in gvisor:
        yield from runtime.findings()
    if name in transports:
        yield Finding("transport", True, transports[name])
    missing = sorted({"memory", "cpus", "processes"} - found.limits)
    yield Finding(
        "cgroups",
        not missing,
        f"version {found.cgroups}" if not missing else f"no limit on {', '.join(missing)}",
        "" if not missing else _cgroup_fix(found),
    )
    yield Finding(
        "live-restore",
        found.live_restore,
        "sandboxes go on while the Engine restarts"
        if found.live_restore
        else "a restart of the Engine ends its sandboxes",
        "" if found.live_restore else 'set "live-restore": true in /etc/docker/daemon.json',
    )


def _disk(diskless: str) -> Finding:
    if not diskless:
        return Finding("disk", True, "an ext4 image per sandbox, on the host's disk")
    return Finding(
        "disk",
        False,
        f"memory-backed and sized, and counted as the sandbox's memory: {diskless}",
        "run the server as root beside the Engine, with e2fsprogs and loop devices",
    )


def _cgroup_fix(found: Facts) -> str:
    if found.rootless:
        return "use cgroup version 2 and delegate memory, cpu and pids to the Engine's user"
    return "boot with these controllers enabled (cgroup_enable=memory)"


def unenforced(found: Facts, runtime: Runtime, *, disk: bool) -> Iterable[Unenforced]:
    """The limits that do not hold here as they are meant, whatever the sandbox asks for."""
    fix = _cgroup_fix(found)
    if "memory" not in found.limits:
        yield Unenforced("memory", "each process is limited, but not their sum: no cgroup", fix)
    elif not disk:
        yield Unenforced(
            "memory",
            "the disk is memory-backed here, so memory and disk are limited together: their sum "
            "holds, and each process is limited on its own",
            "run the server as root beside the Engine, so that disks are images",
        )
    if "cpus" not in found.limits:
        yield Unenforced("cpus", "programs are only kept to whole cores: no cgroup", fix)
    if "processes" not in found.limits and not runtime.gvisor:
        yield Unenforced("processes", "the Engine cannot count them: no cgroup", fix)
    if runtime.gvisor and not disk:
        yield Unenforced(
            "inodes",
            "gVisor's file systems have no limit on the number of files; what they take counts as "
            "memory",
            "use runc for sandboxes that need it",
        )
    elif found.kind == "Podman" and not disk:
        yield Unenforced(
            "inodes",
            "Podman gives memory-backed disks no limit on the number of files",
            "run the server as root beside it, so that disks are images",
        )


def as_json(gaps: Iterable[Unenforced]) -> list[dict[str, Any]]:
    return [{"what": each.what, "why": each.why, "fix": each.fix} for each in gaps]
