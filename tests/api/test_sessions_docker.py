"""Stateful sessions with containers as sandboxes."""

from __future__ import annotations

import httpx
import pytest

from capsule_sdk import CapsuleClient
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import real_server

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_session_in_a_container_is_closed_and_opened_again(
    engine: EngineApi, images: Images
) -> None:
    settings = {"PROVIDER": "docker", "DOCKER_HOST": engine.url, "DOCKER_PULL": "never"}
    settings["DOCKER_IMAGE"] = images.python
    with real_server(**settings) as server, CapsuleClient(server.url) as client:
        sessions = client.sessions
        made = sessions.create(agent="code_executor")
        assert made.provider == "docker"
        id = made.session_id
        did = sessions.execute(id, "open('artifacts/a.txt', 'w').write('left')\n6 * 7")
        assert did.text == "42"
        assert httpx.get(did.artifacts[0].url).text == "left"
        sessions.write_file(id, "notes.txt", "hello")
        sessions.close(id)
        assert sessions.reopen(id).provider == "docker"
        assert sessions.read_file(id, "notes.txt") == b"hello"
        sessions.delete(id, purge=True)
