"""What this host can do, tried rather than guessed; the reason and the fix for what it cannot."""

from __future__ import annotations

import asyncio
import errno as errnos
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capsule.errors import CapsuleError
from capsule.model import Isolation, Template, Unenforced
from capsule.providers.contract import Capabilities, Finding
from capsule.providers.local import cgroups, programs
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.disk import find_mkfs
from capsule.providers.local.launcher import Launcher
from capsule.providers.local.settings import LocalSettings

PROBES = ("userns", "mounts", "overlay", "landlock", "seccomp", "loop")

LEAST_LANDLOCK = 2  # version 1 forbids every rename between directories
# Where programs share the server's uid, nothing but Landlock keeps them from truncating its user's
# files by path (version 3) and from killing its processes (version 6).
LEAST_SHARED = 6
UID_BASE, UID_COUNT, UID_SLOTS = 268_435_456, 65_536, 57_344


@dataclass(frozen=True, slots=True)
class Try:
    """One thing the launcher tried: whether it worked, and where it stopped."""

    ok: bool
    value: int = 0
    stage: str = ""
    errno: int = 0

    @property
    def why(self) -> str:
        text = os.strerror(self.errno) if self.errno else "refused"
        return f"{self.stage}: {text}" if self.stage else text


@dataclass(frozen=True, slots=True)
class Facts:
    """The host as the provider sees it. Everything that plan.py decides, it decides from this."""

    uid: int
    gid: int
    kernel: str
    tries: Mapping[str, Try]
    cgroups: Cgroups
    mkfs: Path | None
    uid_ranges: bool  # may each box have host uids of its own?
    cpus: tuple[int, ...]
    sysctls: Mapping[str, int]

    def can(self, what: str) -> bool:
        return what in self.tries and self.tries[what].ok

    @property
    def landlock_abi(self) -> int:
        return self.tries["landlock"].value if self.can("landlock") else 0

    @property
    def least_landlock(self) -> int:
        return LEAST_LANDLOCK if self.uid_ranges else LEAST_SHARED

    def allows(self, level: Isolation) -> bool:
        match level:
            case Isolation.NAMESPACES:
                return self.can("userns") and self.can("mounts") and self.can("seccomp")
            case Isolation.LANDLOCK:
                return self.landlock_abi >= self.least_landlock and self.can("seccomp")
        return False

    def strongest(self) -> Isolation:
        levels = (Isolation.NAMESPACES, Isolation.LANDLOCK)
        return next((level for level in levels if self.allows(level)), Isolation.NONE)


async def gather(launcher: Launcher, data_dir: Path) -> Facts:
    answers = await asyncio.gather(*(_try(launcher, what) for what in PROBES))
    prepared = await asyncio.to_thread(_prepare_cgroups)
    tries = dict(zip(PROBES, answers, strict=True))
    facts = await asyncio.to_thread(_facts, tries, prepared)
    place = await asyncio.to_thread(_nearest, data_dir) if facts.uid_ranges else None
    return replace(facts, tries={**tries, "layers": await _try(launcher, "layers", place)})


def _nearest(path: Path) -> Path:
    """Itself, or what it would be made in."""
    return next(p for p in (path, *path.resolve().parents) if p.exists())


async def _try(launcher: Launcher, what: str, path: Path | None = None) -> Try:
    try:
        answer = await launcher.probe(what, path)
    except CapsuleError as exc:
        return Try(False, stage=exc.message)
    number = answer.get("errno")
    return Try(
        ok=answer.get("ok") is True,
        value=int(answer.get("value") or 0),
        stage=str(answer.get("stage") or ""),
        errno=number if isinstance(number, int) and number in errnos.errorcode else 0,
    )


def _prepare_cgroups() -> Cgroups:
    return cgroups.prepare(cgroups.find_here(), os.geteuid())


def _facts(tries: Mapping[str, Try], prepared: Cgroups) -> Facts:
    uid = os.geteuid()
    return Facts(
        uid=uid,
        gid=os.getegid(),
        kernel=os.uname().release,
        tries=tries,
        cgroups=prepared,
        mkfs=find_mkfs(),
        uid_ranges=uid == 0 and _maps_ranges(_read("/proc/self/uid_map")),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        sysctls=dict(_sysctls()),
    )


def _maps_ranges(uid_map: str) -> bool:
    """Whether the uids that boxes are given exist here (not in a user namespace of a few ids)."""
    for line in uid_map.splitlines():
        inside, _, count = (int(word) for word in line.split())
        if inside <= UID_BASE and inside + count >= UID_BASE + UID_SLOTS * UID_COUNT:
            return True
    return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _sysctls() -> Iterable[tuple[str, int]]:
    for name in (
        "kernel.unprivileged_userns_clone",
        "user.max_user_namespaces",
        "kernel.apparmor_restrict_unprivileged_userns",
    ):
        text = _read(f"/proc/sys/{name.replace('.', '/')}").strip()
        if text.isdigit():
            yield name, int(text)


def capabilities(facts: Facts, settings: LocalSettings, backing: str | None) -> Capabilities:
    level = settings.isolation or facts.strongest()
    usable = facts.allows(level) and backing is not None
    findings = (*_levels(facts, settings), *_parts(facts, settings), *_limits(facts, backing))
    return Capabilities(
        provider="local",
        usable=usable,
        isolation=level if usable else Isolation.NONE,
        features=features(facts, level, backing) if usable else frozenset(),
        unenforced=tuple(unenforced(facts, level, backing or "none")),
        findings=(*findings, *_interpreters(settings.templates)),
    )


def adjusts(facts: Facts, level: Isolation, backing: str | None) -> bool:
    """Whether a living box can be given other limits: where its cgroups count all of them, and a
    forker, which only boxes with a range of uids have, holds the rest."""
    counted = all(facts.cgroups.enforces(each) for each in ("memory", "pids", "cpu"))
    ranged = level is Isolation.NAMESPACES and facts.uid_ranges
    return counted and ranged and backing == "loop"


def features(facts: Facts, level: Isolation, backing: str | None) -> frozenset[str]:
    found = set()
    if adjusts(facts, level, backing):
        found.add("adjust")
    if level is Isolation.NAMESPACES or facts.cgroups.freezes:
        found.add("pause")  # without a freezer pid 1 stops everybody in its namespace
    if level is Isolation.NAMESPACES and facts.can("layers"):
        found.update(("snapshot", "volume"))
        if facts.uid_ranges and facts.can("loop") and facts.mkfs is not None:
            found.add("volume_size")
    return frozenset(found)


def _levels(facts: Facts, settings: LocalSettings) -> Iterable[Finding]:
    forced = (
        f" (forced by the isolation setting: {settings.isolation})" if settings.isolation else ""
    )
    yield Finding("kernel", True, f"Linux {facts.kernel}, uid {facts.uid}{forced}")
    ok = facts.allows(Isolation.NAMESPACES)
    missing = [w for w in ("userns", "mounts", "seccomp") if not facts.can(w)]
    detail = "user, pid, mount, net, ipc, uts and cgroup namespaces with seccomp"
    if missing:
        detail = "; ".join(f"{w}: {facts.tries[w].why}" for w in missing)
    yield Finding("level namespaces", ok, detail, "" if ok else _userns_fix(facts))
    ok = facts.allows(Isolation.LANDLOCK)
    yield Finding(
        "level landlock",
        ok,
        f"Landlock version {facts.landlock_abi} with seccomp" if ok else _landlock_why(facts),
        "" if ok else _landlock_fix(facts),
    )


def _landlock_fix(facts: Facts) -> str:
    if facts.landlock_abi >= LEAST_LANDLOCK:
        return "run the server as root, or use a kernel from 6.12 on"
    since = "5.19" if facts.uid_ranges else "6.12"
    return f"use a kernel from {since} on with CONFIG_SECURITY_LANDLOCK and lsm=landlock"


def _landlock_why(facts: Facts) -> str:
    if not facts.can("seccomp"):
        return f"seccomp: {facts.tries['seccomp'].why}"
    if facts.landlock_abi:
        needed = f"{facts.least_landlock} is needed"
        needed += "" if facts.uid_ranges else " where programs share the server's uid"
        return f"Landlock version {facts.landlock_abi} is too old: {needed}"
    return f"the kernel offers no Landlock: {facts.tries['landlock'].why}"


def _userns_fix(facts: Facts) -> str:
    if facts.sysctls.get("user.max_user_namespaces") == 0:
        return "sysctl -w user.max_user_namespaces=15000"
    if facts.sysctls.get("kernel.unprivileged_userns_clone") == 0 and facts.uid:
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if facts.sysctls.get("kernel.apparmor_restrict_unprivileged_userns") == 1 and facts.uid:
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if facts.can("userns"):
        return "in a container, unmask its /proc (Docker: --security-opt systempaths=unconfined)"
    return "run outside a container, or let its seccomp profile allow unshare and mount"


def _parts(facts: Facts, settings: LocalSettings) -> Iterable[Finding]:
    yield _tried(
        facts, "seccomp", "system calls are filtered", "use a kernel with CONFIG_SECCOMP_FILTER"
    )
    abi = facts.landlock_abi
    yield Finding(
        "landlock",
        abi >= LEAST_LANDLOCK,
        f"version {abi}" if abi else _landlock_why(facts),
        "" if abi >= LEAST_LANDLOCK else "boot with lsm=landlock,… on a kernel from 5.19 on",
    )
    yield Finding(
        "uid ranges",
        facts.uid_ranges,
        "each sandbox has host uids of its own"
        if facts.uid_ranges
        else "sandboxes share one uid on the host",
        "" if facts.uid_ranges else "run the server as root, outside a user namespace",
    )
    yield _tried(
        facts, "overlay", "templates may start from an image or a directory",
        "use a kernel from 5.11 on, or run the server as root",
    )  # fmt: skip
    yield _tried(
        facts, "layers", "snapshots and forks of a sandbox's files",
        "as root: a kernel from 5.19 on, data_dir on ext4, xfs or btrfs; else a kernel from 6.6 on",
    )  # fmt: skip
    built = os.access(settings.agent, os.X_OK)
    yield Finding("agent", built, str(settings.agent), "" if built else "build it: make agent")


def _tried(facts: Facts, what: str, fine: str, fix: str) -> Finding:
    ok = facts.can(what)
    return Finding(what, ok, fine if ok else facts.tries[what].why, "" if ok else fix)


def _limits(facts: Facts, backing: str | None) -> Iterable[Finding]:
    groups = facts.cgroups
    detail = (
        f"version {groups.version}: {', '.join(groups.bases)}" if groups.bases else "none usable"
    )
    if groups.problems:
        detail += "; " + "; ".join(sorted(set(groups.problems.values())))
    yield Finding("cgroups", not groups.problems, detail, groups.fix)
    kinds = {
        "loop": "an ext4 image per sandbox, on the host's disk",
        "tmpfs": "memory-backed and sized",
        "dir": "a plain directory, without a quota",
    }
    fixes = {
        "loop": "",
        "tmpfs": "run the server as root with e2fsprogs installed and loop devices allowed",
        "dir": "let the server use namespaces: see above",
    }
    detail = kinds.get(backing or "", "none usable")
    yield Finding("disk", backing == "loop", detail, fixes.get(backing or "", fixes["tmpfs"]))


def _interpreters(templates: Iterable[Template]) -> Iterable[Finding]:
    for template in (each for each in templates if each.root == "host"):
        missing = programs.missing_on_host(template)
        has = f"has {', '.join(template.needs)}" if template.needs else "needs nothing"
        yield Finding(
            f"template {template.name}",
            not missing,
            f"missing on this host: {', '.join(missing)}" if missing else has,
            f"install {', '.join(missing)} below /usr" if missing else "",
        )


def unenforced(facts: Facts, level: Isolation, backing: str) -> Iterable[Unenforced]:
    """The limits that do not hold here as they are meant, whatever the sandbox asks for."""
    groups = facts.cgroups
    why = {name: groups.problems.get(name, "no cgroup") for name in cgroups.CONTROLLERS}
    if not groups.enforces("memory"):
        yield Unenforced(
            "memory",
            f"each process is limited, but not their sum: {why['memory']}",
            groups.fix,
        )
    elif backing == "tmpfs":
        yield Unenforced(
            "memory",
            "the disk is memory-backed here, so memory and disk are limited together: their sum "
            "holds, and each process is limited on its own",
            "run the server as root with e2fsprogs installed, so that disks are images",
        )
    if not groups.enforces("cpu"):
        yield Unenforced("cpus", f"programs are only kept to whole cores: {why['cpu']}", groups.fix)
    if not groups.enforces("pids") and not _counts_by_user(facts, level):
        yield Unenforced(
            "processes",
            f"sandboxes share a uid, and are only counted together: {why['pids']}",
            groups.fix,
        )
    if backing == "dir":
        fix = "allow namespaces (see `capsule doctor`)"
        yield Unenforced("disk", "a plain directory has no quota; single files are limited", fix)
        yield Unenforced("inodes", "a plain directory has no quota", fix)


def _counts_by_user(facts: Facts, level: Isolation) -> bool:
    """RLIMIT_NPROC counts per uid and user namespace: one of them must be the box's own."""
    return level is Isolation.NAMESPACES or facts.uid_ranges


def as_json(unenforced: Iterable[Unenforced]) -> list[dict[str, Any]]:
    return [{"what": each.what, "why": each.why, "fix": each.fix} for each in unenforced]
