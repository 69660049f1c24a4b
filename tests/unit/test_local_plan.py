"""The launch request: what stands between a program and the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capsule.model import GIB, MIB, Isolation, Limits
from capsule.providers.local import plan
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.enforcement import unenforced
from capsule.providers.local.plan import Parts, Root
from capsule.providers.local.probe import Facts, Try

GROUPS = Cgroups(
    1,
    {name: Path("/cg", name, "capsule") for name in ("memory", "pids", "cpu")},
    files=frozenset({"memory.limit_in_bytes", "pids.max", "cpu.cfs_quota_us"}),
)
NO_GROUPS = Cgroups(0, problems=dict.fromkeys(("memory", "pids", "cpu"), "none"), fix="mount some")


def facts(*, root: bool = True, groups: Cgroups = GROUPS, abi: int = 7) -> Facts:
    tries = dict.fromkeys(("userns", "mounts", "overlay", "seccomp", "loop"), Try(True))
    return Facts(
        uid=0 if root else 1234,
        gid=0 if root else 1234,
        kernel="6.18",
        tries={**tries, "landlock": Try(abi > 0, abi)},
        cgroups=groups,
        mkfs=Path("/sbin/mkfs.ext4"),
        uid_ranges=root,
        cpus=(0, 1),
        sysctls={},
    )


def parts(disk: dict[str, Any] | None = None, **fields: Any) -> Parts:
    return Parts(
        id="k3v9",
        unique="k3v9-ab12",
        hostname="capsule",
        limits=Limits(),
        dir=Path("/run/capsule/boxes/k3v9"),
        stage=Path("/run/capsule/stage"),
        spool=Path("/data/spool"),
        disk=disk or {"kind": "loop", "template": "/data/disks/x.img", "dir": "/data/disks"},
        cpus=(1,),
        root=Root((Path("/data/roots/host-1"),), ("usr",)),
        view=Path("/run/capsule/views/1-512"),
        **fields,
    )


def namespaces(host: Facts | None = None, **fields: Any) -> dict[str, Any]:
    return plan.request(Isolation.NAMESPACES, parts(**fields), host or facts())


def landlock(host: Facts | None = None) -> dict[str, Any]:
    return plan.request(
        Isolation.LANDLOCK, parts({"kind": "dir", "path": "/data/boxes/k3v9"}), host or facts()
    )


def test_what_a_box_sees_of_the_host_and_may_write() -> None:
    request = namespaces()
    mounts = request["mounts"]
    root = {"type": "bind", "from": "/data/roots/host-1", "to": "", "ro": True}
    assert mounts[0] == root
    devices = [each["from"] for each in mounts if each.get("dev")]
    assert sorted(devices) == [
        "/dev/full", "/dev/null", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero",
    ]  # fmt: skip
    sources = {each["from"] for each in mounts if each["type"] == "bind"}
    foreign = {s for s in sources if not s.startswith(("/data/roots/", "/run/capsule/views/"))}
    assert foreign - set(devices) == {"/usr"}
    writable = [
        each["to"]
        for each in mounts
        if not each.get("ro") and each["type"] not in ("mask", "ro", "proc") and not each.get("dev")
    ]
    assert writable == ["dev/pts", "dev/shm", "workspace", "tmp", "var/tmp", "root"]
    rules = request["landlock"]["rules"]  # behind the mounts
    assert ["/", "rx"] in rules
    assert sorted(path for path, kind in rules if kind == "rw") == [
        "/dev/shm", "/root", "/tmp", "/var/tmp", "/workspace",
    ]  # fmt: skip
    assert namespaces(facts(abi=0))["landlock"] is None


def test_landlock_alone_must_hold_programs_that_share_the_servers_uid() -> None:
    assert facts(abi=2).allows(Isolation.LANDLOCK)
    assert not facts(abi=1).allows(Isolation.LANDLOCK)
    assert facts(abi=6, root=False).allows(Isolation.LANDLOCK)
    assert not facts(abi=5, root=False).allows(Isolation.LANDLOCK), "signals are not scoped yet"


def test_a_memory_backed_disk_is_charged_as_memory() -> None:
    disk = {"kind": "tmpfs", "size": GIB, "inodes": 1}
    request = namespaces(disk=disk)
    assert request["cgroups"][0]["set"] == [["memory.limit_in_bytes", str(GIB + 512 * MIB)]]
    assert request["rlimits"]["data"] == 512 * MIB
    assert namespaces(facts(groups=NO_GROUPS))["rlimits"]["data"] == Limits().memory


def test_memory_is_watched_where_no_cgroup_holds_it() -> None:
    assert "memory_watch" not in namespaces() and "memory_watch" not in landlock()
    for request in (namespaces(facts(groups=NO_GROUPS)), landlock(facts(groups=NO_GROUPS))):
        assert request["memory_watch"]["limit"] == Limits().memory
        assert request["memory_watch"]["of"] > 0 and request["memory_watch"]["disk"] == 0
    disk = {"kind": "tmpfs", "size": GIB, "inodes": 1}
    request = namespaces(facts(groups=NO_GROUPS), disk=disk)
    assert request["memory_watch"]["disk"] == GIB, "which is memory, too"


@pytest.mark.parametrize(
    ("root", "level", "backing", "gaps"),
    [
        (True, Isolation.NAMESPACES, "loop", set()),
        (True, Isolation.NAMESPACES, "tmpfs", {"memory"}),  # shared with the disk
        (False, Isolation.NAMESPACES, "tmpfs", {"memory", "cpus"}),
        (False, Isolation.LANDLOCK, "dir", {"memory", "cpus", "processes", "disk", "inodes"}),
    ],
)
def test_limits_that_do_not_hold_are_named_with_a_reason_and_a_fix(
    root: bool, level: Isolation, backing: str, gaps: set[str]
) -> None:
    host = facts() if root else facts(root=False, groups=NO_GROUPS)
    found = unenforced(host, level, backing)
    assert {gap.what for gap in found} == gaps
    assert all(gap.why and gap.fix for gap in found)
