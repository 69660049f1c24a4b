"""What a template runs in each new sandbox; and a build without an Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
from e2b import Template
from e2b.exceptions import BuildException

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

TEMPLATE = """
root: host
default_language: sh
languages: {sh: {file: ".capsule-{id}.sh", command: [sh, "{file}"]}}
"""


@pytest.fixture(scope="module")
def alone() -> Iterator[RealServer]:
    """A server with templates that run something at their start, and no Engine."""
    with real_server(DOCKER_HOST="unix:///nonexistent/engine.sock") as server:
        folder = server.base / "data" / "templates"
        folder.mkdir(exist_ok=True)
        started = {
            "started": "prepare: echo 1 >> n\nstart: echo up > up; sleep 600\nready: test -e up\n",
            "never": "prepare: echo 'no luck' >&2; exit 3\n",
        }
        for name, more in started.items():
            (folder / f"{name}.yaml").write_text(TEMPLATE + more)
        yield server


def test_a_sandbox_is_ready_when_its_template_says_so(alone: RealServer) -> None:
    with httpx.Client(base_url=alone.url, timeout=60) as http:
        made = http.post("/v1/sandboxes", json={"template": "started"}).json()["id"]
        box = f"/v1/sandboxes/{made}"
        ran = http.post(f"{box}/execs", json={"cmd": "cat n up"}).json()
        assert ran["stdout"] == "1\nup\n"
        execs = http.get(f"{box}/execs").json()["execs"]
        assert [each["exec_id"] for each in execs if each["running"]] == ["start"]
        kept = http.post(f"{box}/snapshots", json={"name": "startedkept"})
        kept.raise_for_status()
        again = http.post("/v1/sandboxes", json={"snapshot": "startedkept"}).json()["id"]
        ran = http.post(f"/v1/sandboxes/{again}/execs", json={"cmd": "cat n"}).json()
        assert ran["stdout"] == "1\n"
        http.post(f"{box}/reset").raise_for_status()
        assert http.post(f"{box}/execs", json={"cmd": "cat n"}).json()["stdout"] == "1\n"
        for each in (made, again):
            http.delete(f"/v1/sandboxes/{each}")


def test_a_failed_startup_command_leaves_no_sandbox(alone: RealServer) -> None:
    with httpx.Client(base_url=alone.url, timeout=60) as http:
        failed = http.post("/v1/sandboxes", json={"template": "never"})
        assert failed.status_code == 503
        text = failed.json()["error"]["message"]
        assert "`prepare` of template never" in text and "no luck" in text
        assert "never" not in http.get("/v1/sandboxes").text


def test_a_build_without_an_engine_is_an_error(alone: RealServer) -> None:
    options = cast(Any, parameters(alone))
    with pytest.raises(BuildException, match="Docker"):
        Template.build(Template().from_image("x").run_cmd("true"), "nowhere", **options)
