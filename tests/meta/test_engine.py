"""The Engine and the images that tests use do what those tests take for granted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import ROOT, wait_for
from tests.support.engine import FOLDERS, Engine, EngineApi, EngineError, abandoned, sweep
from tests.support.images import IMAGES, Images
from tests.support.supervisor import OWNER
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.slow]

HELLO = 'package main; import "fmt"; func main() { fmt.Println("hello") }'
GO = f"cd /tmp && echo '{HELLO}' > a.go && HOME=/tmp go run a.go"
PROGRAMS = {
    "python": ("python3", "-c", "print('hello')"),
    "node": ("node", "-e", "console.log('hello')"),
    "go": ("sh", "-c", GO),
    "alpine": ("sh", "-c", "id 1000 2>/dev/null || echo hello"),
}


def processes(folder: Path) -> list[str]:
    """Command lines that mention it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            command = path.read_text(errors="replace").replace("\0", " ")
            found += [command] if str(folder) in command else []
    return found


def traces(folder: Path) -> list[str]:
    """What is left of an Engine: its folder, processes, mounts and cgroups."""
    hierarchies = Path("/sys/fs/cgroup")  # one, or with version 1 one for each controller
    cgroups = [*hierarchies.glob(folder.name), *hierarchies.glob(f"*/{folder.name}")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    files = [folder] if folder.exists() else []
    return [*processes(folder), *mounts, *map(str, cgroups), *map(str, files)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("image", PROGRAMS)
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_an_image_runs_its_language(
    engine: EngineApi, images: Images, request: pytest.FixtureRequest, runtime: str, image: str
) -> None:
    if runtime == "runsc":
        request.getfixturevalue("runsc")
    container = engine.run(images.name(image), "sleep", "1000", runtime=runtime)
    try:
        assert engine.exec(container, *PROGRAMS[image]) == (0, "hello\n")
    finally:
        engine.remove(container)


def test_the_empty_image_has_nothing_to_run(engine: EngineApi, images: Images) -> None:
    with pytest.raises(EngineError, match=r"no such file|not found"):
        engine.run(images.empty, "/bin/sh")
    assert not [one for one in engine.containers() if one["Image"] == images.empty]


def test_images_are_loaded_once(engine: EngineApi, images: Images) -> None:
    tag = images.alpine
    before = engine.image(tag)
    assert before is not None and before["RepoTags"] == [f"{tag}:latest"]
    assert Images(engine).alpine == tag
    assert engine.image(tag) == before


@pytest.mark.parametrize("how", ["quit", "kill"])
@pytest.mark.parametrize("live_restore", [True, False])
def test_containers_outlive_a_daemon_that_restores_them(
    own_docker: Engine, live_restore: bool, how: str
) -> None:
    own_docker.restart(live_restore=live_restore)
    own_docker.api.run(Images(own_docker.api).alpine, "sleep", "1000", StopSignal="SIGKILL")
    first = own_docker.pid
    own_docker.restart(live_restore=live_restore, how=how)
    assert own_docker.pid != first
    (container,) = own_docker.api.containers()
    assert container["State"] == ("running" if live_restore else "exited")


def test_a_second_daemon_leaves_the_first_alone(
    engine: EngineApi, images: Images, own_docker: Engine
) -> None:
    container = engine.run(images.alpine, "sleep", "1000")
    try:
        own_docker.restart(how="kill")
        own_docker.stop()
        assert engine.get(f"/containers/{container}/json")["State"]["Running"]
        assert engine.exec(container, "echo", "here").output == "here\n"
    finally:
        engine.remove(container)


def test_nothing_is_left_of_a_daemon_that_was_killed(own_docker: Engine, runsc: str) -> None:
    image = Images(own_docker.api).alpine
    paused = own_docker.api.run(image, "sleep", "1000")
    own_docker.api.call("POST", f"/containers/{paused}/pause")
    own_docker.api.run(image, "sleep", "1000", runtime=runsc)
    assert len(traces(own_docker.folder)) > 5
    own_docker.kill()
    own_docker.stop()
    assert traces(own_docker.folder) == []


OWNS = "from tests.support.supervisor import acquire; print(acquire().url, flush=True); input()"


def owner_of_an_engine() -> tuple[subprocess.Popen[str], Path]:
    env = {name: value for name, value in os.environ.items() if name not in (OWNER, "DOCKER_HOST")}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNS],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    api = EngineApi(url)
    assert api.answers()
    api.close()
    return owner, Path(url.removeprefix("unix://")).parent


def test_an_engine_ends_with_its_owner_however_that_ends(own_docker: Engine) -> None:
    owner, folder = owner_of_an_engine()
    if not folder.name.startswith(FOLDERS):
        pytest.skip("this machine's own Engine is used")
    owner.kill()
    owner.communicate()
    wait_for(lambda: not traces(folder), what="nothing left of the Engine", within=15)


def test_what_an_interrupted_supervisor_left_is_found_and_removed(own_docker: Engine) -> None:
    owner, folder = owner_of_an_engine()
    if not folder.name.startswith(FOLDERS):
        pytest.skip("this machine's own Engine is used")
    supervisor = json.loads((folder / "shared.json").read_text())["supervisor"]
    os.kill(supervisor, signal.SIGKILL)
    assert folder not in abandoned()
    owner.kill()
    owner.communicate()
    assert folder in abandoned()
    sweep(folder)
    assert traces(folder) == []


def test_who_may_not_use_an_engine_is_told_so(as_root: None, as_user: User) -> None:
    tried = as_user.run(
        as_user.python,
        "-c",
        "from tests.support.supervisor import acquire; acquire()",
        env={"PYTHONPATH": f"{ROOT}:{as_user.env['PYTHONPATH']}"},
    )
    assert "only root can start a Docker Engine" in tried.stderr


def test_every_image_has_a_name_to_ask_for() -> None:
    assert all(isinstance(getattr(Images, name), property) for name in IMAGES)
