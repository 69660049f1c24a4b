"""What a container may do: everything security-relevant about one, in one table to read.

`HOST_CONFIG` and `CONFIG` are what the Engine is told about a container; plan.py adds which one it
is (image, sizes, mounts). Programs in it are further confined by the agent: another uid, no
capabilities at all, the same seccomp profile once more, Landlock, rlimits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from capsule.model import MIB, WORKSPACE
from capsule.providers.local.plan import MASKED

UID = GID = 1000

# All that root of the container keeps: to become the sandbox's user, to drop what is left for
# programs, and to signal them. It may not even read their files.
CAPABILITIES = ("KILL", "SETGID", "SETPCAP", "SETUID")

# What the agent calls before it starts a program, and no program may: it keeps programs to whole
# cores, and makes and enters the user namespace of those that are root inside, and no other. The
# filter that programs get is the profile as it is.
CLONE_NEWUSER = 0x10000000
_ONE_NAMESPACE = {"value": CLONE_NEWUSER, "op": "SCMP_CMP_EQ"}
AGENT_CALLS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "sched_setaffinity": (),
    "unshare": ({"index": 0, **_ONE_NAMESPACE},),
    "setns": ({"index": 1, **_ONE_NAMESPACE},),
}

# At 0 a core is still made where the host pipes cores to a program; at 1 the kernel makes none.
NO_CORE = 1

# Of /sys programs have use for the CPUs and their own cgroup. To give an Engine a list of masks is
# to replace its own, whose names are all among ours.
HARDWARE = (
    "block", "bus", "class", "dev", "firmware", "hypervisor", "kernel", "module", "power",
    "devices/LNXSYSTM:00", "devices/pci0000:00", "devices/platform", "devices/virtual",
)  # fmt: skip

HOST_CONFIG: Mapping[str, Any] = {
    "NetworkMode": "none",
    "CapDrop": ["ALL"],
    "CapAdd": list(CAPABILITIES),
    "Privileged": False,
    "ReadonlyRootfs": True,
    "IpcMode": "private",
    "CgroupnsMode": "private",
    "PidMode": "",
    "UTSMode": "",
    "UsernsMode": "",
    "RestartPolicy": {"Name": "no"},
    "AutoRemove": False,  # what died is looked at, then removed
    "LogConfig": {"Type": "none", "Config": {}},  # output is the agent's, and bounded there
    "Init": False,  # the agent reaps
    "OomKillDisable": False,
    "PublishAllPorts": False,
    "Devices": [],
    "Ulimits": [{"Name": "core", "Soft": NO_CORE, "Hard": NO_CORE}],
    # ReadonlyPaths are left out: the Engine's own list holds.
    "MaskedPaths": [*(f"/proc/{name}" for name in MASKED), *(f"/sys/{name}" for name in HARDWARE)],
}

# Podman's own defaults are more than some hosts let anybody have. For the agent: programs may open
# fewer files, and the cgroup counts their processes.
PODMAN_ULIMITS = [
    {"Name": "nofile", "Soft": 16_384, "Hard": 16_384},
    {"Name": "nproc", "Soft": 32_768, "Hard": 32_768},
]

CONFIG: Mapping[str, Any] = {
    "User": "0:0",
    "Entrypoint": ["/.capsule/agent"],
    "Cmd": ["container"],
    "WorkingDir": "/",
    "Tty": False,
    "OpenStdin": False,
    "AttachStdin": False,
    "AttachStdout": False,
    "AttachStderr": False,
    "NetworkDisabled": True,
    "Healthcheck": {"Test": ["NONE"]},  # an image's own would run as root
}

# Behind the mounts, for programs only, should one of them be wrong. What an image declares as a
# volume is not among them: the Engine would make it without a size.
LANDLOCK = (
    ("/", "rx"),
    ("/proc", "dev"),
    ("/dev", "dev"),
    ("/dev/shm", "rw"),
    (WORKSPACE, "rw"),
    ("/tmp", "rw"),
    ("/var/tmp", "rw"),
    ("/root", "rw"),
)

# Of runtimes whose kernel cannot do it.
NO_ROOT = "no program is root under gVisor, which does not let processes enter user namespaces"

# Counted per user, which boxes share: little of each, so that one leaves the others theirs.
PER_USER = {"sigpending": 1024, "msgqueue": 256 * 1024, "memlock": MIB}


def security_options(profile: Mapping[str, Any] | str | None) -> list[str]:
    """`profile`: itself, or where the Engine finds it, or none: then it has its own."""
    options = ["no-new-privileges"]
    if isinstance(profile, str):
        options.append(f"seccomp={profile}")
    elif profile is not None:
        options.append(f"seccomp={json.dumps(for_agent(profile))}")
    return options


def for_agent(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile for the whole container: as programs have it, and what the agent needs."""
    wider = copy.deepcopy(dict(profile))
    for entry in wider.get("syscalls", ()):
        entry.pop("comment", None)
        entry["names"] = [name for name in entry["names"] if name not in AGENT_CALLS]
    wider.pop("comment", None)
    wider["syscalls"] = [entry for entry in wider.get("syscalls", ()) if entry["names"]]
    wider["syscalls"] += (
        {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(args)}
        for name, args in AGENT_CALLS.items()
    )
    return wider


def shared_memory(size: int) -> str:
    """Options of /dev/shm. The Engine's own has a size, and room for any number of files."""
    return f"rw,noexec,nosuid,nodev,size={size},nr_inodes=4096,mode=1777"


def tmpfs(size: int, inodes: int, mode: int = 0o1777) -> str:
    """Options of a tmpfs that belongs to the sandbox's user. None is without a size."""
    owner = f"uid={UID},gid={GID}"
    return f"rw,exec,nosuid,nodev,size={size},nr_inodes={inodes},mode={mode:o},{owner}"


def for_podman(options: str) -> str:
    """It refuses words that others know. The files' own size in memory limits their number; and
    where a tmpfs cannot be given to the sandbox's user, everybody in the box may write to it."""
    words = options.split(",")
    kept = [word for word in words if word.partition("=")[0] not in ("nr_inodes", "uid", "gid")]
    if any(word.startswith("uid=") for word in words):
        kept = ["mode=1777" if word.startswith("mode=") else word for word in kept]
    return ",".join(kept)
