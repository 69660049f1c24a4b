"""The same sessions in containers: one interface, another provider."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from capsule.orchestrator import UnifiedManager
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import real_server

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_session_in_a_container_is_kept_and_opened_again(
    engine: EngineApi, images: Images
) -> None:
    settings = {
        "DOCKER_HOST": engine.url,
        "DOCKER_PULL": "never",
        "DOCKER_IMAGE": images.python,
    }
    with real_server(**settings) as server:
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as http:
            wish = {"environment": "python:latest", "provider": "docker", "session_id": "s"}
            made = http.post("/api/sessions", json=wish)
            assert made.status_code == 201, made.text
            assert made.json()["provider"] == "docker"

            def execute(code: str) -> dict[str, Any]:
                body = {"session_id": "s", "code": code}
                answer = http.post("/api/e2b/execute", json=body)
                assert answer.status_code == 200, answer.text
                found: dict[str, Any] = answer.json()
                return found

            did = execute("x = 6\nopen('artifacts/a.txt', 'w').write('left')\nx * 7")
            assert did["results"][0]["text"] == "42"
            assert http.get(did["artifacts"][0]["url"]).text == "left"
            closed = http.post("/api/sessions/s/close").json()
            assert closed["state"] == "closed", closed
            assert closed["workspace"]["kept"] in ("snapshot", "archive")
            opened = http.post("/api/sessions/s/reopen").json()
            assert opened["provider"] == "docker", opened
            assert execute("open('artifacts/a.txt').read()")["results"][0]["text"] == "'left'"
            assert http.delete("/api/sessions/s", params={"purge": "true"}).status_code == 200


def test_the_manager_has_the_same_methods_for_containers(engine: EngineApi, images: Images) -> None:
    home = Path(tempfile.mkdtemp(prefix="co-", dir="/tmp"))
    home.chmod(0o711)
    own = {"docker_host": engine.url, "docker_pull": "never", "docker_image": images.python}
    try:
        with UnifiedManager(home / "s", home / "r", drain="delete", **own) as manager:
            made = manager.start_sandbox("s", "python:latest", provider="docker")
            assert made["provider"] == "docker"
            assert manager.execute_code("s", "print('hi')")["stdout"] == "hi\n"
            assert manager.stop_sandbox("s", made["sandbox_id"])["deleted"] is True
    finally:
        shutil.rmtree(home, ignore_errors=True)
