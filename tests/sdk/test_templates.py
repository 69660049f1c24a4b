"""Templates in the SDK: both clients, with a server that has a real Engine."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_sdk import (
    CapsuleClient,
    ConflictError,
    InvalidError,
    NotFoundError,
    WrongStateError,
)
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def docker_server(engine: EngineApi) -> Iterator[RealServer]:
    with real_server(DOCKER_HOST=engine.url, PROVIDER="docker", MAX_CONTEXT="1MiB") as running:
        yield running


@pytest.fixture
def client(docker_server: RealServer) -> Iterator[CapsuleClient]:
    with CapsuleClient(docker_server.url) as made:
        yield made


@pytest.fixture
def name(client: CapsuleClient) -> Iterator[str]:
    made = f"t-{secrets.token_hex(6)}"
    yield made
    if made in [each.name for each in client.templates.list()]:
        client.templates.delete(made)


@pytest.fixture
def folder(tmp_path: Path, images: Images) -> Path:
    place = tmp_path / "mydir"
    place.mkdir()
    (place / "Dockerfile").write_text(
        f"FROM {images.alpine}\nARG WORD\nCOPY . /src\nRUN printf 'a\\nb'; echo $WORD > /made\n"
    )
    (place / ".dockerignore").write_text("secret")
    (place / "secret").write_text("s")
    return place


def test_a_folder_is_built_line_by_line_and_used(
    client: CapsuleClient, folder: Path, images: Images, name: str
) -> None:
    build = client.templates.build(name, folder, args={"WORD": "given"})
    lines = list(build)
    assert lines[0] == f"[1/5] FROM {images.alpine}"
    assert lines[lines.index("a") :][:3] == ["a", "b", f"[5/5] LABEL capsule.template={name}"]
    assert build.template is not None
    assert build.wait() == build.template
    assert build.template.images[0].reference == f"capsule/{name}:latest"
    assert build.template.origin == "made"
    with client.create(name) as capsule:
        assert capsule.exec("cat /made; ls -A /src").stdout.split() == [
            "given", ".dockerignore", "Dockerfile",
        ]  # fmt: skip
        with pytest.raises(ConflictError) as refused:
            client.templates.delete(name)
        assert refused.value.details["sandbox_ids"] == [capsule.id]
    client.templates.delete(name)
    with pytest.raises(NotFoundError):
        client.templates.get(name)


def test_a_build_that_fails_raises_the_step(
    client: CapsuleClient, folder: Path, images: Images, name: str
) -> None:
    (folder / "Other").write_text(f"FROM {images.alpine}\nRUN echo said; exit 6\n")
    build = client.templates.build(name, str(folder), file="Other")
    with pytest.raises(InvalidError, match="step 2 of 3 failed") as caught:
        build.wait()
    assert caught.value.details["exit_code"] == 6
    assert caught.value.details["output"] == "said\n"
    with pytest.raises(WrongStateError, match="followed once"):
        build.wait()
