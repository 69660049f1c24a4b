"""What `capsule doctor` shows of the local provider: each fact, and the fix for what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable

from capsule.model import Isolation, Template, Unenforced
from capsule.providers.contract import Capabilities, Finding
from capsule.providers.local import enforcement, exposed_files, programs, remedies
from capsule.providers.local.probe import LEAST_LANDLOCK, Facts
from capsule.providers.local.scope import SYSTEMD, lingers, user_name
from capsule.providers.local.settings import LocalSettings
from capsule.surroundings import Kind


def capabilities(
    facts: Facts, settings: LocalSettings, backing: str | None, *, thorough: bool = False
) -> Capabilities:
    """`thorough`: also what takes seconds to find out, and changes nothing."""
    level = settings.isolation or facts.strongest()
    usable = facts.allows(level) and backing is not None
    gaps = tuple(enforcement.unenforced(facts, level, backing or "none"))
    findings = (*_levels(facts, settings), *_parts(facts, settings), *_limits(facts, backing))
    if thorough and not facts.uid_ranges:
        gids = {facts.gid, *os.getgroups()}
        findings = (*findings, exposed_files.finding(facts.uid, gids))
    return Capabilities(
        provider="local",
        usable=usable,
        isolation=level if usable else Isolation.NONE,
        features=enforcement.features(facts, level, backing) if usable else frozenset(),
        unenforced=gaps,
        findings=(*findings, *_interpreters(settings.templates)),
        warnings=tuple(_warnings(facts, gaps)),
    )


def _warnings(facts: Facts, gaps: Iterable[Unenforced]) -> Iterable[str]:
    groups = facts.cgroups
    why = "; ".join(sorted(set(groups.problems.values())))
    if groups.scope is not None and not groups.scope.own:
        why = f"systemd gave no scope for sandboxes: {groups.scope.why}"
    if groups.problems:
        limits = ", ".join(each.what for each in gaps)
        yield f"not enforced as meant: {limits}; {why}; fix: {remedies.cgroups(facts)}"
    elif why:
        yield why
    if facts.uid and groups.version == 2 and SYSTEMD.is_dir() and not lingers(facts.uid):
        user = user_name(facts.uid)
        yield f"sandboxes end at the last logout of {user}; fix: loginctl enable-linger {user}"


def _levels(facts: Facts, settings: LocalSettings) -> Iterable[Finding]:
    forced = (
        f" (forced by the isolation setting: {settings.isolation})" if settings.isolation else ""
    )
    yield Finding("kernel", True, f"Linux {facts.kernel}, uid {facts.uid}{forced}")
    if facts.around.kind is not Kind.MACHINE:
        yield Finding("surroundings", True, str(facts.around))
    ok = facts.allows(Isolation.NAMESPACES)
    missing = [w for w in ("userns", "mounts", "seccomp") if not facts.can(w)]
    detail = "user, pid, mount, net, ipc, uts and cgroup namespaces with seccomp"
    if missing:
        detail = "; ".join(f"{w}: {facts.tries[w].why}" for w in missing)
    elif not ok:
        detail = _failures(facts, Isolation.NAMESPACES)
    yield Finding("level namespaces", ok, detail, "" if ok else remedies.namespaces(facts))
    ok = facts.allows(Isolation.LANDLOCK)
    yield Finding(
        "level landlock",
        ok,
        f"Landlock version {facts.landlock_abi} with seccomp" if ok else _landlock_why(facts),
        "" if ok else remedies.landlock(facts),
    )


def _failures(facts: Facts, level: Isolation) -> str:
    trial = facts.trials.get(level)
    return f"a trial sandbox failed: {'; '.join(trial.failures)}" if trial else ""


def _landlock_why(facts: Facts) -> str:
    if not facts.can("seccomp"):
        return f"seccomp: {facts.tries['seccomp'].why}"
    if facts.landlock_abi:
        needed = f"{facts.least_landlock} is needed"
        needed += "" if facts.uid_ranges else " where programs share the server's uid"
        if facts.landlock_abi < facts.least_landlock:
            return f"Landlock version {facts.landlock_abi} is too old: {needed}"
        return _failures(facts, Isolation.LANDLOCK)
    return f"the kernel offers no Landlock: {facts.tries['landlock'].why}"


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
    yield _uid_ranges(facts)
    yield _tried(
        facts, "overlay", "templates may start from an image or a directory",
        remedies.overlay(facts),
    )  # fmt: skip
    yield _tried(
        facts, "layers", "snapshots and forks of a sandbox's files",
        remedies.layers(facts, namespaces=facts.allows(Isolation.NAMESPACES)),
    )  # fmt: skip
    built = os.access(settings.agent, os.X_OK)
    yield Finding("agent", built, str(settings.agent), "" if built else "build it: make agent")


def _uid_ranges(facts: Facts) -> Finding:
    if facts.uid_ranges:
        return Finding("uid ranges", True, "each sandbox has host uids of its own")
    detail = "sandboxes share one uid on the host"
    if facts.lacking:
        detail += f": root lacks the capabilities {', '.join(facts.lacking)}"
    elif "uid ranges" in facts.tries:
        detail += f": a trial sandbox failed: {facts.tries['uid ranges'].why}"
    return Finding("uid ranges", False, detail, remedies.uid_ranges(facts))


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
    if groups.scope is not None and groups.scope.own:
        whose = "the user's systemd" if facts.uid else "systemd"
        detail += f"; in {groups.scope.unit}, a scope of {whose}"
    elif groups.scope is not None and groups.bases:
        detail += f"; not in systemd's care, which gave no scope: {groups.scope.why}"
    yield Finding("cgroups", not groups.problems, detail, remedies.cgroups(facts))
    kinds = {
        "loop": "an ext4 image per sandbox, on the host's disk",
        "tmpfs": "memory-backed and sized",
        "dir": "a plain directory, without a quota",
    }
    detail = kinds.get(backing or "", "none usable")
    yield Finding("disk", backing == "loop", detail, remedies.disk(facts, backing or ""))


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
