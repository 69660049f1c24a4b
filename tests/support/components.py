"""What the tests need besides Python and the agent, and whether this machine has it.

This is the one place that decides. A test states its needs by a marker, `@pytest.mark.needs("go")`,
or by a fixture in FIXTURES. What a run lacks is left out as a group: the tests are deselected, with
one line and a count. With CI=true a missing component is a failure of the run (tests/run.py).

`python -m tests.support.components` prints the table.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from capsule.providers.local import cgroups
from tests.support import IN_CI, ROOT
from tests.support.engine import CACHE, EngineApi, EngineMissing, find_runsc

# The findings of the run's first process, for its workers.
FOUND = "CAPSULE_TEST_COMPONENTS"
SBIN = "/usr/sbin:/sbin"
ROOTS_OWN = ("root", "dockerd", "podman", "qemu")  # with CI=true, an ordinary user may lack these


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    left_out: str  # what is not tested without it
    command: str  # gets it
    missing: Callable[[], str]  # why it is not there; "" if it is


def _programs(*names: str) -> Callable[[], str]:
    def missing() -> str:
        path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
        absent = [name for name in names if shutil.which(name, path=path) is None]
        return f"{', '.join(absent)} not installed" if absent else ""

    return missing


def _file(pattern: str, what: str) -> Callable[[], str]:
    return lambda: "" if glob.glob(pattern) else f"no {what}"


def _root() -> str:
    return "" if os.geteuid() == 0 else "the tests run as an ordinary user"


def _cgroup() -> str:
    layout = cgroups.find_here()
    if layout.version == 2 and layout.unified is not None:
        own = layout.unified / layout.own.lstrip("/") / "cgroup.subtree_control"
        writable = os.geteuid() == 0 or os.access(own, os.W_OK)
        return "" if writable else f"{own} belongs to another user"
    return cgroups.prepare(layout, os.geteuid()).problems.get("memory", "")


def _landlock() -> str:
    create_ruleset = 444  # the same number on every architecture
    version = ctypes.CDLL(None, use_errno=True).syscall(create_ruleset, None, 0, 1)
    return "" if version > 0 else "this kernel has no Landlock"


def _engine_answers(url: str) -> bool:
    try:
        api = EngineApi(url)
    except EngineMissing:
        return False
    answers = api.answers()
    api.close()
    return answers


def _makes_images() -> str:
    """Images are made of Debian's packages; those made before are kept."""
    if len(glob.glob(str(CACHE / "layers/*.sha256"))) >= 4:
        return ""
    return _programs("apt-get", "mmdebstrap", "busybox")()


def _docker() -> str:
    """An Engine that runs already; with CI=true as root also one that the tests start."""
    url = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not _engine_answers(url) and (why := _dockerd()):
        return f"no Engine answers at {url}" + (f"; {why}" if IN_CI else "")
    return _makes_images()


def _dockerd() -> str:
    if not IN_CI:
        return "only CI=true make test starts a dockerd"
    return _root() or _programs("dockerd", "containerd", "runc", "unshare")()


def _gvisor() -> str:
    return "" if find_runsc() else "runsc not installed"


def _environment(name: str) -> Callable[[], str]:
    """Packages in an environment of their own. With CI=true it is made when a test asks for it."""
    made = _file(str(CACHE / name / "*/complete"), "environment of the tests has them")
    return lambda: "" if IN_CI else made()


COMPONENTS = {
    component.name: component
    for component in (
        Component("root", "disks with a size, other users, mounts", "sudo make test", _root),
        Component(
            "cgroup",
            "limits of memory, CPU and processes together",
            "sudo make test, or systemd-run --user --scope -p Delegate=yes make test",
            _cgroup,
        ),
        Component(
            "landlock", "the level landlock", "a kernel with CONFIG_SECURITY_LANDLOCK", _landlock
        ),
        Component(
            "docker",
            "sandboxes in containers",
            "start a Docker Engine; apt install docker.io mmdebstrap busybox-static",
            _docker,
        ),
        Component("dockerd", "faults of a Docker daemon", "CI=true make test, as root", _dockerd),
        Component("gvisor", "sandboxes under gVisor", "scripts/test-components gvisor", _gvisor),
        Component("podman", "the provider over Podman", "apt install podman", _programs("podman")),
        Component("go", "Go programs and templates", "apt install golang-go", _programs("go")),
        Component(
            "node", "JavaScript contexts and programs", "apt install nodejs", _programs("node")
        ),
        Component("npm", "installs of npm packages", "apt install npm", _programs("node", "npm")),
        Component(
            "node-sdks",
            "E2B's SDK for Node",
            "scripts/test-components node-sdks",
            _environment("node"),
        ),
        Component(
            "frameworks",
            "examples with LangGraph, deepagents, smolagents",
            "scripts/test-components frameworks",
            _environment("agents"),
        ),
        Component(
            "notebook",
            "charts and tables of matplotlib and pandas",
            "scripts/test-components notebook",
            _environment("notebook"),
        ),
        Component(
            "nginx",
            "the shipped nginx configuration",
            "apt install nginx-light openssl",
            _programs("nginx", "openssl"),
        ),
        Component(
            "qemu",
            "another kernel, with cgroup v2",
            "apt install qemu-system-x86 cpio busybox-static; scripts/test-components kernel",
            lambda: (
                _programs("qemu-system-x86_64", "cpio", "busybox")()
                or _file(str(ROOT / ".cache/vm/boot/vmlinuz-*"), "kernel to boot")()
            ),
        ),
        Component("cc", "attacks in C, the agent's own tests", "apt install gcc", _programs("cc")),
        Component(
            "musl", "the agent built with musl", "apt install musl-tools", _programs("musl-gcc")
        ),
        Component(
            "headers",
            "system call numbers against the kernel's own",
            "apt install linux-libc-dev",
            _file("/usr/include/asm-generic/unistd.h", "kernel headers"),
        ),
        Component(
            "e2fsprogs", "disk images of ext4", "apt install e2fsprogs", _programs("mkfs.ext4")
        ),
        Component("tmux", "the command line in a terminal", "apt install tmux", _programs("tmux")),
        Component(
            "busybox",
            "templates of other images",
            "apt install busybox-static",
            _programs("busybox"),
        ),
        Component(
            "systemd", "the shipped unit files", "apt install systemd", _programs("systemd-analyze")
        ),
        Component(
            "x86-64",
            "system calls of x86-64 alone",
            "another machine",
            lambda: "" if platform.machine() == "x86_64" else f"this is {platform.machine()}",
        ),
    )
}

# A fixture stands for what it needs.
FIXTURES = {
    "engine": ("docker",),
    "docker_url": ("docker",),
    "images": ("docker",),
    "runsc": ("docker", "gvisor"),
    "runsc_nouds": ("docker", "gvisor"),
    "own_docker": ("dockerd",),
    "daemon": ("dockerd",),
    "podman": ("podman", "root"),
    "as_root": ("root",),
    "frameworks": ("frameworks",),
    "notebook": ("notebook",),
    "node_modules": ("node", "node-sdks"),
    "helpers": ("cc",),
}


def find() -> dict[str, str]:
    """Component → why it is missing, or "". Looked for once in a run."""
    if FOUND not in os.environ:
        os.environ[FOUND] = json.dumps({name: each.missing() for name, each in COMPONENTS.items()})
    found: dict[str, str] = json.loads(os.environ[FOUND])
    return found


@functools.cache
def missing(name: str) -> str:
    """Why a component is missing; "" if it is there."""
    if name not in COMPONENTS:
        raise LookupError(f"no component {name!r} in tests/support/components.py")
    return find()[name]


def first_missing(names: Iterable[str]) -> str:
    """The component that a test with these needs lacks; "" if it can run."""
    return next((name for name in names if missing(name)), "")


def required(name: str) -> bool:
    """With CI=true all of them are; an ordinary user may lack what only root can have."""
    return IN_CI and (os.geteuid() == 0 or name not in ROOTS_OWN)


def table() -> list[str]:
    """A line per component, as `make test` shows it first."""
    found = find()
    wide = max(map(len, found))
    lines = []
    for name, why in found.items():
        each = COMPONENTS[name]
        if why:
            lines.append(f"  {name:{wide}}  no   {each.left_out}: left out ({why})")
            lines.append(f"  {'':{wide}}       get it: {each.command}")
        else:
            lines.append(f"  {name:{wide}}  yes  {each.left_out}")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
