"""The files in deploy/ name settings that exist, and are what their readers accept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
import yaml

from capsule.config import Config
from tests.support import component_missing
from tests.support.servers import real_server

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OF_THE_COMPOSE_FILE = {"CAPSULE_NAME"}


def test_every_setting_that_is_named_exists() -> None:
    known = {f"CAPSULE_{field.name.upper()}" for field in fields(Config)}
    for path in [*DEPLOY.rglob("*"), ROOT / "docs" / "deploy.md"]:
        if path.is_file():
            named = set(re.findall(r"CAPSULE_[A-Z_]+", path.read_text()))
            assert named <= known | OF_THE_COMPOSE_FILE, path


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        component_missing("systemd-analyze is not installed")
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
    assert [line for line in said.stderr.splitlines() if "capsule.service" in line] == []


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


def test_neither_the_server_nor_nginx_holds_the_network_of_the_other() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {services[name]["network_mode"] for name in ("capsule", "nginx")} == {"service:network"}
    assert [name for name, service in services.items() if "ports" in service] == ["network"]


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
    """All that the dashboard and the alarms ask Prometheus."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    board = json.loads((DEPLOY / "grafana" / "capsule.json").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [each["expr"] for panel in board["panels"] for each in panel.get("targets", ())]
    asked += [each["query"]["query"] for each in board["templating"]["list"] if "refresh" in each]
    return asked


def offered(text: str) -> set[str]:
    """Every name of a sample that /metrics may have, also of those that have none yet."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + end for end in ends}
    return found


@pytest.mark.real
def test_the_dashboard_and_the_alarms_use_only_metrics_that_exist() -> None:
    with real_server() as server:
        known = offered(httpx.get(f"{server.url}/metrics").text)
    named = {name for text in expressions() for name in re.findall(r"capsule_[a-z_]+", text)}
    assert len(named) > 20
    assert named <= known


@pytest.mark.real
def test_every_label_that_is_asked_for_exists() -> None:
    with real_server() as server:
        httpx.post(f"{server.url}/v1/sandboxes", json={"template": "bash"}).raise_for_status()
        text = httpx.get(f"{server.url}/metrics").text
    labels = set(re.findall(r'[{,]([a-z_]+)="', text)) | {"instance", "job", "le"}
    shelf = {"provider", "template", "runtime"}  # of a pool, which this server has not
    for expression in expressions():
        used = re.findall(r"([a-z_]+)(?:=~?|!=)\"", expression)
        used += re.split(r", ?", ",".join(re.findall(r"by \(([a-z_, ]+)\)", expression)))
        assert set(filter(None, used)) <= labels | shelf | {"reason", "how"}, expression
