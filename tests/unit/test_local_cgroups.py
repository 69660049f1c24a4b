"""How cgroups are found and made ready, for layouts this machine need not have."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from capsule.model import MIB, Limits
from capsule.providers.local import cgroups
from capsule.providers.local.cgroups import Layout
from capsule.providers.local.scope import Scope

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
    assert "that its user owns" in undelegated.fix
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
        self._write(path / "cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc")
        self._write(path / "cgroup.type", "domain")

    def _make(self, path: Path, *_: object, exist_ok: bool = False) -> None:
        known = path.is_dir()
        self._mkdir(path, exist_ok=exist_ok)
        if not known:
            self._populate(path)

    def _set(self, path: Path, text: str) -> int:
        cgroup, type_ = path.parent, path.parent / "cgroup.type"
        root = not type_.exists()
        threaded = not root and "threaded" in type_.read_text()
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
            if (cgroup / "cgroup.procs").read_text() and not root:
                if text == "+memory":
                    raise OSError(errno.EBUSY, "Device or resource busy")
                self._write(type_, "domain threaded")
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


# As /proc/self/cgroup had them on Debian 13 (systemd 257), and which of them have user.delegate.
USERS = "/user.slice/user-1000.slice"
SESSION = f"{USERS}/session-1.scope"
APPS = f"{USERS}/user@1000.service/app.slice"
SERVICE = f"{APPS}/capsule.service"
SCOPE = f"{APPS}/run-r2f4a.scope"
UNIT = "/system.slice/capsule.service"
CLAIMED = f"{APPS}/capsule-77-0a1b2c3d.scope"
NOBODY = Scope(why="no manager answers at /run/user/1000/bus")


class Systemd(Kernel):
    """A tree of units, and a manager that gives scopes. The server is process 4711."""

    def __init__(self, top: Path, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(top, "1", monkeypatch)
        self.top, self.delegated, self.asked = top, {f"{USERS}/user@1000.service"}, 0
        self._at(own, "4711")
        monkeypatch.setattr(os, "getxattr", self._getxattr)

    def _at(self, own: str, process: str) -> Path:
        path = self.top
        for name in own.strip("/").split("/"):
            path /= name
            if not path.exists():
                self._make(path)
        self._write(path / "cgroup.procs", process)
        return path

    def _getxattr(self, path: Path, name: str) -> bytes:
        if name == "user.delegate" and f"/{path.relative_to(self.top)}" in self.delegated:
            return b"1"
        raise OSError(errno.ENODATA, "No data available")

    def give(self, begun_in: str) -> Scope:
        self.asked += 1
        self._at(CLAIMED, "77")
        return Scope(CLAIMED)

    def refuse(self, begun_in: str) -> Scope:
        self.asked += 1
        return NOBODY


@pytest.mark.parametrize(
    ("own", "delegated", "base", "asked"),
    [
        pytest.param(SESSION, [], CLAIMED, 1, id="a login session"),
        pytest.param("/system.slice/cron.service", [], CLAIMED, 1, id="cron"),
        pytest.param(SCOPE, [], CLAIMED, 1, id="a terminal's scope"),
        pytest.param(SCOPE, [SCOPE], SCOPE, 0, id="a delegated scope"),
        pytest.param(f"{SCOPE}/capsule-server", [SCOPE], SCOPE, 0, id="the second server in it"),
        pytest.param(f"{UNIT}/server", [UNIT], UNIT, 0, id="a unit with DelegateSubgroup"),
        pytest.param(UNIT, [UNIT], CLAIMED, 1, id="a unit without"),
        pytest.param(f"{USERS}/user@1000.service/a.scope", [], CLAIMED, 1, id="a slice's child"),
    ],
)
@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "user"])
def test_boxes_live_in_a_delegated_unit_or_in_a_scope_that_systemd_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    own: str,
    delegated: list[str],
    base: str,
    asked: int,
) -> None:
    systemd = Systemd(tmp_path, own, monkeypatch)
    systemd.delegated.update(delegated)
    groups = cgroups.prepare(Layout(2, unified=tmp_path, own=own), uid, systemd.give)
    assert dict(groups.bases) == dict.fromkeys(
        cgroups.CONTROLLERS, tmp_path / base.lstrip("/") / "capsule"
    )
    assert systemd.asked == asked
    assert (tmp_path / base.lstrip("/") / "cgroup.procs").read_text() == ""
    if asked:  # the launcher alone was moved
        assert (tmp_path / own.lstrip("/") / "cgroup.procs").read_text() == "4711"
        assert groups.scope == Scope(CLAIMED) and groups.scope.unit == "capsule-77-0a1b2c3d.scope"


def test_a_delegated_scope_without_a_controller_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd = Systemd(tmp_path, SCOPE, monkeypatch)
    systemd.delegated.add(SCOPE)
    (tmp_path / SCOPE[1:] / "cgroup.controllers").write_bytes(b"memory pids")
    assert cgroups.prepare(Layout(2, unified=tmp_path, own=SCOPE), 1000, systemd.give).scope


@pytest.mark.parametrize(
    ("uid", "own", "delegated", "base"),
    [
        pytest.param(1000, SERVICE, [SERVICE], SERVICE, id="a user's service"),
        pytest.param(0, UNIT, [UNIT], UNIT, id="a unit"),
        pytest.param(0, "/user.slice/user-0.slice/session-2.scope", [], "", id="root by hand"),
    ],
)
def test_where_nobody_gives_a_scope_the_next_best_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    own: str,
    delegated: list[str],
    base: str,
) -> None:
    systemd = Systemd(tmp_path, own, monkeypatch)
    systemd.delegated.update(delegated)
    (tmp_path / "cgroup.type").unlink()  # the root of the hierarchy
    groups = cgroups.prepare(Layout(2, unified=tmp_path, own=own), uid, systemd.refuse)
    assert groups.bases["memory"] == tmp_path / base.lstrip("/") / "capsule"
    assert (groups.problems, groups.scope) == ({}, NOBODY)


def test_a_users_scope_that_its_manager_calls_delegated_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no xattr; but the next server finds the cgroups that this one made below it."""
    systemd = Systemd(tmp_path, SCOPE, monkeypatch)
    groups = cgroups.prepare(Layout(2, unified=tmp_path, own=SCOPE), 1000, Scope)
    assert groups.bases["memory"] == tmp_path / SCOPE[1:] / "capsule"
    leaf = f"{SCOPE}/capsule-server"
    assert (tmp_path / leaf[1:] / "cgroup.procs").read_text() == "4711\n"
    second = cgroups.prepare(Layout(2, unified=tmp_path, own=leaf), 1000, systemd.give)
    assert (second.bases, systemd.asked) == (groups.bases, 0)


def test_an_ordinary_user_whom_nobody_answers_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd = Systemd(tmp_path, SESSION, monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    groups = cgroups.prepare(Layout(2, unified=tmp_path, own=SESSION), 54321, systemd.refuse)
    assert not groups.bases and set(groups.problems) == set(cgroups.CONTROLLERS)
    assert "no manager answers at /run/user/1000/bus" in groups.problems["memory"]
    assert "sudo loginctl enable-linger 54321" in groups.fix
    assert (tmp_path / SESSION[1:] / "cgroup.procs").read_text() == "4711"
