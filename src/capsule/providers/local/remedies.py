"""What to do about what this host does not allow, in words of whoever decides it: the kernel's
settings, or the engine of the container that the server is in."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from capsule.providers.local import apparmor
from capsule.providers.local.probe import LEAST_LANDLOCK, Facts
from capsule.surroundings import Kind

PROFILE = "deploy/seccomp/capsule.json"
POD = "deploy/kubernetes/pod.yaml"
KEPT = "CHOWN DAC_OVERRIDE FOWNER KILL SETGID SETUID"
LOADED = "deploy/apparmor/capsule-agent loaded on the host"
GVISOR = (
    "gVisor lacks what sandboxes are made of; run the server outside of it, with "
    "CAPSULE_PROVIDER=docker and CAPSULE_DOCKER_RUNTIME=runsc: then each sandbox is in a gVisor"
)


def namespaces(facts: Facts) -> str:
    """For the level namespaces; "" where nothing helps."""
    if facts.around.kind is Kind.GVISOR:
        return GVISOR
    if setting := _of_the_kernel(facts):
        return f"on the container's host: {setting}" if facts.around.contained else setting
    if facts.around.contained:
        return more(facts)
    return "use a kernel with CONFIG_USER_NS, and no seccomp profile that refuses unshare and mount"


def _of_the_kernel(facts: Facts) -> str:
    if facts.sysctls.get("user.max_user_namespaces") == 0:
        return "sysctl -w user.max_user_namespaces=15000"
    if facts.uid == 0:
        return ""
    if facts.sysctls.get("kernel.unprivileged_userns_clone") == 0:
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if restricted(facts) and not facts.around.contained:
        return install_apparmor()
    return ""


def restricted(facts: Facts) -> bool:
    """Whether user namespaces are worth nothing here without a profile of AppArmor."""
    held = facts.uid != 0 or (facts.around.contained and not facts.around.admin)
    return held and facts.sysctls.get(apparmor.SYSCTL) == 1


def install_apparmor() -> str:
    """The command that lets the agent alone have user namespaces."""
    program = shlex.quote(sys.argv[0]) if sys.argv[0].endswith("capsule") else "capsule"
    return f"{program} doctor --apparmor | {apparmor.INSTALL}"


def more(facts: Facts) -> str:
    """The fewest options that give a container sandboxes of namespaces, in its engine's words."""
    match facts.around.kind:
        case Kind.KUBERNETES:
            return f"give the pod the securityContext of {POD}: {'; '.join(_pod(facts))}"
        case Kind.LXC:
            return "allow nesting: lxc config set NAME security.nesting true"
        case Kind.NSPAWN:
            return "run the server outside: systemd-nspawn has no option that shows all of /proc"
        case Kind.PODMAN:
            command = f"podman run {' '.join(_options(facts, 'unmask=ALL'))} …"
        case _:
            command = f"docker run {' '.join(_options(facts, 'systempaths=unconfined'))} …"
    return f"{command}, with {LOADED}" if restricted(facts) else command


def _options(facts: Facts, unmask: str) -> Iterator[str]:
    """Only those that it was not started with."""
    if facts.uid == 0 and not facts.around.admin and not facts.around.rootless:
        yield "--user 1000:1000"
    if _refused_calls(facts):
        # Real root is not held back by what the profile leaves out, but by what the Engine's has.
        plain = facts.uid == 0 and facts.around.admin
        yield f"--security-opt seccomp={'unconfined' if plain else PROFILE}"
    if apparmor_option := _apparmor(facts):
        yield f"--security-opt apparmor={apparmor_option}"
    if facts.around.masked_proc:
        yield f"--security-opt {unmask}"


def _apparmor(facts: Facts) -> str:
    """An Engine's own profile refuses mounts; where user namespaces want a profile, ours is one."""
    if restricted(facts):
        return "capsule-agent"
    return "unconfined" if facts.around.apparmor else ""


def _pod(facts: Facts) -> Iterator[str]:
    if facts.uid == 0 and not facts.around.admin:
        yield "runAsUser: 1000"
    if _refused_calls(facts):
        yield "seccompProfile: {type: Localhost, localhostProfile: capsule.json}"
    if restricted(facts):
        profile = "{type: Localhost, localhostProfile: capsule-agent}"
        yield f"appArmorProfile: {profile}, with {LOADED}"
    elif facts.around.apparmor:
        yield "appArmorProfile: {type: Unconfined}"
    if facts.around.masked_proc:
        yield "procMount: Unmasked, with hostUsers: false"


def _refused_calls(facts: Facts) -> bool:
    """Whether the container's seccomp profile stands in the way, as far as it can be told apart."""
    if not facts.around.filtered:
        return False
    # Podman's own lets everybody make namespaces, and refuses to name the host in them.
    if facts.around.kind is Kind.PODMAN or facts.around.admin:
        return True
    return not facts.can("userns") or facts.can("mounts")


def first(facts: Facts) -> str:
    """Where there is no level at all: what alone is in the way, if that is known."""
    if facts.around.kind is Kind.GVISOR:
        return GVISOR
    return namespaces(facts) if restricted(facts) else ""


def landlock(facts: Facts) -> str:
    if facts.around.kind is Kind.GVISOR:
        return GVISOR
    if facts.landlock_abi >= LEAST_LANDLOCK:
        fix = "use a kernel from 6.12 on"
        if facts.uid and not facts.around.contained:
            fix = f"run the server as root, or {fix}"
    else:
        since = "5.19" if facts.uid_ranges else "6.12"
        fix = f"use a kernel from {since} on with CONFIG_SECURITY_LANDLOCK and lsm=landlock"
    return f"on the container's host: {fix}" if facts.around.contained else fix


def uid_ranges(facts: Facts) -> str:
    if not facts.around.contained:
        if facts.lacking:
            return f"give the server the capabilities {', '.join(facts.lacking)}"
        return "run the server as root, outside a user namespace"
    if facts.around.kind is Kind.GVISOR:
        return GVISOR
    if facts.around.rootless:
        return "let the engine of the container be root's"
    if facts.around.kind is Kind.KUBERNETES:
        return f"runAsUser: 0, with capabilities {KEPT}; programs of sandboxes never have them"
    adding = " ".join(f"--cap-add {name}" for name in KEPT.split())
    if facts.uid == 0 and not facts.lacking:
        return "--cap-add SYS_ADMIN, which makes the container's root nearly the machine's"
    if facts.uid == 0:
        return f"start the container without --cap-drop, or with {adding}"
    return f"start the container as root, without --cap-drop or with {adding}"


def overlay(facts: Facts) -> str:
    if facts.around.contained:
        return "see level namespaces"
    return "use a kernel from 5.11 on, or run the server as root"


def layers(facts: Facts, *, namespaces: bool) -> str:
    if facts.around.contained and not namespaces:
        return "see level namespaces"
    if facts.uid:
        return "use a kernel from 6.6 on, or run the server as root on one from 5.19 on"
    fix = "use a kernel from 5.19 on, with data_dir on ext4, xfs or btrfs"
    return f"{fix}: mount a volume there" if facts.around.contained else fix


def disk(facts: Facts, backing: str) -> str:
    if backing == "dir":
        return "let the server use namespaces (see `capsule doctor`)"
    if facts.around.contained:  # there are no loop devices
        return "limit the memory of the container, which disks are part of"
    if facts.uid:
        return "give sandboxes a smaller `disk`, which is what they can have beyond `memory`"
    return "install e2fsprogs and allow loop devices, so that disks are images"


def cgroups(facts: Facts) -> str:
    """A container's cgroups are mounted read-only, whoever the server is."""
    kind = facts.around.kind
    if not facts.around.contained or kind in (Kind.LXC, Kind.NSPAWN):
        return facts.cgroups.fix
    if kind is Kind.GVISOR:
        return GVISOR
    own = "limit the container itself, for all sandboxes together"
    if kind is Kind.KUBERNETES:
        return f"{own}: resources.limits"
    own += ": -m, --cpus, --pids-limit"
    if facts.uid or facts.around.cgroups != 2:
        return own
    if kind is Kind.PODMAN:
        return f"podman run --security-opt unmask=/sys/fs/cgroup …; or {own}"
    return f"from Docker 28 on: docker run --security-opt writable-cgroups=true …; or {own}"
