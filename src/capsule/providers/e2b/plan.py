"""What is done to a sandbox of a cloud's to make it a box: everything of it, in one place to read.

A box is the agent, in a folder of its own, started in the role `container` (spec/launch.md). Where
the cloud gives us root, as E2B does, the agent is root's and programs are another user, as in a
container. Where it does not, all are one user: the cloud's sandbox is the wall then, as it is in
any case, and what keeps programs from the agent is Landlock, if the kernel has it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from capsule.errors import NotSupportedError, UnavailableError
from capsule.model import MIB, WORKSPACE, SandboxSpec, Unenforced

ROOT = "root"  # the name of a cloud's user
FILE, SOCKET = "agent", "agent.sock"
TARGETS = {"workspace": WORKSPACE, "tmp": "/tmp", "var-tmp": "/var/tmp"}
NO_CORE = 1  # at 0 a core is still made where the machine pipes cores to a program
AGENT_TASKS = 4  # the agent's two, a shepherd and the relay: the user's, where all are one

# All that programs may write to; the rest of the machine they may read.
LANDLOCK = (
    ("/", "rx"),
    ("/proc", "dev"),
    ("/dev", "dev"),
    ("/dev/shm", "rw"),
    *((path, "rw") for path in TARGETS.values()),
)

# What root can do is what counts: a user namespace with one user in it has a root, too. SETUID,
# SETGID, KILL and SETPCAP are 0x1e0.
SCOUT = f"""
read -r _ _ users < /proc/self/uid_map || users=1
caps=$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status)
if [ "$(id -u)" = 0 ] && [ "$users" -gt 1 ] && [ $(( 0x$caps & 0x1e0 )) -eq {0x1E0} ]; then
    user=$(id -u user 2>/dev/null || echo 1000) group=$(id -g user 2>/dev/null || echo 1000)
    mode=uid dir=/.capsule
else
    user=$(id -u) group=$(id -g) mode=none dir=/tmp/.capsule
    if [ -w /dev/shm ] && ! grep -q '^[^ ]* /dev/shm .*noexec' /proc/mounts; then
        dir=/dev/shm/.capsule
    fi
    case "$HOME" in
    /tmp* | /var/tmp* | / | "") ;;
    *) if [ -w "$HOME" ] && ! [ "$HOME" -ef {WORKSPACE} ]; then dir=$HOME/.capsule; fi ;;
    esac
    if [ ! -w {WORKSPACE} ]; then mode=nowhere; fi
fi
echo "capsule: $mode $user $group $(uname -m) $dir"
"""

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where and as whom the agent runs in sandboxes of a template."""

    mode: str  # uid: it is root, and programs are not; none: all are one user
    uid: int
    gid: int
    machine: str
    dir: str

    @property
    def user(self) -> str | None:
        """Whom the cloud starts the agent and its relay as; None: whoever it likes."""
        return ROOT if self.mode == "uid" else None

    @property
    def agent(self) -> str:
        return f"{self.dir}/{FILE}"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mode", "uid", "gid", "machine", "dir")}


def place_of(told: str) -> Place:
    """From what SCOUT printed. Raises UnavailableError, NotSupportedError."""
    lines = [line for line in told.splitlines() if line.startswith("capsule: ")]
    words = lines[-1].split(" ", 5)[1:] if lines else []
    if len(words) != 5 or not (words[1].isdigit() and words[2].isdigit()):
        raise UnavailableError(f"the cloud's sandbox does not say what it is: {told[:200]!r}")
    mode, uid, gid, machine, folder = words
    if mode == "nowhere":
        raise NotSupportedError(
            f"the cloud's template has no folder {WORKSPACE} to write to, and nobody may make one",
            hint="take a template with that folder, or one whose user root is real",
        )
    return Place(mode, int(uid), int(gid), MACHINES.get(machine, machine), folder)


def place_from(data: Any) -> Place | None:
    """From a handle; None: it does not say."""
    try:
        return Place(
            str(data["mode"]), int(data["uid"]), int(data["gid"]), data["machine"], data["dir"]
        )
    except (KeyError, TypeError, ValueError):
        return None


def start(place: Place) -> str:
    """The script that becomes the agent, which finds its description in CAPSULE_BOX."""
    folder, agent = shlex.quote(place.dir), shlex.quote(place.agent)
    steps = ["cd /", f"chmod 700 {folder} {agent}"]
    if place.mode == "uid":
        steps += [
            f"mkdir -p {WORKSPACE}",
            f"chown {place.uid}:{place.gid} {WORKSPACE}",
            f"chmod 755 {WORKSPACE}",
        ]
    return " && ".join([*steps, f"exec {agent} container"])


def relay(place: Place) -> str:
    socket = shlex.quote(f"{place.dir}/{SOCKET}")
    return f"exec {shlex.quote(place.agent)} relay {socket} lines"


def box(id: str, spec: SandboxSpec, place: Place, filter: bytes) -> str:
    """CAPSULE_BOX: what the agent is told (spec/launch.md)."""
    described = {
        "id": id,
        "dir": place.dir,
        "isolation": "container",
        "hostname": spec.hostname,
        "uid": place.uid,
        "gid": place.gid,
        "user": {"mode": place.mode},
        "rlimits": rlimits(spec, place),
        "cpus": [],
        "landlock": {"abi": 0, "scope": True, "rules": [list(rule) for rule in LANDLOCK]},
        "filter": filter.hex(),
        "mounts": [
            {"type": "disk", "from": name, "to": path.removeprefix("/")}
            for name, path in TARGETS.items()
        ],
    }
    return json.dumps(described)


def rlimits(spec: SandboxSpec, place: Place) -> dict[str, int]:
    """The machine has no other tenant: what is counted per user is counted for this box alone."""
    limits = spec.limits
    others = AGENT_TASKS if place.mode == "none" else 0
    return {
        "nofile": limits.open_files,
        "core": NO_CORE,
        "fsize": limits.disk + MIB,
        "data": limits.memory,
        "nproc": limits.processes + others,
    }


SIZE = "choose a cloud template with the size that is needed, and set CAPSULE_E2B_TEMPLATE"


def unenforced(place: Place | None) -> Iterable[Unenforced]:
    """`place`: None, if it is not known; then what could be missing."""
    yield from unenforced_anywhere()
    if place is None or place.mode == "none":
        yield Unenforced(
            "agent",
            "the cloud gives no root, so that programs are the agent's own user, and may disturb "
            "it; the cloud's sandbox is what holds them",
            "use a cloud whose sandboxes have a root of their own",
        )


def unenforced_anywhere() -> Iterable[Unenforced]:
    yield Unenforced(
        "memory",
        "each process is limited, but not their sum: a cloud's sandbox has what its template has",
        SIZE,
    )
    yield Unenforced("cpus", "a cloud's sandbox has as many as its template has", SIZE)
    yield Unenforced("disk", "each file is limited, but not their sum", SIZE)
    yield Unenforced("inodes", "nobody counts files in a cloud's sandbox", SIZE)
