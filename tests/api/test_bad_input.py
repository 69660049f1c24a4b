"""A wrong request gets a precise 4xx or JSON-RPC error in one line, never a 5xx."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from capsule.edge.shapes import parse
from capsule.errors import InvalidError
from tests.api.client import Api, RpcFailure
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

JSON = {"Content-Type": "application/json"}
KEY = {"X-API-Key": "correct-horse-battery-staple"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"\xef\xbb\xbf{}", -32700),
        (b"{" * 200_000, -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"sandbox.v1.list","params":' + b"[" * 99999, -32700),
        (b'{"jsonrpc":"2.0","id":NaN,"method":"x"}', -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', -32700),
        (b"null", -32600),
        (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"x"}', -32600),
        (b'{"jsonrpc":"2.0","id":1e999,"method":"x"}', -32600),
        (b'{"jsonrpc":"2.0","id":[1],"method":"x"}', -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"x"}', -32600),
        (b'{"id":1,"method":"sandbox.v1.list"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"no.such.method"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * 100_000 + b'"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"sandbox.v1.list","params":null}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"sandbox.v1.get","params":["a"]}', -32602),
        (b"[" + b'{"jsonrpc":"2.0","id":1,"method":"sandbox.v1.list"},' * 300 + b"1]", -32600),
    ],
)
async def test_broken_requests(api: Api, body: bytes, code: int) -> None:
    answer = await api.http.post("/rpc", content=body, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 200
    assert error["code"] == code
    assert error["data"]["code"] == "invalid"
    assert "\n" not in error["data"]["message"]
    assert len(answer.content) < 2000


# Halves of a pair: first and second, at the end and far from it, after a whole one.
@pytest.mark.parametrize(
    "text", [r"\udfff", r"\ud83d and more", r"\ud83d\ude00\ud83d", r"\\\ud800"]
)
async def test_half_a_character_is_called_that(api: Api, box: str, text: str) -> None:
    body = f'{{"code": "{text}", "cwd": "/tmp"}}'
    call = f'{{"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.run", "params": {body}}}'
    rest = await api.http.post(f"/v1/sandboxes/{box}/execs", content=body, headers=JSON)
    rpc = await api.http.post("/rpc", content=call, headers=JSON)
    assert rest.status_code == 400
    assert "lone surrogate" in rest.json()["error"]["message"]
    assert rpc.json()["error"]["code"] == -32700
    assert "lone surrogate" in rpc.json()["error"]["data"]["message"]


@pytest.mark.parametrize("body", [b'"abc', b'"\\ud83d', b'"\\ud83d\\ude', b'"\\\\ud83d '])
def test_a_cut_body_is_called_that(body: bytes) -> None:
    with pytest.raises(InvalidError, match="truncated"):
        parse(msgspec.json.Decoder(Any), body)


@pytest.mark.parametrize("id", [1, "a", "", None, -5, 1.5, 2**60, "€"])
async def test_ids_come_back_as_they_were(api: Api, id: Any) -> None:
    request = {"jsonrpc": "2.0", "id": id, "method": "sandbox.v1.list", "params": {}}
    assert (await api.http.post("/rpc", json=request)).json()["id"] == id


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("create", {"ttl_ms": True}, "ttl_ms"),
        ("create", {"ttl_ms": -1}, "ttl_ms"),
        ("create", {"ttl_ms": 10**30}, "ttl_ms"),
        ("create", {"ttl_ms": "600000"}, "ttl_ms"),
        ("create", {"template": ""}, "template"),
        ("create", {"color": "red"}, "color"),
        ("create", {"env": {"A": 1}}, "env[...]"),
        ("create", {"limits": {"memory": -1}}, "limits.memory"),
        ("create", {"limits": {"wheels": 4}}, "limits.wheels"),
        ("exec", {}, "cmd"),
        ("exec", {"cmd": [1]}, "cmd[0]"),
        ("exec", {"cmd": ""}, "cmd"),
        ("exec", {"cmd": "echo a\x00b"}, "cmd"),
        ("exec", {"cmd": ["true"], "env": {"A=B": "c"}}, "env"),
        ("exec", {"cmd": ["true"], "cwd": "/tmp\x00"}, "cwd"),
        ("exec", {"cmd": ["true"], "timeout_ms": -5}, "timeout_ms"),
        ("exec", {"cmd": ["true"], "on_limit": "explode"}, "on_limit"),
        ("exec", {"cmd": ["true"], "stdin_base64": "***"}, "stdin_base64"),
        ("exec", {"cmd": ["true"], "session": "../x"}, "session"),
        ("exec", {"cmd": ["true"], "stdin": "a", "stdin_base64": "YQ=="}, "stdin"),
        ("batch", {"commands": [{"cmd": ["true"], "code": "1"}]}, "cmd"),
        ("writeFile", {"path": "f", "content": "YQ==\n"}, "content"),
        ("writeFile", {"path": "f", "content": "YQ==", "mode": "rwx"}, "mode"),
        ("readFile", {"path": "f", "offset": -1}, "offset"),
        ("readFile", {"path": "x" * 5000}, "path"),
        ("attach", {"exec_id": "e", "wait_ms": 10**9}, "wait_ms"),
        ("kill", {"exec_id": "e", "signal": "kill -9"}, "signal"),
        ("move", {"from": "a", "to": "../c"}, "to"),
        ("batch", {"commands": [{"cmd": ["true"]}] * 101}, "commands"),
    ],
)
async def test_wrong_params_name_the_field(
    api: Api, box: str, method: str, params: dict[str, Any], field: str
) -> None:
    if method != "create":
        params = {"id": box, **params}
    with pytest.raises(RpcFailure) as failure:
        await api.rpc(method, **params)
    assert failure.value.rpc_code == -32602
    assert failure.value.details["field"] == field
    assert failure.value.message.startswith(field)
    assert "\n" not in failure.value.message


async def test_values_are_named_as_they_were_written(api: Api, box: str) -> None:
    for body, message in (
        ({"ttl_ms": 1}, "ttl_ms: 1 is out of range, allowed: 1000 to 86400000"),
        ({"ttl_ms": 10**9}, "ttl_ms: 1000000000 is out of range, "),
    ):
        with pytest.raises(RpcFailure) as failure:
            await api.rpc("create", **body)
        assert failure.value.message.startswith(message)
    for query, message in (
        ("limit=0", "limit: input should be greater than or equal to 1, got '0'"),
        ("recursive=perhaps", "recursive: input should be a valid boolean"),
    ):
        answer = await api.http.get(f"/v1/sandboxes/{box}/dirs/workspace?{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["details"]["field"]) == (400, query.partition("=")[0])
        assert error["message"].startswith(message)
        assert error["message"].endswith(f"got '{query.partition('=')[2]}'")
    unknown = (await api.http.get("/v1/sandboxes/nosuchbox")).json()["error"]
    assert (unknown["code"], unknown["message"]) == (
        "not_found",
        "sandbox 'nosuchbox' does not exist",
    )
    assert "list" in unknown["hint"]


@pytest.mark.parametrize(
    "path",
    ["/workspace/../../etc/passwd", "..", "a/../b", "a\x00b"],
)
async def test_paths_that_climb_or_have_nul_are_refused(api: Api, box: str, path: str) -> None:
    for method, more in (
        ("readFile", {}),
        ("writeFile", {"content": ""}),
        ("listDir", {}),
        ("stat", {}),
        ("mkdir", {}),
        ("remove", {}),
        ("chmod", {"mode": 0o644}),
    ):
        with pytest.raises(RpcFailure) as failure:
            await api.rpc(method, id=box, path=path, **more)
        assert failure.value.code == "invalid", (method, path)
    quoted = "".join(f"%{byte:02x}" for byte in path.encode())
    for answer in (
        await api.http.get(f"/v1/sandboxes/{box}/files/{quoted}"),
        await api.http.get(f"/v1/sandboxes/{box}/files", params={"path": path}),
        await api.http.put(f"/v1/sandboxes/{box}/files/{quoted}", content=b"x"),
        await api.http.get(f"/v1/sandboxes/{box}/archive", params={"path": path}),
        await api.http.get(f"/v1/sandboxes/{box}/watch", params={"path": path}),
    ):
        assert answer.status_code == 400, answer.text


# Anything JSON can say, with words our methods know sprinkled in.
WORDS = st.sampled_from(["id", "cmd", "path", "code", "env", "ttl_ms", "commands", "exec_id", ""])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["nosuchbox", "python", "KILL", "text", "base64", "../x", "\x00", "/etc/x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)
RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def fuzzed(agent_binary: Path) -> Iterator[RealServer]:
    """A server of its own, with a key: among what is sent is what makes keys, and the first one
    would close a server without a key to all others."""
    with real_server(API_KEYS=KEY["X-API-Key"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(fuzzed: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, base_url=fuzzed.url, headers=KEY, timeout=15) as client:
        yield client


@pytest.fixture(scope="module")
def victim(client: httpx.Client) -> Iterator[str]:
    """A sandbox to send nonsense to."""
    id = client.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
    yield id
    client.delete(f"/v1/sandboxes/{id}")


def call(client: httpx.Client, method: str, params: Any) -> Any:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer = client.post("/rpc", json=request)
    assert answer.status_code == 200
    return answer.json()


def assert_answered(body: Any) -> None:
    if "error" in body:
        assert body["error"]["data"]["code"] != "internal", body
        assert "\n" not in body["error"]["message"]


@RELAXED
@given(data=st.data())
def test_no_params_bring_the_server_down(
    client: httpx.Client, victim: str, api_params: dict[str, list[str]], data: st.DataObject
) -> None:
    method = data.draw(st.sampled_from(sorted(api_params)))
    fields = st.sampled_from(api_params[method] or ["name"])
    params = data.draw(VALUES | st.dictionaries(fields, VALUES, max_size=6))
    harms = method.endswith(("delete", "pause", "fork"))
    if isinstance(params, dict) and data.draw(st.booleans()) and not harms:
        params["id"] = victim
    assert_answered(call(client, method, params))


OFTEN = st.sampled_from(["start", "attach", "input", "eof", "signal", "resize", "dance"])
MESSAGES = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=20),
    st.fixed_dictionaries(
        {"type": OFTEN},
        optional={
            "cmd": st.sampled_from(
                [["sleep", "0.1"], ["true"], "exit 3", ["nosuchprogram"], [], 7]
            ),
            "exec_id": st.sampled_from(["e1", "", "../x", 5]),
            "data": st.text(max_size=5),
            "signal": st.sampled_from(["INT", "SIGTERM", "LOUD", ""]),
            "rows": st.integers(-1, 5000),
            "cols": st.integers(-1, 5000),
            "tty": st.just({}),
            "frames": st.sampled_from(["text", "binary", "comic"]),
            "stdin_open": st.booleans(),
        },
    ).map(json.dumps),
)


@RELAXED
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4))
def test_no_message_is_a_fault_of_ours(
    fuzzed: RealServer, client: httpx.Client, victim: str, messages: list[str | bytes]
) -> None:
    url = f"ws://127.0.0.1:{fuzzed.port}/v1/sandboxes/{victim}/exec/ws"
    with connect(url, additional_headers=KEY, proxy=None) as socket:
        with contextlib.suppress(ConnectionClosed):
            for message in [*messages, "the end"]:  # which makes no sense, and ends it
                socket.send(message)
            while True:
                socket.recv(timeout=10)
    assert socket.close_code in (1000, 1008)
    params = {"id": victim, "cmd": ["echo", "well"]}
    assert call(client, "sandbox.v1.exec", params)["result"]["stdout"] == "well\n"
