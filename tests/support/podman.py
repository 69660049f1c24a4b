"""Podman's service with Docker's API, for a test run: its own storage, its own socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import wait_for
from tests.support.engine import EngineApi, EngineMissing

# crun refuses hybrid cgroups; systemd need not run here.
CONFIG = """
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "none"
"""
STORAGE = """
[storage]
driver = "overlay"
runroot = "{0}/run"
graphroot = "{0}/root"
"""


@contextmanager
def podman_service() -> Iterator[EngineApi]:
    """Raises EngineMissing where it cannot be had."""
    program = shutil.which("podman")
    if program is None or os.getuid() != 0:
        raise EngineMissing("podman is not installed, or we are not root")
    folder = Path(tempfile.mkdtemp(prefix="cap-podman-", dir="/tmp"))
    (folder / "containers.conf").write_text(CONFIG)
    (folder / "storage.conf").write_text(STORAGE.format(folder))
    env = {
        "PATH": os.environ["PATH"],
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    socket = folder / "podman.sock"
    with open(folder / "log", "wb") as log:
        service = subprocess.Popen(
            [program, "system", "service", "--time=0", f"unix://{socket}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
        )  # fmt: skip
    try:
        wait_for(socket.exists, what="Podman's socket")
        api = EngineApi(f"unix://{socket}")
        yield api
        left = api.call("GET", "/containers/json", all=1)
        api.close()
        assert left == [], "containers were left behind"
    finally:
        service.terminate()
        service.wait(10)
        subprocess.run(["umount", "-ql", str(folder / "root/overlay")], check=False)
        shutil.rmtree(folder, ignore_errors=True)
