"""The files in deploy/ name settings and metrics that exist, and are accepted by their readers."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from capsule.config import Config
from capsule.providers.local.seccomp import lint, load_profile
from tests.support import ROOT
from tests.support.servers import RealServer

DEPLOY = ROOT / "deploy"
OF_THE_COMPOSE_FILE = {"CAPSULE_NAME"}


def test_every_setting_that_is_named_exists() -> None:
    known = {f"CAPSULE_{field.name.upper()}" for field in fields(Config)}
    for path in [*DEPLOY.rglob("*"), ROOT / "docs" / "deploy.md"]:
        if path.is_file():
            named = set(re.findall(r"CAPSULE_[A-Z_]+", path.read_text()))
            assert named <= known | OF_THE_COMPOSE_FILE, path


@pytest.mark.needs("systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "capsule.service").read_text()
    program = "/opt/capsule/.venv/bin/capsule serve"
    assert program in text
    (tmp_path / "capsule.service").write_text(text.replace(program, "/bin/true"))
    said = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "capsule.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    said_of_ours = [line for line in said.stderr.splitlines() if "capsule.service" in line]
    newer = "'DelegateSubgroup' in section"  # ignored before version 254
    assert [line for line in said_of_ours if newer not in line] == []


def test_the_compose_file_gives_the_engine_to_the_server_alone() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    with_socket = {
        name
        for name, service in services.items()
        if any("docker.sock" in volume for volume in service.get("volumes", ()))
    }
    assert with_socket == {"capsule"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume


def test_the_network_of_the_compose_file_has_its_own_container() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {services[name]["network_mode"] for name in ("capsule", "nginx")} == {"service:network"}
    assert [name for name, service in services.items() if "ports" in service] == ["network"]


def test_the_profile_for_containers_allows_what_sandboxes_are_made_of() -> None:
    """All that programs may do, whose own profile comes on top, and what makes a sandbox."""
    text = (DEPLOY / "seccomp" / "capsule.json").read_text()
    allowed = names_allowed(json.loads(text))
    own = names_allowed(load_profile("default"))
    needed = {"mount", "umount2", "pivot_root", "unshare", "setns", "clone", "sethostname"}
    assert allowed >= own | needed
    dangerous = {
        "add_key", "bpf", "clone3", "finit_module", "init_module", "io_uring_setup", "kexec_load",
        "keyctl", "open_by_handle_at", "perf_event_open", "process_vm_readv", "ptrace", "reboot",
        "userfaultfd",
    }  # fmt: skip
    assert allowed & dangerous == set()
    assert lint(json.loads(text)) == []


def names_allowed(profile: dict[str, Any]) -> set[str]:
    rules = [rule for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    return {name for rule in rules for name in rule["names"]}


def test_the_pod_has_no_capability_and_names_the_profile() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes" / "pod.yaml").read_text())["spec"]
    profile = pod["securityContext"]["seccompProfile"]["localhostProfile"]
    assert (DEPLOY / "seccomp" / profile).exists()
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_an_image_gets_nothing_that_git_ignores() -> None:
    kept_out = set((ROOT / ".dockerignore").read_text().splitlines())
    for line in (ROOT / ".gitignore").read_text().splitlines():
        name = line.strip("/")
        assert kept_out & {name, f"**/{name}"}, line


@pytest.mark.parametrize("path", ["deploy/Dockerfile", "deploy/compose.yaml"])
def test_it_copies_only_what_there_is(path: str) -> None:
    for name in re.findall(r"(?:/src/|dockerfile: )([\w./-]+)", (ROOT / path).read_text()):
        assert (ROOT / name).exists(), name


def expressions() -> list[str]:
    """The queries of the dashboard and the alarms."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    board = json.loads((DEPLOY / "grafana" / "capsule.json").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [each["expr"] for panel in board["panels"] for each in panel.get("targets", ())]
    asked += [each["query"]["query"] for each in board["templating"]["list"] if "refresh" in each]
    return asked


def offered(text: str) -> set[str]:
    """Every name that a sample of /metrics may have."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + end for end in ends}
    return found


@pytest.mark.real
def test_queries_use_metrics_and_labels_that_exist(server: RealServer) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        made = http.post("/v1/sandboxes", json={"template": "bash"}).json()
        text = http.get("/metrics").text
        http.delete(f"/v1/sandboxes/{made['id']}")
    named = {name for query in expressions() for name in re.findall(r"capsule_[a-z_]+", query)}
    assert len(named) > 20
    assert named <= offered(text)
    labels = set(re.findall(r'[{,]([a-z_]+)="', text)) | {"instance", "job", "le"}
    labels |= {"provider", "template", "runtime", "reason", "how"}  # of a pool, which it has not
    for query in expressions():
        used = re.findall(r"([a-z_]+)(?:=~?|!=)\"", query)
        used += re.split(r", ?", ",".join(re.findall(r"by \(([a-z_, ]+)\)", query)))
        assert set(filter(None, used)) <= labels, query
