"""`capsule audit verify` on the records of a server that runs, and on a copy that was changed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Cli
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def storage(server: RealServer) -> Path:
    """Of a server in which something was run."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        made = http.post("/api/sessions", json={"environment": "bash"}).json()
        for code in ("echo one", "echo two"):
            body = {"session_id": made["session_id"], "code": code}
            assert http.post("/api/e2b/execute", json=body).status_code == 200
        http.delete(f"/api/sessions/{made['session_id']}")
    return server.base / "data" / "storage"


def test_a_log_that_nobody_changed(cli: Cli, storage: Path) -> None:
    told = cli("audit", "verify", "--storage", storage)
    assert told.code == 0 and told.out.endswith("nothing was changed\n"), told
    found = json.loads(cli("audit", "verify", "--storage", storage, "--json").out)["executions"]
    assert found["entries"] >= 2 and found["broken"] == [] and len(found["head"]) == 64
    same = cli("audit", "verify", "--head", found["head"], CAPSULE_STORAGE_DIR=str(storage))
    assert same.code == 0, same


def test_a_log_that_somebody_changed(cli: Cli, storage: Path, tmp_path: Path) -> None:
    with (
        closing(sqlite3.connect(storage / "sessions.db")) as source,
        closing(sqlite3.connect(tmp_path / "sessions.db")) as copy,
    ):
        source.backup(copy)
        copy.execute("UPDATE log SET body = replace(CAST(body AS TEXT), 'bash', 'fish')")
        copy.execute("UPDATE texts SET stdout = 'three' WHERE seq = (SELECT max(seq) FROM texts)")
        copy.commit()
    told = cli("audit", "verify", "--storage", tmp_path)
    assert told.code == 1
    assert "its stdout does not have the hash that it says" in told.out
    assert told.out.endswith("it was changed\n")


def test_where_there_is_no_log(cli: Cli, tmp_path: Path) -> None:
    told = cli("audit", "verify", "--storage", tmp_path)
    assert told.code == 1 and "there is no log" in told.err and "--storage" in told.err
