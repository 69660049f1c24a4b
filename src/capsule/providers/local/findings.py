"""What `capsule doctor` shows of the local provider: each fact, and the fix for what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable

from capsule.model import Isolation, Template, Unenforced
from capsule.providers.contract import Capabilities, Finding
from capsule.providers.local import enforcement, programs
from capsule.providers.local.probe import LEAST_LANDLOCK, Facts
from capsule.providers.local.scope import lingers, user_name
from capsule.providers.local.settings import LocalSettings


def capabilities(facts: Facts, settings: LocalSettings, backing: str | None) -> Capabilities:
    level = settings.isolation or facts.strongest()
    usable = facts.allows(level) and backing is not None
    gaps = tuple(enforcement.unenforced(facts, level, backing or "none"))
    findings = (*_levels(facts, settings), *_parts(facts, settings), *_limits(facts, backing))
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
    if groups.scope is None:
        return
    if not groups.scope.own:
        why = f"systemd gave no scope for sandboxes: {groups.scope.why}"
        limits = ", ".join(each.what for each in gaps) if groups.problems else ""
        yield f"not enforced as meant: {limits}; {why}; fix: {groups.fix}" if limits else why
    elif facts.uid and not lingers(facts.uid):
        user = user_name(facts.uid)
        yield f"sandboxes end at the last logout of {user}; fix: loginctl enable-linger {user}"


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
    if groups.scope is not None and groups.scope.own:
        whose = "the user's systemd" if facts.uid else "systemd"
        detail += f"; in {groups.scope.unit}, a scope of {whose}"
    elif groups.scope is not None and groups.bases:
        detail += f"; not in systemd's care, which gave no scope: {groups.scope.why}"
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
