"""What doctor and a server's log say about the scope that systemd gave, or did not give."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.model import Isolation
from capsule.providers.contract import Capabilities
from capsule.providers.local import enforcement, findings, scope
from capsule.providers.local.cgroups import CONTROLLERS, Cgroups
from capsule.providers.local.probe import Facts, Try
from capsule.providers.local.scope import Scope
from capsule.providers.local.settings import LocalSettings

SCOPE = Scope("/user.slice/user-54321.slice/user@54321.service/app.slice/capsule-7-ab.scope")
BASES = dict.fromkeys(CONTROLLERS, Path("/cg/capsule"))
SILENT = Scope(why="no manager answers at /run/user/54321/bus")


def facts(groups: Cgroups, uid: int = 54321) -> Facts:
    worked = ("userns", "mounts", "overlay", "seccomp", "loop", "layers")
    return Facts(
        uid=uid,
        gid=uid,
        kernel="6.12",
        tries={**dict.fromkeys(worked, Try(True)), "landlock": Try(True, 6)},
        cgroups=groups,
        mkfs=None,
        uid_ranges=uid == 0,
        cpus=(0,),
        sysctls={},
    )


def found(groups: Cgroups, uid: int = 54321) -> Capabilities:
    settings = LocalSettings(Path("/data"), Path("/run"), Path("/agent"))
    return findings.capabilities(facts(groups, uid), settings, "tmpfs")


def row(of: Capabilities) -> tuple[bool, str, str]:
    (cgroups,) = (each for each in of.findings if each.name == "cgroups")
    return cgroups.ok, cgroups.detail, cgroups.fix


def test_without_a_scope_the_log_says_what_does_not_hold_and_what_helps() -> None:
    problems = dict.fromkeys(CONTROLLERS, f"systemd gave no scope: {SILENT.why}")
    said = found(Cgroups(0, problems=problems, fix="log in through PAM", scope=SILENT))
    assert said.warnings == (
        "not enforced as meant: memory, cpus; systemd gave no scope for sandboxes: "
        "no manager answers at /run/user/54321/bus; fix: log in through PAM",
    )
    detail = f"none usable; systemd gave no scope: {SILENT.why}"
    assert row(said) == (False, detail, "log in through PAM")
    gaps = {each.what: each.fix for each in said.unenforced}
    assert gaps["memory"] == gaps["cpus"] == "log in through PAM"


@pytest.mark.parametrize(("uid", "lingers", "warned"), [(54321, 0, 1), (54321, 1, 0), (0, 0, 0)])
def test_who_does_not_linger_is_told_what_a_logout_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, lingers: int, warned: int
) -> None:
    monkeypatch.setattr(scope, "LINGER", tmp_path)
    monkeypatch.setattr(findings, "SYSTEMD", tmp_path)
    if lingers:
        (tmp_path / "54321").touch()
    said = found(Cgroups(2, BASES, scope=SCOPE), uid)
    assert len(said.warnings) == warned
    assert all("loginctl enable-linger 54321" in each for each in said.warnings)


def test_doctor_names_the_scope() -> None:
    assert row(found(Cgroups(2, BASES, scope=SCOPE))) == (
        True,
        "version 2: memory, pids, cpu; in capsule-7-ab.scope, a scope of the user's systemd",
        "",
    )
    roots = row(found(Cgroups(2, BASES, scope=SCOPE), 0))[1]
    assert roots.endswith("; in capsule-7-ab.scope, a scope of systemd")
    outside = found(Cgroups(2, BASES, scope=SILENT), 0)
    assert "not in systemd's care" in row(outside)[1] and len(outside.warnings) == 1
    assert found(Cgroups(2, BASES)).warnings == ()


def test_the_fix_for_disks_of_memory_is_one_that_an_ordinary_user_can_apply() -> None:
    groups = Cgroups(2, BASES, scope=SCOPE)
    (gap,) = enforcement.unenforced(facts(groups), Isolation.NAMESPACES, "tmpfs")
    assert gap.what == "memory" and "smaller `disk`" in gap.fix
