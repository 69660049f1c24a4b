"""Which features and limits hold on this host, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from capsule.model import Isolation, Unenforced
from capsule.providers.local import remedies
from capsule.providers.local.cgroups import CONTROLLERS
from capsule.providers.local.probe import Facts


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


def unenforced(facts: Facts, level: Isolation, backing: str) -> Iterable[Unenforced]:
    """The limits that do not hold here as they are meant, whatever the sandbox asks for."""
    groups = facts.cgroups
    fix = remedies.cgroups(facts)
    why = {name: groups.problems.get(name, "no cgroup") for name in CONTROLLERS}
    if not groups.enforces("memory"):
        yield Unenforced(
            "memory",
            "each process is limited; their sum is looked at up to 20 times a second, and at least "
            "once, and what is over is ended. A burst may go over it for that long, and files in "
            "memory that no process has mapped are not seen: where the machine has no more, other "
            f"sandboxes may lose programs ({why['memory']})",
            fix,
        )
    elif backing == "tmpfs":
        yield Unenforced(
            "memory",
            "the disk is memory-backed here, so memory and disk are limited together: their sum "
            "holds, and each process is limited on its own",
            remedies.disk(facts, backing),
        )
    if not groups.enforces("cpu"):
        yield Unenforced("cpus", f"programs are only kept to whole cores: {why['cpu']}", fix)
    if not groups.enforces("pids") and not _counts_by_user(facts, level):
        yield Unenforced(
            "processes",
            f"sandboxes share a uid, and are only counted together: {why['pids']}",
            fix,
        )
    if backing == "dir":
        fix = remedies.disk(facts, backing)
        yield Unenforced("disk", "a plain directory has no quota; single files are limited", fix)
        yield Unenforced("inodes", "a plain directory has no quota", fix)


def _counts_by_user(facts: Facts, level: Isolation) -> bool:
    """RLIMIT_NPROC counts per uid and user namespace: one of them must be the box's own."""
    return level is Isolation.NAMESPACES or facts.uid_ranges


def as_json(unenforced: Iterable[Unenforced]) -> list[dict[str, Any]]:
    return [{"what": each.what, "why": each.why, "fix": each.fix} for each in unenforced]
