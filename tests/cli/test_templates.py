"""`capsule template build`, `export` and `import`, with a real Engine."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_sdk import CapsuleClient, NotFoundError, NotSupportedError
from tests.cli.conftest import Cli
from tests.cli.test_commands import image
from tests.support import wait_for
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def builder(cli: Cli, engine: EngineApi) -> Cli:
    own = {"CAPSULE_DOCKER_HOST": engine.url, "CAPSULE_PROVIDER": "docker"}
    return Cli({**cli.env, **own}, cli.cwd)


@pytest.fixture
def name(engine: EngineApi, cli: Cli) -> Iterator[str]:
    """Of a template that is gone afterwards, with all that was made of it."""
    made = f"t-{secrets.token_hex(6)}"
    yield made
    for each in engine.get("/images/json"):
        for tag in each["RepoTags"] or ():
            if made in tag:
                engine.call("DELETE", f"/images/{tag}", force=1)
    (Path(cli.env["CAPSULE_DATA_DIR"]) / "templates" / f"{made}.yaml").unlink(missing_ok=True)


def project(cli: Cli, name: str, dockerfile: str) -> Path:
    folder = cli.cwd / name
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def test_a_folder_becomes_a_template_that_runs(builder: Cli, images: Images, name: str) -> None:
    folder = project(builder, name, f"FROM {images.alpine}\nCOPY . /src\nRUN echo building it\n")
    (folder / ".dockerignore").write_text("secret\n")
    (folder / "secret").write_text("s")
    (folder / "public").write_text("p")
    done = builder("template", "build", f"./{name}")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{name}: capsule/{name}:latest, ")
    assert f"[1/4] FROM {images.alpine}\n" in done.err and "\nbuilding it\n" in done.err
    ran = builder("run", "-t", name, "-l", "sh", "ls -A /src")
    assert (ran.code, ran.out.split()) == (0, [".dockerignore", "Dockerfile", "public"]), ran.err
    assert name in builder("template", "ls").out
    assert builder("template", "rm", name).out == f"{name}\n"
    assert name not in builder("template", "ls").out


def test_a_failing_build_shows_the_step(builder: Cli, images: Images, name: str) -> None:
    project(builder, name, f"FROM {images.alpine}\nRUN echo what it said; exit 4\n")
    done = builder("template", "build", f"./{name}")
    assert (done.code, done.out) == (1, "")
    assert "\nwhat it said\n" in done.err
    assert "error: step 2 of 3 failed (RUN echo what it said; exit 4): " in done.err
    told = json.loads(builder("template", "build", f"./{name}", "--json").out)["error"]
    assert (told["code"], told["details"]["exit_code"]) == ("invalid", 4)
    assert told["details"]["output"] == "what it said\n"


def test_a_dockerfile_of_capsule_on_another_base(
    builder: Cli, images: Images, engine: EngineApi, name: str
) -> None:
    own = {"CAPSULE_DOCKER_IMAGE": f"capsule/{{template}}:{name}"}
    base = f"BASE={images.python}"
    done = builder("template", "build", "python", "--build-arg", base, **own)
    assert done.code == 0, done.err
    ran = builder("run", "import os; print(os.getuid(), os.getcwd())", **own)
    assert (ran.code, ran.out) == (0, "1000 /workspace\n"), ran.err
    assert builder("template", "rm", "python", **own).code == 0


def test_an_image_built_once_runs_without_docker(builder: Cli, images: Images, name: str) -> None:
    project(builder, name, f"FROM {images.alpine}\nRUN echo made > /made\n")
    assert builder("template", "build", f"./{name}").code == 0
    local = Cli({**builder.env, "CAPSULE_PROVIDER": "local"}, builder.cwd)
    out = local.cwd / "out.tar"
    done = local("template", "export", name, "-o", out)
    assert done.code == 0, done.err
    other = f"{name}-local"
    done = local("template", "import", out, "--name", other, CAPSULE_DOCKER_HOST="unix:///nowhere")
    assert done.code == 0, done.err
    try:
        ran = local("run", "-t", other, "-l", "sh", "cat /made", CAPSULE_DOCKER_HOST="unix:///no")
        if "needs overlay" not in ran.err:
            assert (ran.code, ran.out) == (0, "made\n"), ran.err
        again = local("template", "export", other)
        assert (again.code, (local.cwd / f"{other}.tar").is_file()) == (0, True), again.err
    finally:
        assert local("template", "rm", other).code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch"], "neither a folder nor a template that Capsule can build: nosuch"),
        (["./nosuch"], "neither a folder nor a template"),
        (["."], "no Dockerfile in ."),
        (["python", "--name", "mine"], "template python has its name already"),
    ],
)
def test_what_cannot_be_built_is_told(builder: Cli, args: list[str], message: str) -> None:
    done = builder("template", "build", *args)
    assert (done.code, message in done.err) == (1, True), done.err


def test_without_an_engine_it_is_told_what_to_do(cli: Cli) -> None:
    nowhere = {"CAPSULE_DOCKER_HOST": f"unix://{cli.cwd}/no.sock"}
    done = cli("template", "build", "python", **nowhere)
    assert done.code == 1
    assert "does not answer" in done.err and "hint: " in done.err


@pytest.mark.needs("busybox")
def test_a_running_server_sees_imports_and_removals(server: RealServer, tmp_path: Path) -> None:
    """The command line changes the data directory of a local server."""
    cli = Cli({**server.env, "CAPSULE_URL": server.url}, tmp_path)
    name = f"t-{secrets.token_hex(6)}"
    done = cli("template", "import", image(tmp_path / "tiny.tar"), "--name", name)
    assert done.code == 0, done.err
    with CapsuleClient(server.url) as client:
        try:
            capsule = client.create(name)
        except NotSupportedError:
            cli("template", "rm", name)
            pytest.skip("images need overlay mounts, which this host does not allow")
        with capsule:
            assert capsule.exec(["cat", "/etc/os-release"]).stdout == "ID=tiny\n"
            for refused in (
                cli("template", "rm", name),
                cli("template", "import", tmp_path / "tiny.tar", "--name", name, "--replace"),
            ):
                assert refused.code == 1
                assert f"template {name} is in use by sandbox {capsule.id}" in refused.err
            assert capsule.exec(["cat", "/etc/os-release"]).stdout == "ID=tiny\n"
        assert cli("template", "rm", name).code == 0
        with pytest.raises(NotFoundError, match="does not exist"):
            client.create(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_the_command_ends_the_build(
    builder: Cli, images: Images, engine: EngineApi, name: str, number: signal.Signals
) -> None:
    project(builder, name, f"FROM {images.alpine}\nRUN echo {name} going; sleep 600\n")
    process = builder.popen("template", "build", f"./{name}", stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if line == f"{name} going\n":
            break
    assert running(engine, name) == 1
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    wait_for(lambda: running(engine, name) == 0, what="the build has ended")


def running(engine: EngineApi, name: str) -> int:
    return sum(name in json.dumps(each) for each in engine.containers())
