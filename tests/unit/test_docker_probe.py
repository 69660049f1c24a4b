"""What the Docker provider makes of what an Engine says about itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from capsule.errors import InvalidError, NotSupportedError, UnavailableError
from capsule.model import Isolation
from capsule.providers.docker import address, probe, transport
from capsule.providers.docker.address import Address
from capsule.providers.docker.engine import agreed, split_tag
from capsule.providers.docker.probe import Facts

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


def test_runtimes_are_known_by_their_program() -> None:
    levels = {name: runtime.isolation for name, runtime in told().runtimes.items()}
    container, gvisor = Isolation.CONTAINER, Isolation.GVISOR
    assert levels == {"runc": container, "runsc": gvisor, "closed": gvisor, "kata": container}


@pytest.mark.parametrize(
    ("runtime", "way"),
    [("runc", "socket"), ("kata", "socket"), ("runsc", "socket"), ("closed", "engine")],
)
def test_a_runtime_must_let_sockets_out(runtime: str, way: str, as_uid: Any) -> None:
    as_uid(0)
    found = told()
    assert transport.choose("auto", found, found.runtime(runtime)) == way
    assert transport.choose("engine", found, found.runtime(runtime)) == "engine"


@pytest.mark.parametrize(
    ("uid", "info", "where"),
    [
        (1000, {}, HERE),  # a member of the group docker
        (0, {"SecurityOptions": ["name=userns"]}, HERE),
        (0, {"SecurityOptions": ["name=rootless"]}, HERE),  # somebody else's
        (0, {"OperatingSystem": "Docker Desktop"}, HERE),
        (0, {}, Address("http://far.example:2375")),
        (0, {}, Address("ssh://far.example")),
    ],
)
def test_where_root_inside_is_not_us_no_folder_is_shared(
    uid: int, info: dict[str, Any], where: Address, as_uid: Any
) -> None:
    as_uid(uid)
    assert not told(where, **info).shares_root


def test_a_rootless_engine_of_ones_own_shares_folders(tmp_path: Path, as_uid: Any) -> None:
    socket = tmp_path / "docker.sock"
    socket.touch()
    as_uid(socket.stat().st_uid)
    assert told(Address(f"unix://{socket}"), SecurityOptions=["name=rootless"]).shares_root


def test_limits_that_the_engine_cannot_enforce_are_told() -> None:
    found = told(MemoryLimit=False, CpuCfsQuota=False, PidsLimit=False)
    gaps = [gap.what for gap in probe.unenforced(found, found.runtime("runc"), disk=True)]
    assert gaps == ["memory", "cpus", "processes"]
    fine = told()
    assert list(probe.unenforced(fine, fine.runtime("runc"), disk=True)) == []
    memory = [gap.what for gap in probe.unenforced(fine, fine.runtime("runsc"), disk=False)]
    assert memory == ["memory", "inodes"]


def test_an_unknown_runtime_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="no runtime 'nosuch'") as caught:
        told().runtime("nosuch")
    assert caught.value.hint is not None and "runsc" in caught.value.hint


def test_an_agent_for_another_machine_is_refused(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(b"\x7fELF" + bytes(14) + (183).to_bytes(2, "little"))
    with pytest.raises(NotSupportedError, match="runs on x86_64, and the agent is built for aarch"):
        probe.check_agent(agent, told())
    probe.check_agent(agent, told(Architecture="aarch64"))


@pytest.mark.parametrize(
    ("newest", "oldest", "version"),
    [("1.41", "1.12", "v1.41"), ("1.47", "1.24", "v1.47"), ("1.99", "1.44", "v1.51")],
)
def test_both_sides_agree_on_a_version(newest: str, oldest: str, version: str) -> None:
    assert agreed({"ApiVersion": newest, "MinAPIVersion": oldest}) == version


@pytest.mark.parametrize(("newest", "oldest"), [("1.40", "1.12"), ("2.3", "2.0"), ("x", "")])
def test_without_a_version_in_common_there_is_none(newest: str, oldest: str) -> None:
    with pytest.raises(NotSupportedError, match=r"Capsule 1\.41 to"):
        agreed({"ApiVersion": newest, "MinAPIVersion": oldest})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("python", ("python", "latest")),
        ("python:3.13", ("python", "3.13")),
        ("registry.example:5000/x", ("registry.example:5000/x", "latest")),
        ("registry.example:5000/x:1", ("registry.example:5000/x", "1")),
        ("x@sha256:abc", ("x", "sha256:abc")),
    ],
)
def test_names_of_images_have_a_tag(name: str, parts: tuple[str, str]) -> None:
    assert split_tag(name) == parts


def test_the_engine_is_where_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    env = {"DOCKER_HOST": "unix:///run/a.sock"}
    assert address.find(None, env).url == "unix:///run/a.sock"
    assert address.find("tcp://host:2375", env).url == "http://host:2375"
    monkeypatch.setattr(address, "find_spec", lambda name: object())
    assert address.find("ssh://me@host", env).socket is None
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="takes the package asyncssh") as missing:
        address.find("ssh://me@host", env)
    assert "docker-ssh" in str(missing.value.hint)
    with pytest.raises(InvalidError, match="not the address of a Docker Engine"):
        address.find("ftp://host", env)


def test_without_any_engine_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setattr(address, "SOCKETS", ())
    with pytest.raises(UnavailableError, match="no Docker Engine found") as caught:
        address.find(None, {})
    assert caught.value.hint is not None and "CAPSULE_DOCKER_HOST" in caught.value.hint
