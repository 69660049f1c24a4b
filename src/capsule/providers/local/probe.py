"""What this host can do, tried rather than guessed; the reason and the fix for what it cannot."""

from __future__ import annotations

import asyncio
import errno as errnos
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from capsule import surroundings
from capsule.errors import CapsuleError
from capsule.model import Isolation
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.disk import find_mkfs
from capsule.providers.local.launcher import Launcher
from capsule.surroundings import Surroundings

PROBES = ("userns", "mounts", "overlay", "landlock", "seccomp", "loop")

LEAST_LANDLOCK = 2  # version 1 forbids every rename between directories
# Where programs share the server's uid, nothing but Landlock keeps them from truncating its user's
# files by path (version 3) and from killing its processes (version 6).
LEAST_SHARED = 6
UID_BASE, UID_COUNT, UID_SLOTS = 268_435_456, 65_536, 57_344
# To give a box uids of its own, and to end programs that have them.
CAPABILITIES = {"CHOWN": 0, "KILL": 5, "SETGID": 6, "SETUID": 7}


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
class Trial:
    """What trial sandboxes of a level showed."""

    ok: bool
    failures: tuple[str, ...] = ()  # of the ways that were tried first


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
    lacking: tuple[str, ...] = ()  # capabilities that root has elsewhere
    context: tuple[str, ...] = ()  # what else decides what this process may do
    trials: Mapping[Isolation, Trial] = field(default_factory=dict)
    around: Surroundings = field(default_factory=Surroundings)

    def can(self, what: str) -> bool:
        return what in self.tries and self.tries[what].ok

    @property
    def landlock_abi(self) -> int:
        return self.tries["landlock"].value if self.can("landlock") else 0

    @property
    def least_landlock(self) -> int:
        return LEAST_LANDLOCK if self.uid_ranges else LEAST_SHARED

    def allows(self, level: Isolation) -> bool:
        if level in self.trials:
            return self.trials[level].ok
        match level:
            case Isolation.NAMESPACES:
                return self.can("userns") and self.can("mounts") and self.can("seccomp")
            case Isolation.LANDLOCK:
                return self.landlock_abi >= self.least_landlock and self.can("seccomp")
        return False

    def strongest(self) -> Isolation:
        levels = (Isolation.NAMESPACES, Isolation.LANDLOCK)
        return next((level for level in levels if self.allows(level)), Isolation.NONE)


async def gather(launcher: Launcher, data_dir: Path, prepared: Cgroups) -> Facts:
    answers = await asyncio.gather(*(_try(launcher, what) for what in PROBES))
    tries = dict(zip(PROBES, answers, strict=True))
    facts = await asyncio.to_thread(_facts, tries, prepared)
    return await look_at_layers(launcher, facts, data_dir)


async def look_at_layers(launcher: Launcher, facts: Facts, data_dir: Path) -> Facts:
    """How layers are mounted depends on who the programs of a box are."""
    place = await asyncio.to_thread(_nearest, data_dir) if facts.uid_ranges else None
    layers = await _try(launcher, "layers", place)
    return replace(facts, tries={**facts.tries, "layers": layers})


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


def _facts(tries: Mapping[str, Try], prepared: Cgroups) -> Facts:
    uid = os.geteuid()
    status = dict(line.split(":\t", 1) for line in _read("/proc/self/status").splitlines())
    lacking = _lacking(status.get("CapEff", "")) if uid == 0 else ()
    return Facts(
        uid=uid,
        gid=os.getegid(),
        kernel=os.uname().release,
        tries=tries,
        cgroups=prepared,
        mkfs=find_mkfs(),
        uid_ranges=uid == 0 and not lacking and _maps_ranges(_read("/proc/self/uid_map")),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        sysctls=dict(_sysctls()),
        lacking=lacking,
        context=_context(status),
        around=surroundings.find(),
    )


def _lacking(effective: str) -> tuple[str, ...]:
    have = int(effective or "0", 16)
    return tuple(name for name, number in CAPABILITIES.items() if not have >> number & 1)


def _context(status: Mapping[str, str]) -> tuple[str, ...]:
    """Another boot, container, capability or security profile allows other things."""
    words = [
        status.get(name, "")
        for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters")
    ]
    words += [_read("/proc/sys/kernel/random/boot_id"), _read("/proc/self/attr/current")]
    for name in ("mnt", "user"):
        try:
            words.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            words.append("")
    return tuple(words)


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
