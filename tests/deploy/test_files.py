"""The files in deploy/ name settings that exist, and are what their readers accept."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from capsule.config import Config
from tests.support import component_missing

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
        if any("docker.sock" in volume for volume in service["volumes"])
    }
    assert with_socket == {"capsule"}
    assert services["nginx"]["network_mode"] == "service:capsule"
    for service in services.values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume


@pytest.mark.parametrize("path", ["deploy/Dockerfile", "deploy/compose.yaml"])
def test_it_copies_only_what_there_is(path: str) -> None:
    for name in re.findall(r"(?:/src/|dockerfile: )([\w./-]+)", (ROOT / path).read_text()):
        assert (ROOT / name).exists(), name
