"""The Engine and the images of the tests work, and leave nothing behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.engine import Engine, EngineApi
from tests.support.images import Images

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
    """What is left of an Engine: processes, mounts, cgroups, its folder."""
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


def test_nothing_is_left_of_a_daemon_that_was_killed(own_docker: Engine, runsc: str) -> None:
    image = Images(own_docker.api).alpine
    paused = own_docker.api.run(image, "sleep", "1000")
    own_docker.api.call("POST", f"/containers/{paused}/pause")
    own_docker.api.run(image, "sleep", "1000", runtime=runsc)
    assert len(traces(own_docker.folder)) > 5
    own_docker.kill()
    own_docker.stop()
    assert traces(own_docker.folder) == []
