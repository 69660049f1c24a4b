"""What `doctor` advises, from facts that machines and containers were found to have."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from capsule.providers.local import apparmor, remedies
from capsule.providers.local.findings import capabilities
from capsule.providers.local.probe import Facts, Try
from capsule.providers.local.settings import LocalSettings
from capsule.surroundings import Kind, Surroundings
from tests.support import ROOT
from tests.support.apparmor import parser
from tests.unit.test_local_plan import NO_GROUPS, facts

REFUSED = Try(False, stage="unshare", errno=1)
MASKED = Try(False, stage="proc", errno=1)
PROFILE = "--security-opt seccomp=deploy/seccomp/capsule.json"
UNMASKED = "--security-opt systempaths=unconfined"
RESTRICTED = {"kernel.apparmor_restrict_unprivileged_userns": 1}


def host(
    *,
    root: bool = False,
    abi: int = 7,
    tries: Mapping[str, Try] | None = None,
    sysctls: Mapping[str, int] | None = None,
    **around: object,
) -> Facts:
    found = facts(root=root, groups=NO_GROUPS, abi=abi)
    surroundings = Surroundings(**around)  # type: ignore[arg-type]
    return dataclasses.replace(
        found,
        tries={**found.tries, "layers": REFUSED, **(tries or {})},
        sysctls=sysctls or {},
        around=surroundings,
        uid_ranges=root and not surroundings.rootless,
    )


NO_USERNS = {"userns": REFUSED, "mounts": REFUSED}


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        # The numbers are those of the table in docs/containers.md.
        (
            host(root=True, tries=NO_USERNS, kind=Kind.DOCKER, filtered=True, masked_proc=True),
            f"docker run --user 1000:1000 {PROFILE} {UNMASKED} …",
        ),
        (
            host(tries=NO_USERNS, kind=Kind.DOCKER, filtered=True, masked_proc=True),
            f"docker run {PROFILE} {UNMASKED} …",
        ),
        (
            host(tries={"mounts": MASKED}, kind=Kind.DOCKER, filtered=True, masked_proc=True),
            f"docker run {UNMASKED} …",
        ),
        (
            host(root=True, tries={"mounts": MASKED}, kind=Kind.DOCKER, masked_proc=True),
            f"docker run --user 1000:1000 {UNMASKED} …",
        ),
        (
            host(root=True, admin=True, kind=Kind.DOCKER, filtered=True),
            "docker run --security-opt seccomp=unconfined …",
        ),
        (
            host(
                root=True,
                rootless=True,
                tries={"mounts": MASKED},
                kind=Kind.PODMAN,
                filtered=True,
                masked_proc=True,
            ),
            f"podman run {PROFILE} --security-opt unmask=ALL …",
        ),
        (
            host(tries=NO_USERNS, kind=Kind.KUBERNETES, filtered=True, masked_proc=True),
            "give the pod the securityContext of deploy/kubernetes/pod.yaml: seccompProfile: "
            "{type: Localhost, localhostProfile: capsule.json}; procMount: Unmasked, with "
            "hostUsers: false",
        ),
        (
            host(
                tries=NO_USERNS,
                kind=Kind.DOCKER,
                filtered=True,
                masked_proc=True,
                apparmor="docker-default",
            ),
            f"docker run {PROFILE} --security-opt apparmor=unconfined {UNMASKED} …",
        ),
        (
            host(
                tries=NO_USERNS,
                kind=Kind.DOCKER,
                filtered=True,
                masked_proc=True,
                apparmor="docker-default",
                sysctls=RESTRICTED,
            ),
            f"docker run {PROFILE} --security-opt apparmor=capsule-agent {UNMASKED} …, with "
            "deploy/apparmor/capsule-agent loaded on the host",
        ),
        (host(tries=NO_USERNS, kind=Kind.GVISOR), remedies.GVISOR),
        (
            host(tries=NO_USERNS, sysctls={"user.max_user_namespaces": 0}, kind=Kind.DOCKER),
            "on the container's host: sysctl -w user.max_user_namespaces=15000",
        ),
        (
            host(tries=NO_USERNS, sysctls={"user.max_user_namespaces": 0}),
            "sysctl -w user.max_user_namespaces=15000",
        ),
    ],
)
def test_the_advice_is_in_words_of_whoever_decides(found: Facts, advice: str) -> None:
    assert remedies.namespaces(found) == advice


def test_on_ubuntu_the_agent_alone_is_given_user_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ubuntu 24.04 with its own kernel: 6.8, Landlock 4."""
    monkeypatch.setattr(sys, "argv", ["/opt/cap sule/.venv/bin/capsule", "serve"])
    ubuntu = host(abi=4, tries={"mounts": MASKED}, sysctls=RESTRICTED)
    install = (
        "'/opt/cap sule/.venv/bin/capsule' doctor --apparmor | "
        "sudo sh -c 'tee /etc/apparmor.d/capsule-agent | apparmor_parser -r'"
    )
    assert remedies.namespaces(ubuntu) == install
    assert remedies.first(ubuntu) == install
    settings = LocalSettings(tmp_path, tmp_path, tmp_path / "agent")
    found = capabilities(ubuntu, settings, None)
    assert not found.usable
    assert [each.fix for each in found.findings if each.name == "level namespaces"] == [install]


def test_root_is_not_told_of_apparmor() -> None:
    assert remedies.first(host(root=True, sysctls=RESTRICTED)) == ""


@pytest.mark.parametrize("kind", [Kind.DOCKER, Kind.PODMAN, Kind.KUBERNETES, Kind.GVISOR])
@pytest.mark.parametrize("root", [True, False])
def test_no_advice_for_a_container_is_a_hosts(kind: Kind, root: bool, tmp_path: Path) -> None:
    inside = host(root=root, tries=NO_USERNS, kind=kind, filtered=True, masked_proc=True)
    settings = LocalSettings(tmp_path, tmp_path, tmp_path / "agent")
    found = capabilities(inside, settings, "dir")
    assert all(each.ok or each.fix for each in found.findings)
    fixes = [each.fix for each in found.findings] + [each.fix for each in found.unenforced]
    for words in (
        "mkdir",
        "chown",
        "loop devices",
        "outside a container",
        "run the server as root",
    ):
        assert [fix for fix in fixes if words in fix] == []


@pytest.mark.needs("apparmor")
@pytest.mark.parametrize(
    "agent",
    ["/opt/capsule/agent/build/capsule-agent", "/home/ann/my venv/{x}/capsule-agent", "/a,b#c/d"],
)
def test_apparmor_takes_the_profile_that_is_printed(agent: str) -> None:
    parse(apparmor.profile(Path(agent)))


@pytest.mark.needs("apparmor")
def test_apparmor_takes_the_profile_that_is_shipped() -> None:
    parse((ROOT / "deploy/apparmor/capsule-agent").read_text())


def parse(text: str) -> None:
    said = subprocess.run(parser(), input=text, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    broken = subprocess.run(
        parser(), input=text.replace("userns", "nothing"), capture_output=True, text=True
    )
    assert broken.returncode != 0
