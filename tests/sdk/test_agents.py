"""The agents of examples/ at work in real sandboxes; only the model follows a script."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, clean_env
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def seen(frameworks: Path, server: RealServer) -> Any:
    """What scripted_agents.py prints."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("sdk/python/src", "examples"))
    kept = str(frameworks.parents[1] / "bytecode")  # beside the frameworks, not in the clone
    env = clean_env(PYTHONPATH=path, PYTHONPYCACHEPREFIX=kept, LANGSMITH_TRACING="false")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(frameworks), str(ROOT / "tests/sdk/scripted_agents.py"), server.url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_langgraph_agent_works_in_a_sandbox(seen: Any) -> None:
    assert seen["langgraph"] == {
        "tools": ["bash"],
        "told": [
            "\n[exit code 0]",
            "25\n[exit code 0]",
            "[capsule: timed out after 0.2 seconds]\n[exit code 124]",
        ],
        "last": "found: [capsule: timed out after 0.2 seconds]\n[exit code 124]",
        "ask": "you asked: hello?",
    }


def test_a_sandbox_as_a_backend_of_deepagents(seen: Any) -> None:
    deep = dict(seen["deepagents"])
    written, edited, ran, read, listed, found = deep.pop("told")
    assert "/workspace/a.py" in written and "/workspace/a.py" in edited
    assert ran.startswith("48\nerr\n") and "exit code 4" in ran
    assert "print(6 * 8)" in read
    assert "/workspace/a.py" in listed and "/workspace/a.py" in found
    assert deep == {
        "id": True,
        "file": "print(6 * 8)\n",
        "sent": [None, "invalid_path", "permission_denied"],
        "got": ["00ff", "file_not_found"],
        "late": [True, "[timed out after 1 seconds]"],
    }


def test_without_a_model_an_example_says_what_to_set(seen: Any) -> None:
    assert all(said.startswith("set MODEL=PROVIDER:NAME") for said in seen["without"])
