"""Containers: what an Engine puts around a sandbox and into it, and the agent's things inside."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.escape.attempt import CONTAINERS, RELAYED, Attempt, Check, cases, scenario
from tests.escape.conftest import Cell
from tests.support import wait_for
from tests.support.engine import EngineApi
from tests.support.images import Images

pytestmark = pytest.mark.real


ANYWHERE = (*CONTAINERS, *RELAYED)
ENGINE = "the Engine is root's: whoever may use it needs no way out"
AGENTS = "only a container has an agent in it"

# Every way to the agent's folder that a process has.
WAYS = """
own = [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit() or name == "self"]
ways = ["/.capsule", *(f"{p}/{link}/.capsule" for p in own for link in ("root", "cwd/..", "cwd"))]
"""

ATTEMPTS = [
    Attempt(
        "agents-folder",
        "enter the agent's folder, list it, look for its files, or put another in its place",
        WAYS
        + """
refused = None
for way in ways:
    for action in (
        lambda: os.listdir(way), lambda: os.chdir(way), lambda: os.stat(f"{way}/agent.sock"),
        lambda: os.stat(f"{way}/agent"), lambda: os.stat(f"{way}/bin/capsule-agent"),
        lambda: os.open(f"{way}/error", os.O_RDONLY), lambda: os.mkdir(f"{way}/mine"),
        lambda: os.chmod(way, 0o777), lambda: os.rename(way, f"{way}-old"),
        lambda: os.symlink("/workspace", "/.capsule"), lambda: os.rmdir(way),
    ):
        try:
            action()
            escaped(way)
        except OSError as error:
            refused = error
raise refused
""",
        proof=AGENTS,
    ),
    Attempt(
        "agents-own-socket",
        "connect to the agent's socket from inside",
        WAYS
        + """
refused = None
for way in ways:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            socket.socket(socket.AF_UNIX, kind).connect(f"{way}/agent.sock")
            escaped(way)
        except OSError as error:
            if error.errno == errno.EPROTOTYPE: escaped(f"{way} is there")
            refused = error
raise refused
""",
        proof="whoever may connect owns the sandbox: the driver does",
    ),
    Attempt(
        "engines-sockets",
        "connect to the Engine, to containerd and to what holds the container (CVE-2020-15257)",
        """
        refused = None
        for path in A["sockets"]:
            for name in {path, path.replace("\\0", "", 1)}:
                try:
                    socket.socket(socket.AF_UNIX).connect(name)
                    escaped(name)
                except OSError as error:
                    refused = error
        raise refused
        """,
        actors=("engine",),
        proof=ENGINE,
    ),
    Attempt(
        "engines-folders",
        "reach the container's layers, files and volumes where the Engine keeps them",
        """
        refused = None
        for path in A["folders"]:
            for way in ("", "/proc/1/root", "/proc/self/root", "/proc/1/cwd"):
                try:
                    os.stat(way + path)
                    escaped(way + path)
                except OSError as error:
                    refused = error
        raise refused
        """,
        actors=("engine",),
        proof=ENGINE,
    ),
    Attempt(
        "unsized",
        "find a place to write to that has no size, or no limit on the number of files",
        """
        def wide(path):
            held = os.statvfs(path)
            size, files = held.f_blocks * held.f_frsize, held.f_files
            if size == 0 or size > A["size"]: return f"{size >> 20} MiB"
            if not A["gvisor"] and not 0 < files <= A["files"]: return f"{files} files"
        found = []
        for path, folders, _ in os.walk("/"):
            if path.startswith(("/proc/", "/sys/")) or path.count("/") > 3: folders.clear()
            name = os.path.join(path, ".capsule-escape")
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                os.unlink(name)
            except OSError:
                continue
            if how := wide(path): found.append(f"{path}: {how}")
        if found: escaped(found)
        """,
        args={"size": 400 << 20, "files": 100_000},
        proof="a host's disks have no size that a program could not fill",
    ),
]


@cases(ATTEMPTS, cells=ANYWHERE)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


CATCH = """
import os, sys, time
caught, end = set(), time.monotonic() + 10
open("ready", "w").close()
while time.monotonic() < end and not os.path.exists("done"):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in sys.argv[1:]:
            try:
                if os.stat(f"/proc/{pid}").st_uid: continue
                fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK)
                # Of a process that is just ending there is nothing to be read, which anybody may.
                if name not in ("maps", "environ") or os.read(fd, 1): caught.add(name)
            except OSError:
                pass
print(sorted(caught))
"""


@scenario(
    "catch-an-exec",
    "catch the Engine's runtime when it enters the container (CVE-2019-5736, CVE-2016-9962)",
    proof=ENGINE,
    cells=CONTAINERS,
)
def test_an_exec_of_the_engines_is_not_caught(cell: Cell, engine: EngineApi) -> None:
    names = ["exe", "mem", "root/.capsule", "cwd/.capsule"]
    if not cell.gvisor:  # there nobody comes from outside, and /proc shows more of everybody
        names += ["environ", "maps", "ns/mnt", *(f"fd/{number}" for number in range(16))]
    with cell.box() as sandbox:
        running = sandbox.send("python3", "-c", CATCH, *names)
        wait_for(lambda: "ready" in sandbox.ask("list", "/workspace")["names"], what="it looks")
        for _ in range(4):
            assert engine.exec(sandbox.handle["container"], "/bin/true").exit_code == 0
        sandbox.write("/workspace/done")
        assert cell.driver.wait(running)["out"] == "[]\n"


HOSTILE = """\
HEALTHCHECK --interval=20ms CMD touch /dev/shm/checked
ENTRYPOINT ["/bin/sh", "-c", "touch /dev/shm/entered; sleep 9"]
ENV LD_PRELOAD=/nothing.so
ENV CAPSULE_BOX={}
VOLUME /data
USER 12345
WORKDIR /nothing
"""


@pytest.fixture
def hostile_image(engine: EngineApi, images: Images) -> Iterator[str]:
    """What an image may ask of an Engine."""
    name = f"capsule-test/hostile-{secrets.token_hex(4)}"
    made = engine.call("POST", "/containers/create", {"Image": images.python, "Cmd": ["true"]})
    try:
        engine.call("POST", "/commit", container=made["Id"], repo=name, changes=HOSTILE)
    finally:
        engine.remove(made["Id"])
    try:
        yield name
    finally:
        engine.call("DELETE", f"/images/{name}", force=1)


@scenario(
    "hostile-image",
    "be an image with a health check, an entry point, variables, volumes and a user of its own",
    proof="see test_a_hostile_image_works_outside",
    cells=CONTAINERS,
)
def test_an_image_decides_nothing(cell: Cell, hostile_image: str) -> None:
    with cell.box(fresh=True, image=hostile_image) as sandbox:
        sandbox.exec("/bin/sleep", "0.3")
        assert sandbox.exec("ls", "/dev/shm")["out"] == ""
        assert "LD_PRELOAD" not in sandbox.exec("env")["out"]
        assert "12345" not in sandbox.exec("id")["out"]
        write = "import os; open('/data/file', 'w'); print(os.statvfs('/data').f_blocks)"
        assert int(sandbox.exec("python3", "-c", write)["out"] or 0) <= 1024, "of 4 KiB"


def test_a_hostile_image_works_outside(engine: EngineApi, hostile_image: str) -> None:
    """The same image, started by the Engine as it is."""
    container = engine.run(hostile_image)
    try:
        want = ["checked", "entered"]
        look = ("/bin/ls", "/dev/shm")
        wait_for(
            lambda: engine.exec(container, *look).output.split()[-2:] == want, what="its files"
        )
    finally:
        engine.remove(container)
