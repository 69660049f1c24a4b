"""What the users of other sandbox systems suffered from, by the numbers of that list.

Here is what no other suite shows. Elsewhere: 2 (a renewal that comes with the timer) in
tests/unit/test_service_time.py, 3 (what outlives a timeout) in tests/escape/test_timeouts.py, 5
(output cut, split or lost), 14 (an agent that is kept from its work) and 17 (cgroups of either
version) in the contract, 6 (a stream that drops) in tests/api/test_streams.py, 7 (large files) in
tests/api/test_uploads.py, 8 (files changed between pause and resume) in
tests/unit/test_pause_real.py, 9 (bursts) in tests/faults/test_load.py, 10 (leaks of the network)
and 12 (disks without an end) in tests/escape, 13 (the host's size) in
tests/unit/test_local_provider.py, 15 (a retry that makes two) in tests/api/test_rest.py, 16 (one
key reaching another's ports) in tests/api, 18 (use that does not count as use) in
tests/unit/test_service_time.py and tests/api/test_playground.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_sdk import Capsule, CapsuleClient
from tests.support import wait_for
from tests.support.servers import RealServer, real_server, started

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def client(server: RealServer) -> Iterator[CapsuleClient]:
    with CapsuleClient(server.url) as made:
        yield made


@pytest.fixture
def capsule(client: CapsuleClient) -> Iterator[Capsule]:
    with client.create("bash", ttl=120) as made:
        yield made


def descendants(pid: int) -> list[str]:
    """The names of a process's children, theirs, and so on; not those inside of sandboxes."""
    names: list[str] = []
    here = os.readlink("/proc/self/ns/pid")
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            # Another test's that has ended, or one with its own user namespace: in a sandbox.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if os.readlink(f"/proc/{child}/ns/pid") == here:
                    names.append(Path(f"/proc/{child}/comm").read_text().strip())
                    names += descendants(int(child))
    return names


def test_1_hosting_it_takes_one_process_and_nothing_beside(server: RealServer) -> None:
    with CapsuleClient(server.url) as client, client.create("bash") as capsule:
        assert capsule.exec("echo $((6 * 7))").stdout == "42\n"
        assert set(descendants(server.process.pid)) <= {"capsule-agent"}
        assert connections_of(server.process.pid) <= {server.port}


def connections_of(pid: int) -> set[int]:
    """The local ports of all TCP sockets that a process has, so of every service it talks to."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def test_4_no_exit_is_invented_while_the_program_runs(capsule: Capsule) -> None:
    """Its output is closed, and still it has not ended."""
    wait = "until test -e go; do sleep 0.1; done"
    stream = capsule.start(f"exec > /dev/null 2>&1; touch quiet; {wait}; exit 9", timeout=60)
    wait_for(lambda: capsule.exists("quiet"), what="it has closed its output")
    (info,) = [each for each in capsule.execs() if each.id == stream.exec_id]
    assert info.running and info.exit is None
    capsule.write_file("go", "")
    assert stream.wait().exit_code == 9


def test_11_no_secret_of_the_server_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t-key-of-the-operator"
    monkeypatch.setenv("OPERATORS_TOKEN", secret)
    with real_server(started, API_KEYS=secret) as server:
        assert secret in Path(f"/proc/{server.process.pid}/environ").read_text()
        with CapsuleClient(server.url, api_key=secret) as client, client.create("bash") as capsule:
            look = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n';"
            look += " cat /proc/self/mountinfo; ls -laR /run /var /root /home 2>/dev/null"
            seen = capsule.exec(look)
            assert "HOME=/workspace" in seen.stdout
            assert secret not in seen.stdout + seen.stderr
            files = capsule.exec(f"grep -rls {secret} /etc /tmp /workspace /run")
            assert files.stdout == ""
            assert secret not in repr(capsule.info)
        assert secret not in (server.base / "log").read_text()
