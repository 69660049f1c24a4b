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
from pathlib import Path

from capsule.providers.local import cgroups
from tests.support import IN_CI, ROOT
from tests.support.engine import CACHE, EngineApi, EngineMissing, find_runsc

# The findings of the run's first process, for its workers.
FOUND = "CAPSULE_TEST_COMPONENTS"
SBIN = "/usr/sbin:/sbin"
CAP_SYS_ADMIN = 1 << 21
ROOTS_OWN = (
    "root",
    "dockerd",
    "podman",
    "qemu",
    "systemd-machine",
)  # with CI=true, an ordinary user may lack these


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    tests: str  # what is left out without it
    missing: Callable[[], str]  # why it is not there; "" if it is
    packages: str = ""  # Debian's, that have it
    script: str = ""  # a part of scripts/test-components that gets the rest
    hint: str = ""  # the next step where it cannot be installed

    @property
    def command(self) -> str:
        parts = [f"apt install {self.packages}" if self.packages else ""]
        parts += [f"scripts/test-components {self.script}" if self.script else "", self.hint]
        return "; ".join(filter(None, parts))


def _programs(*names: str) -> Callable[[], str]:
    def missing() -> str:
        path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
        absent = [name for name in names if shutil.which(name, path=path) is None]
        return f"{', '.join(absent)} not installed" if absent else ""

    return missing


def _file(pattern: str, what: str) -> Callable[[], str]:
    return lambda: "" if glob.glob(pattern) else what


def _root() -> str:
    if os.geteuid():
        return "the tests run as an ordinary user"
    return "" if _effective() & CAP_SYS_ADMIN else "root may not mount here (CAP_SYS_ADMIN)"


def _effective() -> int:
    """Our capabilities."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


def _cgroup() -> str:
    layout = cgroups.find_here()
    if layout.version == 2 and layout.unified is not None:
        own = layout.unified / layout.own.lstrip("/") / "cgroup.subtree_control"
        return "" if os.access(own, os.W_OK) else f"{own} cannot be written"
    return cgroups.prepare(layout, os.geteuid()).problems.get("memory", "")


def _landlock() -> str:
    create_ruleset = 444  # the same number on every architecture
    version = ctypes.CDLL(None, use_errno=True).syscall(create_ruleset, None, 0, 1)
    return "" if version > 0 else "this kernel has no Landlock"


def _engine() -> tuple[str, set[str]]:
    """Why no Engine answers, and the runtimes of the one that does."""
    url = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        api = EngineApi(url)
    except EngineMissing as missing:
        return str(missing), set()
    runtimes = api.runtimes() if api.answers() else set()
    api.close()
    return ("" if runtimes else f"no Engine answers at {url}"), runtimes


def _makes_images() -> str:
    """Images are made of Debian's packages; those made before are kept."""
    if len(glob.glob(str(CACHE / "layers/*.sha256"))) >= 4:
        return ""
    return _programs("apt-get", "mmdebstrap", "busybox")()


def _docker() -> str:
    """An Engine that runs already; with CI=true as root also one that the tests start."""
    why, _ = _engine()
    if why and (why_not_ours := _dockerd()):
        return f"{why}; {why_not_ours}" if IN_CI else why
    return _makes_images()


def _dockerd() -> str:
    if not IN_CI:
        return "only CI=true make test starts a dockerd"
    return _root() or _programs("dockerd", "containerd", "runc", "unshare")()


def _gvisor() -> str:
    """Our own Engine gets what was unpacked; another one must have it."""
    _, runtimes = _engine()
    if "runsc" in runtimes or (IN_CI and find_runsc()):
        return ""
    return "no runsc was unpacked" if IN_CI else "no Engine with the runtime runsc"


def _environment(name: str, *programs: str) -> Callable[[], str]:
    """Packages in an environment of their own. With CI=true it is made when a test asks for it."""
    made = _file(str(CACHE / name / "*/complete"), "not installed")
    return lambda: _programs(*programs)() or ("" if IN_CI else made())


def _node_versions() -> str:
    made = len(glob.glob(str(CACHE / "node/*/bin/node")))
    return "" if made >= 3 or _x86_64() else f"{made} of 3 were unpacked"


def _qemu() -> str:
    kernel = _file(str(ROOT / ".cache/vm/boot/vmlinuz-*"), "no kernel to boot was unpacked")
    return _programs("qemu-system-x86_64", "cpio", "busybox")() or kernel()


def _systemd_machine() -> str:
    made, recipe = ROOT / ".cache/vm/systemd/recipe", ROOT / "tests/vm/build_systemd.sh"
    current = made.exists() and made.read_bytes() == recipe.read_bytes()
    programs = _programs("qemu-system-x86_64", "mke2fs")()
    return programs or ("" if current else "no machine to boot was made")


def _x86_64() -> str:
    return "" if platform.machine() == "x86_64" else f"this is {platform.machine()}"


_ALL = (
    Component("root", "disks with a size, other users, mounts", _root, hint="sudo make test"),
    Component(
        "cgroup",
        "limits of memory, CPU and processes together",
        _cgroup,
        hint="sudo make test, or systemd-run --user --scope -p Delegate=yes make test",
    ),
    Component(
        "landlock", "the level landlock", _landlock, hint="a kernel with CONFIG_SECURITY_LANDLOCK"
    ),
    Component(
        "docker",
        "sandboxes in containers",
        _docker,
        "docker.io mmdebstrap busybox-static",
        hint="start a Docker Engine",
    ),
    Component("dockerd", "faults of a Docker daemon", _dockerd, hint="CI=true make test, as root"),
    Component("gvisor", "sandboxes under gVisor", _gvisor, script="gvisor"),
    Component("podman", "containers of Podman", _programs("podman"), "podman"),
    Component("go", "Go programs and templates", _programs("go"), "golang-go"),
    Component("node", "JavaScript contexts and programs", _programs("node"), "nodejs"),
    Component(
        "node-versions", "contexts in Node 18, 22 and 24", _node_versions, script="node-versions"
    ),
    Component("npm", "installs of npm packages", _programs("node", "npm"), "npm"),
    Component("node-sdks", "E2B's SDK for Node", _environment("node", "npm"), script="node-sdks"),
    Component(
        "frameworks",
        "examples with LangGraph, deepagents, smolagents",
        _environment("agents"),
        script="frameworks",
    ),
    Component(
        "notebook",
        "charts and tables of matplotlib and pandas",
        _environment("notebook"),
        script="notebook",
    ),
    Component(
        "nginx",
        "the shipped nginx configuration",
        _programs("nginx", "openssl"),
        "nginx-light openssl",
    ),
    Component(
        "qemu",
        "another kernel, with cgroup v2",
        _qemu,
        "qemu-system-x86 cpio busybox-static",
        "kernel",
    ),
    Component(
        "systemd-machine",
        "a machine with systemd and its users",
        _systemd_machine,
        "qemu-system-x86 mmdebstrap e2fsprogs",
        "systemd-machine",
    ),
    Component("cc", "attacks in C, the agent's own tests", _programs("cc"), "gcc libc6-dev"),
    Component("musl", "the agent built with musl", _programs("musl-gcc"), "musl-tools"),
    Component(
        "headers",
        "system call numbers beside the kernel's own",
        _file("/usr/include/asm-generic/unistd.h", "no kernel headers"),
        "linux-libc-dev",
    ),
    Component("e2fsprogs", "disk images of ext4", _programs("mkfs.ext4"), "e2fsprogs"),
    Component("busybox", "templates of other images", _programs("busybox"), "busybox-static"),
    Component("systemd", "the shipped unit files", _programs("systemd-analyze"), "systemd"),
    Component(
        "apparmor",
        "the profile for AppArmor",
        _file(str(CACHE / "apparmor/usr/sbin/apparmor_parser"), "no parser was unpacked"),
        script="apparmor",
    ),
    Component("x86-64", "system calls of x86-64 alone", _x86_64, hint="another machine"),
)
COMPONENTS = {component.name: component for component in _ALL}

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


def required() -> list[Component]:
    """What is missing and may not be: with CI=true all but what only root can have."""
    if not IN_CI:
        return []
    found = find()
    excused = ROOTS_OWN if os.geteuid() else ()
    return [each for each in _ALL if found[each.name] and each.name not in excused]


def forget() -> None:
    """After an installation: look again."""
    os.environ.pop(FOUND, None)
    missing.cache_clear()


def table() -> list[str]:
    """A line per component, as `make test` shows it first."""
    found = find()
    wide = max(map(len, found))
    lines = []
    for each in _ALL:
        if why := found[each.name]:
            lines.append(f"  {each.name:{wide}}  no   left out: {each.tests}")
            lines.append(f"  {'':{wide}}       {why}; get it: {each.command}")
        else:
            lines.append(f"  {each.name:{wide}}  yes")
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["packages"]:
        sys.stdout.write(" ".join(each.packages for each in _ALL if each.missing()))
    else:
        sys.stdout.write("\n".join(table()) + "\n")
