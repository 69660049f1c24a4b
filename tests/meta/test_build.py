"""What is installed: an agent that is found, static, and in the wheel."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from capsule import agentbin
from capsule.errors import NotFoundError
from tests.support import ROOT


def is_static(binary: bytes) -> bool:
    """No PT_INTERP among the program headers of a 64-bit little-endian ELF file."""
    assert binary[:6] == b"\x7fELF\x02\x01"
    offset = struct.unpack_from("<Q", binary, 32)[0]
    size, count = struct.unpack_from("<HH", binary, 54)
    types = [struct.unpack_from("<I", binary, offset + n * size)[0] for n in range(count)]
    return 3 not in types


def test_the_agent_is_one_static_binary(agent_binary: Path) -> None:
    assert is_static(agent_binary.read_bytes())


def test_the_agent_is_found_or_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "agent"
    own.write_text("#!/bin/sh\n")
    with pytest.raises(NotFoundError, match="not an executable file"):
        agentbin.find({"CAPSULE_AGENT": str(own)})
    own.chmod(0o755)
    assert agentbin.find({"CAPSULE_AGENT": str(own)}) == own
    monkeypatch.setattr(agentbin, "PACKAGED", tmp_path / "no")
    monkeypatch.setattr(agentbin, "BUILT", tmp_path / "neither")
    with pytest.raises(NotFoundError) as caught:
        agentbin.find({})
    assert caught.value.hint is not None and "make agent" in caught.value.hint


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_is_self_contained(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "build", "-q", "--no-isolation", "--wheel", "-o", tmp_path, ROOT],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        agent = archive.getinfo("capsule/_bin/capsule-agent")
        assert agent.external_attr >> 16 & 0o111, "not executable"
        assert is_static(archive.read(agent))
    assert "capsule/templates/python.yaml" in names
    assert "capsule/profiles/default.json" in names
    assert "capsule_sdk/__init__.py" in names


@pytest.mark.slow
def test_setup_says_what_is_missing_where_there_is_no_python(tmp_path: Path) -> None:
    # A PATH with the tools of the script, and no Python in it but one that is too old.
    for tool in ("bash", "dirname", "env", "rm"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    env = {"PATH": str(tmp_path), "VENV": str(tmp_path / "venv"), "PYTHON": str(old)}
    ended = subprocess.run(
        [str(ROOT / "scripts/setup"), "run"], env=env, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert "older than 3.11" in ended.stderr
    assert not os.path.exists(tmp_path / "venv")


@pytest.mark.slow
@pytest.mark.needs("musl")
@pytest.mark.timeout(300)
def test_the_agent_builds_against_musl_too(tmp_path: Path) -> None:
    target = tmp_path / "capsule-agent"
    built = subprocess.run(
        [sys.executable, ROOT / "agent/build_agent.py", target],
        env={**os.environ, "CC": "musl-gcc"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "musl-gcc" in built.stderr
    assert is_static(target.read_bytes())
    env = {**os.environ, "CAPSULE_AGENT": str(target)}
    command = [sys.executable, "-c", "from capsule.cli.main import main; main()", "run", "print(3)"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.stdout == "3\n", ran.stderr
