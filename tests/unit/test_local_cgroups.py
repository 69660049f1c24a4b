"""How cgroups are found and made ready, for layouts this machine need not have."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from capsule.model import MIB, Limits
from capsule.providers.local import cgroups
from capsule.providers.local.cgroups import Layout

LIMITS = Limits(memory=256 * MIB, cpus=0.5, processes=64)

V2 = """\
22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""


def test_the_layout_of_the_host_is_recognised() -> None:
    two = cgroups.find(V2, "0::/system.slice/capsule.service\n")
    assert two == Layout(2, unified=Path("/sys/fs/cgroup"), own="/system.slice/capsule.service")
    one = cgroups.find(V1, "4:memory:/\n")
    assert one.version == 1 and one.points["memory"] == Path("/sys/fs/cgroup/memory")
    both = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    assert cgroups.find(both, "4:memory:/\n0::/\n") == one
    assert cgroups.find("22 27 0:21 / /proc rw - proc proc rw\n", "") == Layout(0)
    spaced = "35 31 0:32 / /mnt/my\\040groups rw - cgroup cgroup rw,memory\n"
    assert cgroups.find(spaced, "").points["memory"] == Path("/mnt/my groups")


def test_what_is_missing_is_named_with_a_reason_and_a_fix(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    partly = cgroups.prepare(Layout(1, points={"memory": tmp_path / "memory"}), uid=0)
    assert partly.enforces("memory")
    assert partly.problems == {
        "pids": "the kernel has no pids controller mounted",
        "cpu": "the kernel has no cpu controller mounted",
    }
    none = cgroups.prepare(Layout(0), uid=0)
    assert none.fix and none.entries("box", LIMITS, memory=1) == []
    foreign = Layout(2, unified=tmp_path / "absent", own="/user")
    undelegated = cgroups.prepare(foreign, uid=1000)
    assert "Delegate=yes" in undelegated.fix
    for groups in (none, undelegated):
        assert (groups.version, set(groups.problems)) == (0, {"memory", "pids", "cpu"})
    absent = Layout(1, points={"memory": tmp_path / "absent" / "memory"})
    users = cgroups.prepare(absent, uid=1234)
    assert "cannot be made" in users.problems["memory"]
    assert f"chown -R 1234 {tmp_path}/absent/memory/capsule-1234" in users.fix


class Kernel:
    """A folder whose files behave as those of cgroup2, for a cgroup that is not the root."""

    FILES = ("cgroup.procs", "cgroup.subtree_control", "memory.max", "pids.max", "cpu.max")

    def __init__(self, top: Path, processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mkdir, self._write = Path.mkdir, Path.write_text
        self._populate(top)
        self._write(top / "cgroup.procs", processes)
        monkeypatch.setattr(Path, "mkdir", lambda *a, **k: self._make(*a, **k))
        monkeypatch.setattr(Path, "write_text", lambda *a, **k: self._set(*a, **k))

    def _populate(self, path: Path) -> None:
        for name in self.FILES:
            self._write(path / name, "")
        self._write(path / "cgroup.type", "domain")

    def _make(self, path: Path, *_: object, exist_ok: bool = False) -> None:
        known = path.is_dir()
        self._mkdir(path, exist_ok=exist_ok)
        if not known:
            self._populate(path)

    def _set(self, path: Path, text: str) -> int:
        cgroup, threaded = path.parent, "threaded" in (path.parent / "cgroup.type").read_text()
        if path.name == "cgroup.procs":
            above = (cgroup.parent / "cgroup.type").read_text()
            if "threaded" in above:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            source = cgroup.parent / "cgroup.procs"
            self._write(source, source.read_text().replace(text, "").strip())
            return self._write(path, f"{path.read_text()}{text}\n")
        if path.name == "cgroup.subtree_control":
            if text == "+memory" and threaded:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            if (cgroup / "cgroup.procs").read_text():
                if text == "+memory":
                    raise OSError(errno.EBUSY, "Device or resource busy")
                self._write(cgroup / "cgroup.type", "domain threaded")
        return self._write(path, f"{path.read_text()} {text.lstrip('+')}".strip())


@pytest.mark.parametrize("uid", [0, 1000], ids=["root of a container", "a user in a scope"])
def test_a_delegated_cgroup_is_emptied_before_its_controllers_are_switched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    Kernel(tmp_path, "4711\n4712", monkeypatch)
    groups = cgroups.prepare(Layout(2, unified=tmp_path), uid)
    assert dict(groups.problems) == {}
    assert dict(groups.bases) == dict.fromkeys(cgroups.CONTROLLERS, tmp_path / "capsule")
    assert (tmp_path / "capsule-server/cgroup.procs").read_text() == "4711\n4712\n"
    assert (tmp_path / "cgroup.type").read_text() == "domain"
    assert cgroups.prepare(Layout(2, unified=tmp_path), uid) == groups  # a server after it


def test_a_cgroup_that_cannot_be_emptied_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernel(tmp_path, "4711", monkeypatch)
    stays = tmp_path / "capsule-server"
    stays.mkdir()
    (stays / "cgroup.procs").unlink()
    (stays / "cgroup.procs").mkdir()
    groups = cgroups.prepare(Layout(2, unified=tmp_path), 1000)
    assert "processes in" in groups.problems["memory"] and not groups.bases
    assert (tmp_path / "cgroup.type").read_text() == "domain"
