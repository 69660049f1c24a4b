"""What the Docker provider makes of what an Engine says about itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import InvalidError, NotSupportedError, UnavailableError
from capsule.model import Isolation
from capsule.providers.docker import address, probe, transport
from capsule.providers.docker.address import Address
from capsule.providers.docker.engine import agreed, split_tag
from capsule.providers.docker.probe import Facts
from tests.support.users import User

VERSION: dict[str, Any] = {"ApiVersion": "1.41", "MinAPIVersion": "1.12", "Components": []}
INFO: dict[str, Any] = {
    "ServerVersion": "20.10.24",
    "OperatingSystem": "Debian GNU/Linux 12 (bookworm)",
    "Architecture": "x86_64",
    "NCPU": 4,
    "CgroupVersion": "2",
    "MemoryLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "DefaultRuntime": "runc",
    "SecurityOptions": ["name=seccomp,profile=default"],
    "Runtimes": {
        "runc": {"path": "runc"},
        "runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none", "--host-uds=all"]},
        "closed": {"path": "/opt/gvisor/runsc"},
        "kata": {"runtimeType": "io.containerd.kata.v2"},
    },
}
HERE = Address("unix:///run/docker.sock")


def told(where: Address = HERE, **info: Any) -> Facts:
    return probe.facts(VERSION, {**INFO, **info}, where)


@pytest.fixture
def as_uid(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda uid: monkeypatch.setattr(os, "geteuid", lambda: uid)


@pytest.mark.parametrize(
    ("runtime", "level", "way"),
    [
        ("runc", Isolation.CONTAINER, "socket"),
        ("kata", Isolation.CONTAINER, "socket"),
        ("runsc", Isolation.GVISOR, "socket"),
        ("closed", Isolation.GVISOR, "engine"),
    ],
)
def test_a_runtime_is_known_by_its_program_and_must_let_sockets_out(
    runtime: str, level: Isolation, way: str, as_uid: Any
) -> None:
    as_uid(0)
    found = told()
    assert found.runtime(runtime).isolation is level
    assert transport.choose("auto", found, found.runtime(runtime)) == way
    assert transport.choose("engine", found, found.runtime(runtime)) == "engine"
    with pytest.raises(NotSupportedError, match=r"no runtime .nosuch.*runsc"):
        found.runtime("nosuch")


@pytest.mark.parametrize(
    ("uid", "info", "where"),
    [
        (1000, {}, HERE),  # a member of the group docker
        (0, {"SecurityOptions": ["name=userns"]}, HERE),
        (0, {"OperatingSystem": "Docker Desktop"}, HERE),
        (0, {}, Address("http://far.example:2375")),
        (0, {}, Address("ssh://far.example")),
    ],
)
def test_folders_are_shared_where_root_inside_is_the_server(
    uid: int, info: dict[str, Any], where: Address, tmp_path: Path, as_uid: Any
) -> None:
    as_uid(uid)
    assert not told(where, **info).shares_root
    (tmp_path / "own.sock").touch()
    owner = (tmp_path / "own.sock").stat().st_uid
    own = Address(f"unix://{tmp_path}/own.sock")
    as_uid(owner)
    assert told(own, SecurityOptions=["name=rootless"]).shares_root
    as_uid(owner + 1)
    assert not told(own, SecurityOptions=["name=rootless"]).shares_root


def test_limits_that_the_engine_cannot_enforce_are_told() -> None:
    found = told(MemoryLimit=False, CpuCfsQuota=False, PidsLimit=False)
    gaps = [gap.what for gap in probe.unenforced(found, found.runtime("runc"), disk=True)]
    assert gaps == ["memory", "cpus", "processes"]
    fine = told()
    assert list(probe.unenforced(fine, fine.runtime("runc"), disk=True)) == []
    memory = [gap.what for gap in probe.unenforced(fine, fine.runtime("runsc"), disk=False)]
    assert memory == ["memory", "inodes"]


def test_an_agent_for_another_machine_is_refused(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(b"\x7fELF" + bytes(14) + (183).to_bytes(2, "little"))
    with pytest.raises(NotSupportedError, match="runs on x86_64, and the agent is built for aarch"):
        probe.check_agent(agent, told())
    probe.check_agent(agent, told(Architecture="aarch64"))


def test_both_sides_agree_on_a_version() -> None:
    def between(oldest: str, newest: str) -> str:
        return agreed({"ApiVersion": newest, "MinAPIVersion": oldest})

    assert between("1.12", "1.41") == "v1.41"
    assert between("1.24", "1.47") == "v1.47"
    assert between("1.44", "1.99") == "v1.51"
    for oldest, newest in (("1.12", "1.40"), ("2.0", "2.3"), ("", "x")):
        with pytest.raises(NotSupportedError, match=r"Capsule 1\.41 to"):
            between(oldest, newest)


def test_names_of_images_have_a_tag() -> None:
    assert split_tag("python") == ("python", "latest")
    assert split_tag("registry.example:5000/x") == ("registry.example:5000/x", "latest")
    assert split_tag("registry.example:5000/x:1") == ("registry.example:5000/x", "1")
    assert split_tag("x@sha256:abc") == ("x", "sha256:abc")


def test_where_the_engine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    env = {"DOCKER_HOST": "unix:///run/a.sock"}
    assert address.find(None, env).url == "unix:///run/a.sock"
    assert address.find("tcp://host:2375", env).url == "http://host:2375"
    monkeypatch.setattr(address, "find_spec", lambda name: object())
    assert address.find("ssh://me@host", env).socket is None
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"takes the package asyncssh.*docker-ssh"):
        address.find("ssh://me@host", env)
    with pytest.raises(InvalidError, match="not the address of a Docker Engine"):
        address.find("ftp://host", env)
    monkeypatch.setattr(address, "SOCKETS", ())
    with pytest.raises(UnavailableError, match=r"no Docker Engine found.*CAPSULE_DOCKER_HOST"):
        address.find(None, {})


REFUSED = """
import sys
from capsule.providers.docker.address import Address
from capsule.providers.docker.engine import _translated
print(_translated("version", Address(f"unix://{sys.argv[1]}"), 900, "Permission denied").hint)
"""


def test_a_socket_that_may_not_be_used_is_told_apart_from_no_engine(as_user: User) -> None:
    path = as_user.home / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0)
        refused = as_user.run(as_user.python, "-c", REFUSED, str(path))
        path.chmod(0o777)
        dead = as_user.run(as_user.python, "-c", REFUSED, str(path))
    assert f"let uid {as_user.uid} use the socket" in refused.stdout, refused.stderr
    assert f"--group-add {path.stat().st_gid}" in refused.stdout
    assert "systemctl start docker" in dead.stdout
