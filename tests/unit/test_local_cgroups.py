"""How cgroups are found and what is written into them, for layouts this machine need not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.model import MIB, Limits
from capsule.providers.local import cgroups
from capsule.providers.local.cgroups import Cgroups, Layout

LIMITS = Limits(memory=256 * MIB, cpus=0.5, processes=64)

V2 = """\
22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""

CO_MOUNTED = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""

HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"


def test_a_unified_hierarchy_is_version_2() -> None:
    layout = cgroups.find(V2, "0::/system.slice/capsule.service\n")
    assert layout == Layout(2, unified=Path("/sys/fs/cgroup"), own="/system.slice/capsule.service")


def test_separate_mounts_are_version_1() -> None:
    layout = cgroups.find(V1, "4:memory:/\n")
    assert layout.version == 1
    assert layout.points["memory"] == Path("/sys/fs/cgroup/memory")
    assert layout.points["freezer"] == Path("/sys/fs/cgroup/freezer")


def test_where_both_are_mounted_version_1_has_the_controllers() -> None:
    assert cgroups.find(HYBRID, "4:memory:/\n0::/\n") == cgroups.find(V1, "4:memory:/\n")


def test_nothing_mounted_is_version_0() -> None:
    assert cgroups.find("22 27 0:21 / /proc rw - proc proc rw\n", "") == Layout(0)


def test_a_mount_point_with_a_space_is_read() -> None:
    text = "35 31 0:32 / /mnt/my\\040groups rw - cgroup cgroup rw,memory\n"
    assert cgroups.parse_mounts(text)[0].point == Path("/mnt/my groups")


def test_co_mounted_controllers_share_one_directory(tmp_path: Path) -> None:
    layout = cgroups.find(CO_MOUNTED.replace("/sys/fs/cgroup", str(tmp_path)), "")
    for point in set(layout.points.values()):
        point.mkdir()
    groups = cgroups.prepare(layout, uid=0)
    entries = groups.entries("box", LIMITS, memory=LIMITS.memory)
    assert sorted(entry["dir"] for entry in entries) == [
        f"{tmp_path}/cpu,cpuacct/capsule/box",
        f"{tmp_path}/memory/capsule/box",
        f"{tmp_path}/pids/capsule/box",
    ]


def test_a_missing_controller_is_a_problem_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    groups = cgroups.prepare(Layout(1, points={"memory": tmp_path / "memory"}), uid=0)
    assert groups.enforces("memory")
    assert groups.problems == {
        "pids": "the kernel has no pids controller mounted",
        "cpu": "the kernel has no cpu controller mounted",
    }


def test_no_cgroups_at_all_names_every_limit() -> None:
    groups = cgroups.prepare(Layout(0), uid=0)
    assert (groups.version, set(groups.problems)) == (0, {"memory", "pids", "cpu"})
    assert groups.fix
    assert groups.entries("box", LIMITS, memory=1) == []


def test_a_user_is_told_what_root_must_do(tmp_path: Path) -> None:
    layout = Layout(1, points={"memory": tmp_path / "absent" / "memory"})
    groups = cgroups.prepare(layout, uid=1234)
    assert "cannot be made" in groups.problems["memory"]
    assert f"chown -R 1234 {tmp_path}/absent/memory/capsule-1234" in groups.fix


def everything(version: int, *names: str) -> Cgroups:
    bases = {name: Path("/cg", name) for name in ("memory", "pids", "cpu")}
    return Cgroups(version, bases, files=frozenset(names))


def settings(groups: Cgroups, memory: int = LIMITS.memory) -> list[tuple[str, str]]:
    entries = groups.entries("box", LIMITS, memory=memory)
    return [(name, value) for entry in entries for name, value in entry["set"]]


def test_version_1_settings() -> None:
    groups = everything(
        1, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness", "pids.max",
        "cpu.cfs_quota_us", "cpu.cfs_burst_us",
    )  # fmt: skip
    assert settings(groups) == [
        ("memory.limit_in_bytes", str(256 * MIB)),
        ("memory.memsw.limit_in_bytes", str(256 * MIB)),  # not before the one above it
        ("memory.swappiness", "0"),
        ("pids.max", "65"),
        ("cpu.cfs_quota_us", "50000"),
        ("cpu.cfs_burst_us", "50000"),
    ]


def test_version_2_settings() -> None:
    groups = everything(
        2, "memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max"
    )
    assert settings(groups) == [
        ("memory.max", str(256 * MIB)),
        ("memory.swap.max", "0"),
        ("memory.oom.group", "0"),
        ("pids.max", "65"),
        ("cpu.max", "50000 100000"),
    ]


def test_settings_the_kernel_does_not_have_are_left_out() -> None:
    assert settings(everything(1, "pids.max", "memory.limit_in_bytes"), memory=MIB) == [
        ("memory.limit_in_bytes", str(MIB)),
        ("pids.max", "65"),
    ]


class FakeUnified:
    """A directory that behaves like cgroup2 where it matters: `prepare` writes, then reads back."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> None:
        self.busy = busy
        self.root = root
        self._mkdir = Path.mkdir
        self._write = Path.write_text
        monkeypatch.setattr(Path, "mkdir", lambda *a, **k: self.mkdir(*a, **k))
        monkeypatch.setattr(Path, "write_text", lambda *a, **k: self.write_text(*a, **k))
        self.populate(root)

    def mkdir(self, path: Path, *args: object, **kwargs: object) -> None:
        known = path.is_dir()
        self._mkdir(path, exist_ok=True)
        if not known:
            self.populate(path)

    def populate(self, path: Path) -> None:
        for name in ("cgroup.procs", "cgroup.subtree_control", "memory.max", "pids.max", "cpu.max"):
            self._write(path / name, "")

    def write_text(self, path: Path, text: str) -> int:
        if path.name == "cgroup.procs":
            source = self.root / "cgroup.procs"
            self._write(source, source.read_text().replace(text, "").strip())
            return self._write(path, f"{path.read_text()}{text}\n")
        if self.busy and path.parent == self.root and (self.root / "cgroup.procs").read_text():
            raise OSError(16, "Device or resource busy")
        return self._write(path, f"{path.read_text()} {text.lstrip('+')}".strip())


def test_version_2_hands_controllers_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeUnified(tmp_path, monkeypatch, busy=False)
    groups = cgroups.prepare(Layout(2, unified=tmp_path), uid=0)
    assert dict(groups.bases) == dict.fromkeys(("memory", "pids", "cpu"), tmp_path / "capsule")
    assert not groups.problems
    assert len(groups.entries("box", LIMITS, memory=1)) == 1


def test_version_2_moves_the_server_into_a_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeUnified(tmp_path, monkeypatch, busy=True)
    with open(tmp_path / "cgroup.procs", "w") as file:
        file.write("4711")
    groups = cgroups.prepare(Layout(2, unified=tmp_path), uid=1000)
    assert (tmp_path / "capsule-server" / "cgroup.procs").read_text() == "4711\n"
    assert groups.enforces("memory") and not groups.problems


def test_version_2_without_delegation_says_how_to_get_it(tmp_path: Path) -> None:
    groups = cgroups.prepare(Layout(2, unified=tmp_path / "absent", own="/user"), uid=1000)
    assert (groups.version, set(groups.problems)) == (0, {"memory", "pids", "cpu"})
    assert "Delegate=yes" in groups.fix
