"""A server that is killed in the middle of a snapshot, and the one that comes after it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from capsule_sdk import CapsuleClient, CapsuleError
from tests.support import wait_for
from tests.support.engine import EngineApi
from tests.support.folders import server_folder
from tests.support.images import Images
from tests.support.servers import real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def home() -> Iterator[Path]:
    with server_folder("ck-") as path:
        yield path


def snapshot(url: str, id: str) -> None:
    with suppress(CapsuleError), CapsuleClient(url, retries=0) as client:
        client.get(id).snapshot("never")


def test_a_kill_in_the_middle_of_a_snapshot_leaves_nothing_and_nobody_frozen(home: Path) -> None:
    kill_in_the_middle(home, home / "d" / "layers")


def fork(url: str, id: str) -> None:
    with suppress(CapsuleError), CapsuleClient(url, retries=0) as client:
        client.get(id).fork(10)


def running(home: Path) -> int:
    with closing(sqlite3.connect(f"file:{home}/d/capsule.db?mode=ro", uri=True)) as db:
        found = db.execute("SELECT count(*) FROM sandboxes WHERE state = 'running'").fetchone()
    return int(found[0])


@pytest.mark.parametrize("moment", ["half launched", "first recorded as running"])
def test_a_kill_in_the_middle_of_a_fork_leaves_all_of_it_or_nothing(
    home: Path, moment: str
) -> None:
    where = {"DATA_DIR": str(home / "d"), "RUN_DIR": str(home / "r")}
    there = home / "r" / "boxes"

    def reached() -> bool:
        return len(os.listdir(there)) >= 6 if moment == "half launched" else running(home) > 1

    with real_server(**where, DRAIN="keep") as server:
        with CapsuleClient(server.url) as client:
            capsule = client.create("bash")
            capsule.exec("echo kept > f").check()
        caller = threading.Thread(target=fork, args=(server.url, capsule.id))
        caller.start()
        wait_for(reached, what=moment)
        server.process.kill()
        server.process.wait()
        caller.join()
    with real_server(**where) as server, CapsuleClient(server.url) as client:
        listed = {each.id for each in client.list()}
        assert capsule.id in listed and len(listed) in (1, 11)
        assert set(os.listdir(there)) == listed
        assert {client.get(id).exec("cat f").stdout for id in listed} == {"kept\n"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["socket", "engine"])
def test_a_kill_in_the_middle_of_a_containers_snapshot(
    home: Path, engine: EngineApi, images: Images, transport: str
) -> None:
    settings = {"PROVIDER": "docker", "DOCKER_HOST": engine.url, "DOCKER_PULL": "never"}
    settings |= {"DOCKER_IMAGE": images.python, "DOCKER_TRANSPORT": transport}
    kill_in_the_middle(home, home / "d" / "docker-layers", **settings)
    ours = (home / "d" / "docker-id").read_text().strip()
    left = [each["Labels"]["capsule.owner"] for each in engine.containers("capsule.owner")]
    assert not [owner for owner in left if owner.startswith(ours)]


def kill_in_the_middle(home: Path, layers: Path, **settings: str) -> None:
    where = {"DATA_DIR": str(home / "d"), "RUN_DIR": str(home / "r"), **settings}
    with real_server(**where, DRAIN="keep") as server:
        with CapsuleClient(server.url) as client:
            capsule = client.create("bash")
            capsule.exec("head -c 400M /dev/zero | tr '\\0' x > f; echo kept > g").check()
        caller = threading.Thread(target=snapshot, args=(server.url, capsule.id))
        caller.start()
        wait_for(lambda: os.listdir(layers), what="the snapshot to begin")
        server.process.kill()
        server.process.wait()
        caller.join()
        assert os.listdir(layers), "it was killed in the middle"
    with real_server(**where) as server, CapsuleClient(server.url) as client:
        assert os.listdir(layers) == [] and client.snapshots.list() == []
        again = client.get(capsule.id)
        assert again.exec("cat g").stdout == "kept\n"  # it moves
        again.snapshot("now")
        with client.create(snapshot="now") as other:
            assert other.exec("cat g; stat -c %s f").stdout == "kept\n419430400\n"
        again.delete()
        client.snapshots.delete("now")
        assert os.listdir(layers) == []
