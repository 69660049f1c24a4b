"""A server that is killed in the middle of a session, and the one that comes after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from capsule.sessions.ledger import verify_file
from tests.support import wait_for
from tests.support.folders import server_folder
from tests.support.servers import real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def home() -> Iterator[Path]:
    with server_folder("ck-") as path:
        yield path


def execute(http: httpx.Client, code: str) -> dict[str, Any]:
    answer = http.post("/api/e2b/execute", json={"session_id": "s", "code": code}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def began(http: httpx.Client) -> bool:
    answer = http.get("/api/e2b/files/s", params={"path": "began"})
    return answer.status_code == 200


def settle(http: httpx.Client) -> str:
    """What is in the session's file, whatever a kill has left it as."""
    about = http.get("/api/sessions/s").json()
    assert about["state"] in ("open", "closed"), about
    answer = http.post("/api/sessions/s/reopen")
    assert answer.status_code == 200, answer.text
    return str(http.get("/api/e2b/files/s", params={"path": "f"}).json()["content"])


class Restless:
    """Writes, closes, reopens, and again, until the server is gone."""

    def __init__(self, url: str, start: int) -> None:
        self.known = start
        self.thread = threading.Thread(target=self._run, args=(url,))
        self.thread.start()

    def _run(self, url: str) -> None:
        with suppress(httpx.TransportError), httpx.Client(base_url=url, timeout=30) as http:
            while True:
                body = {"session_id": "s", "path": "f", "content": str(self.known + 1)}
                if http.post("/api/e2b/files", json=body).status_code == 200:
                    self.known += 1
                http.post("/api/sessions/s/close")
                http.post("/api/sessions/s/reopen")


@pytest.mark.slow
def test_kills_while_it_is_closed_and_opened_lose_and_leave_nothing(home: Path) -> None:
    where = {"DATA_DIR": str(home / "d"), "RUN_DIR": str(home / "r"), "DRAIN": "keep"}
    chance, known = random.Random(20261115), 0
    for turn in range(5):
        last = turn == 4
        with real_server(**{**where, "DRAIN": "delete" if last else "keep"}) as server:
            with httpx.Client(base_url=server.url, timeout=30) as http:
                if turn == 0:
                    http.post("/api/sessions", json={"session_id": "s", "environment": "bash"})
                else:
                    assert int(settle(http)) in (known, known + 1)
                    snapshots = http.get("/v1/snapshots").json()["snapshots"]
                    boxes = http.get("/v1/sandboxes").json()["sandboxes"]
                    assert len(snapshots) <= 1 and len(boxes) == 1, (snapshots, boxes)
                if last:
                    http.delete("/api/sessions/s").raise_for_status()
                    assert http.get("/v1/snapshots").json()["snapshots"] == []
                    break
            restless = Restless(server.url, known)
            wait_for(lambda: restless.known > known, what="it is at work")  # noqa: B023
            threading.Event().wait(chance.uniform(0.0, 0.5))
            server.process.kill()
            server.process.wait()
            restless.thread.join()
            known = restless.known


def test_a_kill_in_the_middle_of_a_session_loses_nothing(home: Path) -> None:
    where = {"DATA_DIR": str(home / "d"), "RUN_DIR": str(home / "r"), "DRAIN": "keep"}
    with real_server(**where) as server, httpx.Client(base_url=server.url) as http:
        made = http.post("/api/sessions", json={"session_id": "s", "environment": "Python3"}).json()
        before = execute(http, "x = 41; open('artifacts/a', 'w').write('kept'); print('hi')")

        def long() -> None:
            with suppress(httpx.TransportError):
                execute(http, "import time; open('began', 'w'); time.sleep(1); y = 1")

        caller = threading.Thread(target=long)
        caller.start()
        wait_for(lambda: began(http), what="the run to begin")
        server.process.kill()
        server.process.wait()
        caller.join()
    with real_server(**{**where, "DRAIN": "delete"}) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            about = http.get("/api/sessions/s").json()
            assert (about["state"], about["sandbox_id"]) == ("open", made["sandbox_id"])
            log = http.get("/api/sessions/s/executions").json()["executions"]
            assert [each["status"] for each in log] == ["ok", "lost"]
            assert log[0]["stdout"] == "hi\n" and "time.sleep" in log[1]["command"]
            done = execute(http, "print(x + y); open('artifacts/a').read()")
            assert done["stdout"] == "42\n", "also what ran while nobody listened"
            assert done["results"][0]["text"] == "'kept'" and done["execution"] == 3
            path = httpx.URL(before["artifacts"][0]["url"]).path
            assert http.get(path).text == "kept"
        assert verify_file(home / "d" / "storage" / "sessions.db").broken == ()
