"""With the narrow umask of the shipped unit, sandboxes reach what is mounted in them."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from capsule.providers.local.disk import find_mkfs
from tests.support.servers import real_server


@contextmanager
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def no_other_user_reaches(volumes: Path, name: str) -> None:
    """A set-uid file of a sandbox, on a file system of the host."""
    (found,) = volumes.glob(f"*/{name}")
    assert found.stat().st_mode & stat.S_ISUID
    if os.geteuid() != 0:
        return

    def runs() -> bool:
        try:
            return subprocess.run([found], user=65534, group=65534, check=False).returncode == 0
        except PermissionError:
            return False

    assert not runs()
    volumes.chmod(0o711)
    try:
        assert runs()  # only its folder keeps others from it
    finally:
        volumes.chmod(0o700)


@pytest.mark.real
def test_sandboxes_volumes_and_snapshots_under_a_narrow_umask() -> None:
    with narrow_umask(), real_server() as server, httpx.Client(base_url=server.url) as http:

        def ask(path: str, **body: Any) -> dict[str, Any]:
            answer = http.post(path, json=body, timeout=60)
            assert answer.is_success, answer.text
            found: dict[str, Any] = answer.json()
            return found

        sized = {"size": 64 << 20} if os.geteuid() == 0 and find_mkfs() else {}
        ask("/v1/volumes", name="plain")
        ask("/v1/volumes", name="sized", **sized)
        mounts = [{"name": name, "path": f"/workspace/{name}"} for name in ("plain", "sized")]
        first = ask("/v1/sandboxes", template="bash", volumes=mounts)["id"]
        script = "echo 1 > plain/f && echo 2 > sized/f && echo 3 > f && cat */f f"
        ran = ask(f"/v1/sandboxes/{first}/execs", cmd=["bash", "-c", script])
        assert ran["stdout"] == "1\n2\n3\n", ran
        ask(f"/v1/sandboxes/{first}/snapshots", name="kept")
        script = "cp /bin/true plain/t && chmod 6755 plain/t"
        assert ask(f"/v1/sandboxes/{first}/execs", cmd=["bash", "-c", script])["exit_code"] == 0
        no_other_user_reaches(server.base / "data" / "volumes", "t")
        again = ask("/v1/sandboxes", snapshot="kept")["id"]
        assert ask(f"/v1/sandboxes/{again}/execs", cmd=["cat", "f"])["stdout"] == "3\n"
