"""Templates over the API with a real Engine: built, followed, used at once, removed."""

from __future__ import annotations

import base64
import io
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.api.client import Api, RpcFailure, SseEvent, events
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def docker_server(engine: EngineApi) -> Iterator[RealServer]:
    names = f"capsule/{{template}}:{secrets.token_hex(6)}"  # others build templates here as well
    own = {"DOCKER_HOST": engine.url, "DOCKER_IMAGE": names, "PROVIDER": "docker"}
    with real_server(MAX_CONTEXT="1MiB", **own) as running:
        yield running


@pytest.fixture
async def api(docker_server: RealServer) -> AsyncIterator[Api]:
    async with httpx.AsyncClient(verify=False, base_url=docker_server.url, timeout=60) as http:
        yield Api(http)


@pytest.fixture
async def name(api: Api, engine: EngineApi) -> AsyncIterator[str]:
    """A template that only this test has, gone afterwards."""
    made = f"t-{secrets.token_hex(6)}"
    yield made
    for box in (await api.rpc("list"))["sandboxes"]:
        if box["template"].startswith(made):
            await api.rpc("delete", id=box["id"])
    for each in (await api.call("template.v1.list", {}))["templates"]:
        if each["name"].startswith(made):
            await api.call("template.v1.delete", {"name": each["name"]})
    left = [each for each in engine.containers() if made in json.dumps(each)]
    assert left == []


def context(dockerfile: str, **files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in {"Dockerfile": dockerfile.encode(), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


async def followed(api: Api, path: str, body: bytes, **query: str) -> list[SseEvent]:
    headers = {"Accept": "text/event-stream"}
    async with api.http.stream("POST", path, content=body, params=query, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [each async for each in events(answer)]


async def test_a_build_is_followed_and_used_at_once(api: Api, images: Images, name: str) -> None:
    dockerfile = f"FROM {images.alpine}\nARG WORD\nRUN echo $WORD > /made; echo printed\n"
    said = await followed(api, f"/v1/templates/{name}/build", context(dockerfile), arg="WORD=hi")
    assert said[0] == SseEvent(
        "step", "", {"number": 1, "total": 4, "text": f"FROM {images.alpine}"}
    )
    assert SseEvent("log", "", {"text": "printed\n"}) in said
    last = said[-1]
    assert last.name == "built"
    assert last.data["template"]["name"] == name
    assert last.data["image"]["reference"] == f"capsule/{name}:latest"
    box = await api.rpc("create", template=name)
    try:
        assert await api.sh(box["id"], "cat /made") == "hi\n"
        with pytest.raises(RpcFailure) as refused:
            await api.call("template.v1.delete", {"name": name})
        assert refused.value.code == "conflict"
        assert refused.value.details["sandbox_ids"] == [box["id"]]
        assert box["id"] in refused.value.message
    finally:
        await api.rpc("delete", id=box["id"])
    assert await api.call("template.v1.delete", {"name": name}) == {"deleted": True}
    with pytest.raises(RpcFailure) as gone:
        await api.rpc("create", template=name)
    assert gone.value.code == "not_found"


async def test_a_build_over_json_rpc(api: Api, images: Images, name: str) -> None:
    data = context(f"FROM {images.alpine}\nRUN echo printed\n")
    params = {"name": name, "context_base64": base64.b64encode(data).decode()}
    built = await api.call("template.v1.build", params)
    assert built["template"]["origin"] == "made"
    assert "[2/3] RUN echo printed\nprinted\n" in built["log"]
    got = await api.call("template.v1.get", {"name": name})
    assert got["images"] == [built["image"]]
    listed = (await api.call("template.v1.list", {}))["templates"]
    assert {"name": name, "origin": "made"}.items() <= next(
        each for each in listed if each["name"] == name
    ).items()
    assert (await api.http.get(f"/v1/templates/{name}")).json() == got
    assert (await api.http.delete(f"/v1/templates/{name}")).json() == {"deleted": True}
    assert (await api.http.get(f"/v1/templates/{name}")).status_code == 404


async def test_a_failing_step_comes_with_its_output(api: Api, images: Images, name: str) -> None:
    data = context(f"FROM {images.alpine}\nRUN echo said; exit 5\n")
    answer = await api.http.post(f"/v1/templates/{name}/build", content=data)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid")
    wanted = {"number": 2, "total": 3, "exit_code": 5, "output": "said\n"}
    assert wanted.items() <= error["details"].items()
    said = await followed(api, f"/v1/templates/{name}/build", data)
    assert (said[-1].name, said[-1].data["details"]) == ("error", error["details"])
    assert (await api.http.get(f"/v1/templates/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("name", "body", "query", "status", "code"),
    [
        ("nosuch", b"", {}, 404, "not_found"),
        ("python", context("FROM scratch"), {}, 400, "invalid"),
        ("UPPER", context("FROM scratch"), {}, 400, "invalid"),
        ("mine", context("FROM scratch")[:700], {}, 400, "invalid"),
        ("mine", context("FROM scratch", **{"../out": b"x"}), {}, 400, "invalid"),
        ("mine", context("FROM scratch"), {"arg": "novalue"}, 400, "invalid"),
        ("mine", context("FROM scratch"), {"provider": "nosuch"}, 404, "not_found"),
        ("mine", context("FROM scratch", big=bytes(2**20)), {}, 413, "too_large"),
        ("mine", context("FROM nosuch/at-all:1"), {}, 503, "unavailable"),
    ],
)
async def test_a_wrong_build_is_refused(
    api: Api, name: str, body: bytes, query: dict[str, str], status: int, code: str
) -> None:
    for accept in ("application/json", "text/event-stream"):
        answer = await api.http.post(
            f"/v1/templates/{name}/build", content=body, params=query, headers={"Accept": accept}
        )
        if answer.status_code == 200 and status == 503:  # it had begun
            assert '"code":"unavailable"' in answer.text
            continue
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code
    listed = (await api.call("template.v1.list", {}))["templates"]
    assert "mine" not in [each["name"] for each in listed]
