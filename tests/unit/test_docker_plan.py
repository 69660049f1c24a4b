"""The container that the Engine is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capsule.model import MIB, Limits
from capsule.providers.docker import plan
from capsule.providers.docker.plan import Mounted, Parts
from capsule.providers.docker.probe import Facts, Runtime
from capsule.providers.local.seccomp import load_profile

RUNC, RUNSC = Runtime("runc"), Runtime("runsc", gvisor=True)
FACTS = Facts(
    version="20.10", api="1.41", kind="Docker", arch="x86_64", cpus=2, cgroups=1,
    limits=frozenset({"memory", "cpus", "processes"}), runtimes={}, default_runtime="runc",
    rootless=False, remapped=False, live_restore=False, shares_root=True,
)  # fmt: skip
PARTS = Parts(
    id="a",
    image="x",
    hostname="capsule",
    limits=Limits(memory=512 * MIB, cpus=0.5, processes=100, disk=64 * MIB, inodes=1000),
    runtime=RUNC,
    cpus=(0,),
    filter=b"\x01\x02",
    profile=load_profile("default"),
    mounted=Mounted(),
    labels={},
)
ON_DISK = {"/host/workspace": "/workspace", "/host/tmp": "/tmp", "/host/var-tmp": "/var/tmp"}


def made(**changes: Any) -> dict[str, Any]:
    return plan.container(replace(PARTS, **changes), FACTS)


def host(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = made(**changes)["HostConfig"]
    return config


@pytest.mark.parametrize("runtime", [RUNC, RUNSC])
@pytest.mark.parametrize("disk", [None, ON_DISK])
def test_every_tmpfs_has_a_size_that_counts_as_memory(
    runtime: Runtime, disk: dict[str, str] | None
) -> None:
    config = host(runtime=runtime, disk=disk, volumes=("/data", "/workspace"))
    total = 0
    for path, options in config["Tmpfs"].items():
        given = dict(option.partition("=")[::2] for option in options.split(","))
        assert int(given["nr_inodes"]) > 0
        total += int(given["size"]) if path != "/dev/shm" else 0  # that is the programs' own
    own = 64 * MIB if runtime.gvisor else 0
    assert config["Memory"] == config["MemorySwap"] == 512 * MIB + total + own
    assert "/data" in config["Tmpfs"]
    bound = {mount["Source"]: mount["Target"] for mount in config["Mounts"]}
    assert bound == (disk or {}) and not set(config["Tmpfs"]) & {"/workspace"} & set(bound.values())
    assert (
        plan.container(PARTS, replace(FACTS, limits=frozenset()))["HostConfig"]
        .keys()
        .isdisjoint({"Memory", "MemorySwap", "CpuQuota", "PidsLimit"})
    )


def test_nothing_of_the_image_or_the_server_runs_or_is_passed_on() -> None:
    body = made()
    assert body["User"] == "0:0" and body["Cmd"] == ["container"]
    assert body["Healthcheck"] == {"Test": ["NONE"]}
    assert len(body["Env"]) == 1
    config = body["HostConfig"]
    assert config["CapDrop"] == ["ALL"] and not config["Privileged"] and config["ReadonlyRootfs"]
    assert set(config["CapAdd"]) == {"SETUID", "SETGID", "SETPCAP", "KILL"}
    assert config["NetworkMode"] == "none" and body["NetworkDisabled"]
    assert config["LogConfig"]["Type"] == "none"
    assert config["RestartPolicy"] == {"Name": "no"}
