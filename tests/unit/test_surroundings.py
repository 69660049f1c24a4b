"""What the server runs in, from the files that containers of several engines have."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule import surroundings
from capsule.surroundings import Bounds, Kind

STATUS = "Name:\tpython3\nCapEff:\t{caps}\nSeccomp:\t{seccomp}\n"
PLAIN = {"proc/self/status": STATUS.format(caps="00000000a80425fb", seccomp=2)}
IDENTITY = "         0          0 4294967295\n"
DEV = "10 9 0:5 / /dev rw - tmpfs tmpfs rw,size=65536k\n"
CGROUP_1 = "\n".join(
    f"3{n} 27 0:3{n} /docker/af59 /sys/fs/cgroup/{name} ro,relatime - cgroup cgroup rw,{name}"
    for n, name in enumerate(("cpu", "memory", "pids"))
)
OWN_1 = "3:memory:/docker/af59\n2:pids:/docker/af59\n1:cpu:/docker/af59\n"
CGROUP_2 = "31 27 0:31 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
MASKED = "40 9 0:40 / /proc/sys ro - proc proc rw\n"
NO_LIMIT = "9223372036854771712"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/uid_map": IDENTITY, **PLAIN, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_docker_with_cgroup_version_1_and_limits(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            ".dockerenv": "",
            "proc/self/mountinfo": DEV + MASKED + CGROUP_1,
            "proc/self/cgroup": OWN_1,
            f"{groups}/memory/memory.limit_in_bytes": "536870912\n",
            f"{groups}/cpu/cpu.cfs_quota_us": "150000\n",
            f"{groups}/cpu/cpu.cfs_period_us": "100000\n",
            f"{groups}/pids/pids.max": "256\n",
        },
    )
    found = surroundings.find(root, {})
    assert found.kind is Kind.DOCKER
    assert (found.cgroups, found.masked_proc, found.filtered) == (1, True, True)
    assert (found.rootless, found.admin) == (False, False)
    assert found.bounds == Bounds(memory=512 << 20, cpus=1.5, processes=256)
    assert str(found) == "Docker: 512 MiB of memory, 1.5 CPUs, 256 processes"


def test_limits_above_our_own_count_too(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP_2,
            "proc/self/cgroup": "0::/system.slice/capsule.service/server\n",
            f"{groups}/system.slice/memory.max": "1073741824\n",
            f"{groups}/system.slice/capsule.service/cpu.max": "max 100000\n",
            f"{groups}/system.slice/capsule.service/memory.max": "max\n",
            f"{groups}/system.slice/capsule.service/server/pids.max": "64\n",
        },
    )
    assert surroundings.find_bounds(root) == Bounds(memory=1 << 30, processes=64)


def test_a_limit_that_is_not_to_be_seen_is_counted_where_the_kernel_says_so(tmp_path: Path) -> None:
    stat = f"cache 0\nhierarchical_memory_limit {300 << 20}\n"
    memory = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP_1,
            "proc/self/cgroup": OWN_1,
            f"{memory}/memory.limit_in_bytes": NO_LIMIT,
            f"{memory}/memory.stat": stat,
        },
    )
    assert surroundings.find_bounds(root) == Bounds(memory=300 << 20)


def test_numbers_that_mean_no_limit_are_none(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP_1,
            "proc/self/cgroup": OWN_1,
            f"{groups}/memory/memory.limit_in_bytes": NO_LIMIT,
            f"{groups}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{groups}/cpu/cpu.cfs_period_us": "100000\n",
            f"{groups}/pids/pids.max": "max\n",
        },
    )
    assert surroundings.find_bounds(root) == Bounds()


def test_a_full_container_is_named_with_its_option(tmp_path: Path) -> None:
    pids = "sys/fs/cgroup/pids.{}"
    files = {".dockerenv": "", "proc/self/mountinfo": DEV + CGROUP_2, "proc/self/cgroup": "0::/\n"}
    root = tree(tmp_path, {**files, pids.format("max"): "100", pids.format("current"): "40"})
    assert surroundings.look_for_exhausted(root) == ""
    (root / pids.format("current")).write_text("99")
    assert surroundings.look_for_exhausted(root) == (
        "the container has 99 of the 100 processes that it may have: delete sandboxes, or raise "
        "its limit (docker run --pids-limit)"
    )


@pytest.mark.parametrize(
    ("files", "env", "kind"),
    [
        ({"run/.containerenv": ""}, {}, Kind.PODMAN),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, Kind.KUBERNETES),
        ({"run/secrets/kubernetes.io/x": ""}, {}, Kind.KUBERNETES),
        ({}, {"container": "lxc"}, Kind.LXC),
        ({"run/systemd/container": "systemd-nspawn\n"}, {}, Kind.NSPAWN),
        ({"run/systemd/container": "rkt\n"}, {}, Kind.CONTAINER),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, {}, Kind.CONTAINER),
        ({".dockerenv": "", "proc/sentry-meminfo": ""}, {}, Kind.GVISOR),
        ({"proc/cmdline": "BOOT_IMAGE=/vmlinuz-4.4.0-gvisor quiet"}, {}, Kind.GVISOR),
        ({"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2"}, {}, Kind.WSL),
        ({"proc/sys/kernel/osrelease": "6.12.0"}, {}, Kind.MACHINE),
        ({}, {}, Kind.MACHINE),
    ],
)
def test_each_engine_is_known_by_what_it_leaves(
    tmp_path: Path, files: dict[str, str], env: dict[str, str], kind: Kind
) -> None:
    found = surroundings.find(tree(tmp_path, files), env)
    assert found.kind is kind
    assert found.contained == (kind not in (Kind.MACHINE, Kind.WSL))


def test_a_machine_whose_disk_was_made_from_an_image_is_no_container(tmp_path: Path) -> None:
    mounts = "24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755\n"
    root = tree(tmp_path, {".dockerenv": "", "proc/self/mountinfo": mounts})
    assert surroundings.find(root, {}).kind is Kind.MACHINE


@pytest.mark.parametrize(
    ("label", "name"),
    [("docker-default (enforce)\n", "docker-default"), ("unconfined\n", ""), ("kernel", "")],
)
def test_a_profile_of_apparmor_that_confines_is_known(
    tmp_path: Path, label: str, name: str
) -> None:
    root = tree(tmp_path, {"proc/self/attr/current": label})
    assert surroundings.find(root, {}).apparmor == name


def test_root_of_a_user_namespace_is_without_root(tmp_path: Path) -> None:
    files = {"run/.containerenv": "", "proc/self/uid_map": "0 1000 1\n1 100000 65536\n"}
    assert surroundings.find(tree(tmp_path, files), {}).rootless


def test_nothing_that_can_be_read_is_no_error(tmp_path: Path) -> None:
    assert surroundings.find(tmp_path, {}) == surroundings.Surroundings()
    assert surroundings.usable_memory() > 0 and surroundings.usable_cpus() > 0
