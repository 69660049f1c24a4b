"""The container that the Engine is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from capsule.model import MIB, Limits
from capsule.providers.docker import hardening, plan
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


def told(**changes: Any) -> dict[str, Any]:
    (variable,) = made(**changes)["Env"]
    box: dict[str, Any] = json.loads(variable.removeprefix("CAPSULE_BOX="))
    return box


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


def test_processes_are_counted_by_the_cgroup_and_in_gvisor_by_its_kernel() -> None:
    assert host()["PidsLimit"] == 100 + plan.AGENT_TASKS
    assert "nproc" not in told()["rlimits"]  # boxes share the uid on the host
    assert host(runtime=RUNSC)["PidsLimit"] >= 1024
    assert told(runtime=RUNSC)["rlimits"]["nproc"] == 99


def test_the_containers_filter_is_the_programs_and_what_the_agent_needs() -> None:
    profile = PARTS.profile
    assert isinstance(profile, dict)
    wider = hardening.for_agent(profile)
    allowed = [entry for entry in wider["syscalls"] if "sched_setaffinity" in entry["names"]]
    assert [entry["action"] for entry in allowed] == ["SCMP_ACT_ALLOW"]
    assert wider["defaultAction"] == profile["defaultAction"]
    before = {name for entry in profile["syscalls"] for name in entry["names"]}
    assert {name for entry in wider["syscalls"] for name in entry["names"]} == before
    assert "no-new-privileges" in host()["SecurityOpt"]


def test_podman_is_asked_in_its_own_words() -> None:
    parts = replace(PARTS, profile="/run/capsule/seccomp/default.json", disk=None)
    config = plan.container(parts, replace(FACTS, kind="Podman"))["HostConfig"]
    assert "seccomp=/run/capsule/seccomp/default.json" in config["SecurityOpt"]
    assert {limit["Name"] for limit in config["Ulimits"]} == {"core", "nofile", "nproc"}
    words = {
        word.partition("=")[0] for each in config["Tmpfs"].values() for word in each.split(",")
    }
    assert "size" in words and not {"nr_inodes", "uid", "gid"} & words
    assert "mode=1777" in config["Tmpfs"]["/workspace"]
    bare = plan.container(replace(parts, profile=None), FACTS)["HostConfig"]
    assert bare["SecurityOpt"] == ["no-new-privileges"]


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


def test_an_update_has_what_a_create_would_have() -> None:
    on_disk = replace(PARTS, disk=ON_DISK)
    wanted = replace(PARTS.limits, memory=64 * MIB, processes=7, cpus=0.75)
    body = plan.adjusted(on_disk, FACTS, wanted)
    assert body is not None
    assert {name: host(disk=ON_DISK, limits=wanted)[name] for name in body} == body
    assert set(body) == {"Memory", "MemorySwap", "CpuPeriod", "CpuQuota", "PidsLimit"}
    for change in ({"disk": MIB}, {"inodes": 77}, {"open_files": 9}):  # settled at the start
        assert plan.adjusted(on_disk, FACTS, replace(PARTS.limits, **change)) is None
    less = replace(PARTS.limits, memory=64 * MIB)
    assert plan.adjusted(PARTS, FACTS, less) is None  # what it writes is in memory
    assert plan.adjusted(replace(on_disk, runtime=RUNSC), FACTS, less) is None
