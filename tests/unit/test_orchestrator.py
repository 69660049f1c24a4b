"""Sessions from Python, without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.errors import NotFoundError, UnavailableError
from capsule.orchestrator import UnifiedManager
from tests.support import clean_env
from tests.support.folders import server_folder

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

# From the first description of the project; only the package has another name.
EXAMPLE = """\
from orchestrator.lifecycle import Lifecycle

lifecycle = Lifecycle(
    storage_path="./storage",
    runtime_path="./sandbox_runtime",
    e2b_api_key="your_key"
)

# Start session
session = lifecycle.start(
    agent_config={"type": "code_executor"},
    environment="Python3",
    provider="e2b"
)

# Execute code
result = lifecycle.sandbox_mgr.execute_code(
    session_id=session["session_id"],
    code="print('Hello World')"
)

# Cleanup
lifecycle.stop(session["session_id"], session["sandbox_id"])
"""


@pytest.fixture
def home(agent_binary: Path) -> Iterator[Path]:
    with server_folder("co-", data="s/server") as path:
        yield path


@pytest.fixture
def manager(home: Path) -> Iterator[UnifiedManager]:
    with UnifiedManager(home / "s", home / "r", drain="delete") as made:
        yield made


def run(code: str, home: Path) -> str:
    env = clean_env(PYTHONDONTWRITEBYTECODE="1")
    argv = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_example_does_what_it_says(home: Path) -> None:
    code = EXAMPLE.replace("from orchestrator", "from capsule.orchestrator")
    printed = run(code + "print(sorted(session), result)", home)
    assert printed.startswith(
        "['provider', 'sandbox_id', 'session_id', 'url'] {'stdout': 'Hello World\\n'"
    )
    assert list((home / "sandbox_runtime" / "boxes").iterdir()) == []
    assert (home / "storage" / "sessions.db").exists()
    assert (home / "storage" / "artifacts").is_dir()


def test_the_same_interface_for_every_provider(manager: UnifiedManager) -> None:
    made = manager.start_sandbox("mine", "Python3", provider="e2b")
    assert made["session_id"] == "mine" and made["provider"] == "local" and made["url"] == ""
    result = manager.execute_code("mine", "open('artifacts/a', 'w').write('kept'); 6 * 7")
    assert list(result)[:4] == ["stdout", "stderr", "results", "artifacts"]
    assert result["results"] == [{"is_main": True, "text": "42"}]
    assert manager.read_artifact("mine", result["artifacts"][0]["id"]) == b"kept"
    manager.write_file("mine", "f.txt", "text")
    names = [each["name"] for each in manager.list_files("mine")["files"]]
    assert names == ["artifacts", "f.txt"]
    assert manager.close_sandbox("mine")["state"] == "closed"
    assert manager.reopen_sandbox("mine")["state"] == "open"
    assert manager.execute_code("mine", "open('f.txt').read()")["results"][0]["text"] == "'text'"
    with pytest.raises(NotFoundError, match="provider 'nowhere'"):
        manager.start_sandbox("other", "Python3", provider="nowhere")
    assert manager.stop_sandbox("mine")["deleted"] is True
    assert manager.get("mine")["state"] == "deleted"


def test_a_session_outlives_its_manager(home: Path) -> None:
    with UnifiedManager(home / "s", home / "r") as manager:
        manager.start_sandbox("mine", "Python3")
        manager.execute_code("mine", "x = 42")
    with pytest.raises(UnavailableError, match="it is closed"):
        manager.get("mine")
    with UnifiedManager(home / "s", home / "r", drain="delete") as manager:
        assert manager.execute_code("mine", "x")["results"][0]["text"] == "42"
