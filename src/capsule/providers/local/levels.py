"""Which isolation level this host allows: the strongest at which a trial sandbox works.

What the kernel grants to single calls (probe.py) is not enough. A container may allow mounts and
refuse pivot_root, or lack the capability to end programs of another user. So a box is made, writes
a file, runs a program and ends it, as this user, with these capabilities and settings. What fails
is the reason for the next weaker way. Outcomes are kept in data_dir until one of these changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import structlog

from capsule.config_checks import nearest
from capsule.errors import CapacityError, CapsuleError, NoSpaceError
from capsule.link.conversation import SilentError
from capsule.model import Isolation
from capsule.providers.local.disk import choose_backing
from capsule.providers.local.probe import Facts, Trial, Try
from capsule.providers.local.settings import LocalSettings

log = structlog.get_logger(__name__)

LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK)
FILE = "levels.json"
VERSION = 1  # of the trial: a new one makes kept outcomes void
MOST_KEPT = 8  # machines, containers and users that share one data directory


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make boxes."""

    level: Isolation
    uid_ranges: bool
    backing: str


# Makes a box this way, and returns what failed. Raises for settings that no level can meet.
Attempt = Callable[[Way], Awaitable[CapsuleError | None]]


def ways(facts: Facts, settings: LocalSettings) -> Iterator[Way]:
    """All that the probe leaves open, strongest first."""
    for level in (settings.isolation,) if settings.isolation else LEVELS:
        for ranged in (True, False) if facts.uid_ranges else (False,):
            if not replace(facts, uid_ranges=ranged).allows(level):
                continue
            loop, mkfs = facts.can("loop"), facts.mkfs is not None
            best = choose_backing(level, settings.disk_backing, loop=loop, mkfs=mkfs)
            yield Way(level, ranged, best)
            if best == "loop" and settings.disk_backing == "auto":
                yield Way(level, ranged, "tmpfs")


async def settle(
    facts: Facts, settings: LocalSettings, attempt: Attempt, *, every_level: bool = False
) -> tuple[Facts, Way | None]:
    """The facts as trials left them, and the strongest way that works.

    `every_level`: for a report: try them all, whatever earlier trials showed.
    """
    kept = await asyncio.to_thread(_Outcomes, facts, settings, fresh=every_level)
    trials: dict[Isolation, Trial] = {}
    chosen: Way | None = None
    for way in ways(facts, settings):
        known = trials.get(way.level)
        if (known and known.ok) or (chosen and not every_level):
            continue
        failure = await kept.of(way, attempt)
        failures = known.failures if known else ()
        if failure is None:
            chosen = chosen or way
            trials[way.level] = Trial(True, failures)
        else:
            trials[way.level] = Trial(False, (*failures, failure))
    await asyncio.to_thread(kept.write)
    settled = replace(facts, trials=trials)
    if chosen is None:
        return settled, None
    tries = dict(facts.tries)
    if failures := trials[chosen.level].failures:
        refused = Try(False, stage=failures[0])
        if facts.uid_ranges and not chosen.uid_ranges:
            tries["uid ranges"] = refused
        if chosen.backing != "loop" and settings.disk_backing == "auto":
            tries["loop"] = refused
    return replace(settled, uid_ranges=chosen.uid_ranges, tries=tries), chosen


class _Outcomes:
    """What trials showed earlier on this machine, for this user and these settings."""

    def __init__(self, facts: Facts, settings: LocalSettings, *, fresh: bool) -> None:
        self._path = settings.data_dir / FILE
        self._key = _key(facts, settings)
        self._kept = _read(self._path)
        self._fresh = fresh
        self._known = {} if fresh else dict(self._kept.get(self._key, {}))
        self._changed = False

    async def of(self, way: Way, attempt: Attempt) -> str | None:
        """Why boxes cannot be made this way; None where they can."""
        name = json.dumps(asdict(way), sort_keys=True)
        if name not in self._known:
            error = await attempt(way)
            if error is not None and _says_nothing(error):
                log.warning("the isolation level could not be tried", reason=error.message)
                return None
            failure = None
            if error is not None:
                failure = error.message.removeprefix("the sandbox could not be started: ")
                if "stage" not in error.details:
                    return failure  # of this start: it may be an accident
            self._known[name] = failure
            self._changed = True
        return self._known[name]

    def write(self) -> None:
        """Without it the next start tries again."""
        if self._fresh or not self._changed:
            return
        others = [(key, known) for key, known in self._kept.items() if key != self._key]
        kept = dict([*others[-MOST_KEPT + 1 :], (self._key, self._known)])
        draft = self._path.with_name(f".{FILE}-{secrets.token_hex(4)}")
        with suppress(OSError):
            draft.write_text(json.dumps(kept))
            os.replace(draft, self._path)
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _says_nothing(error: CapsuleError) -> bool:
    """The host is full or slow just now, whatever the level."""
    return isinstance(error, CapacityError | NoSpaceError | SilentError)


def _read(path: Path) -> dict[str, dict[str, str | None]]:
    with suppress(OSError, msgspec.MsgspecError):
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str | None]])
    return {}


def _key(facts: Facts, settings: LocalSettings) -> str:
    """Of everything that could change an outcome."""
    about = [
        VERSION,
        facts.kernel,
        facts.context,
        facts.uid,
        facts.gid,
        facts.uid_ranges,
        {name: [each.ok, each.errno] for name, each in facts.tries.items()},
        facts.landlock_abi,
        facts.cgroups.version,
        sorted(facts.cgroups.bases),
        dict(facts.sysctls),
        settings.isolation,
        settings.disk_backing,
        str(settings.data_dir),
        str(settings.agent),
    ]
    with suppress(OSError):
        stat = settings.agent.stat()
        about += [stat.st_size, stat.st_mtime_ns]
    about += [nearest(path).stat().st_dev for path in (settings.data_dir, settings.run_dir)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
