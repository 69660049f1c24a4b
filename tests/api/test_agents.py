"""Sessions for agents (/create_session, /execute, /upload, /cleanup): shapes and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.client import Api

pytestmark = pytest.mark.real

MIB = 1024 * 1024


@pytest.fixture
async def session(api: Api) -> AsyncIterator[str]:
    made = (await api.http.post("/create_session")).json()
    yield made["session_id"]
    await api.http.post("/cleanup", json=made)


async def execute(api: Api, session: str, command: str, **options: Any) -> dict[str, Any]:
    body = {"session_id": session, "command": command, **options}
    answer = await api.http.post("/execute", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found.keys() == {"exit_code", "output"}
    return found


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return f"{error['message']}; {error.get('hint', '')}"


async def test_a_session_from_create_to_cleanup(api: Api) -> None:
    created = await api.http.post("/create_session")
    assert created.status_code == 200
    assert created.json().keys() == {"session_id"}
    session = created.json()["session_id"]
    assert isinstance(session, str) and session
    await execute(api, session, "touch notes.txt")
    ran = await execute(api, session, "ls -la")
    assert ran["exit_code"] == 0
    assert "notes.txt" in ran["output"]
    cleaned = await api.http.post("/cleanup", json={"session_id": session})
    assert (cleaned.status_code, cleaned.json()) == (200, {"status": "removed"})
    late = await api.http.post("/execute", json={"session_id": session, "command": "true"})
    assert "POST /create_session" in refused(late, 410, "gone")
    assert (await api.http.get(f"/v1/sandboxes/{session}")).status_code == 410


async def test_a_session_has_limits_and_no_network(api: Api, session: str) -> None:
    box = (await api.http.get(f"/v1/sandboxes/{session}")).json()
    assert box["limits"]["memory"] == 512 * MIB
    assert box["limits"]["cpus"] == 0.5
    assert box["ttl_ms"] == 3_600_000
    assert box["idle_timeout_ms"] == 0
    assert (await execute(api, session, "ls /sys/class/net 2>/dev/null | grep -v lo"))[
        "output"
    ] == ""
    assert (await execute(api, session, "echo > /dev/tcp/1.1.1.1/80"))["exit_code"] != 0


async def test_output_and_exit_code_are_the_programs(api: Api, session: str) -> None:
    command = "echo one; echo two >&2; echo three; exit 3"
    assert await execute(api, session, command) == {"exit_code": 3, "output": "one\ntwo\nthree\n"}
    unknown = await execute(api, session, "no-such-program 'a b'")
    assert unknown["exit_code"] == 127
    assert "no-such-program" in unknown["output"]
    quoted = "-x 2>/dev/null\nprintf '%s|' \"a b\" 'c$d' \"$0\"\n"
    assert (await execute(api, session, quoted))["output"] == "a b|c$d|/bin/bash|"
    await execute(api, session, "mkdir d; cd d; X=1; echo $X > f")
    kept = await execute(api, session, "pwd; cat d/f; echo ${X-unset}")
    assert kept["output"] == "/workspace\n1\nunset\n"


async def test_a_timeout_and_cut_output_are_in_the_output(api: Api, session: str) -> None:
    ran = await execute(api, session, "echo -n begun; sleep 60", timeout_ms=300)
    assert ran == {"exit_code": 124, "output": "begun\n[capsule: timed out after 0.3 seconds]\n"}
    ran = await execute(api, session, "head -c 11000000 /dev/zero | tr '\\0' x")
    assert ran["output"].endswith("x\n[capsule: output cut, it was 11000000 bytes]\n")


async def test_a_repeated_request_with_a_key_is_done_once(api: Api, session: str) -> None:
    key = {"Idempotency-Key": f"k-{session}"}
    body = {"session_id": session, "command": "echo x >> f; wc -l < f"}
    answers = [await api.http.post("/execute", json=body, headers=key) for _ in range(2)]
    assert [a.json()["output"].strip() for a in answers] == ["1", "1"]
    made = [(await api.http.post("/create_session", headers=key)).json() for _ in range(2)]
    assert made[0] == made[1]
    await api.http.post("/cleanup", json=made[0])


async def upload(
    api: Api, session: str, *files: tuple[str, bytes], **fields: str
) -> httpx.Response:
    form = {"session_id": session, **fields}
    return await api.http.post("/upload", data=form, files=[("file", each) for each in files])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"command": "true"}, "session_id: missing"),
        ({"session_id": "abc-123"}, "command: missing"),
        ({"session_id": "abc-123", "command": ["ls"]}, "command: "),
        ({"session_id": "x" * 65, "command": "true"}, "session_id: "),
        ({"session_id": "abc-123", "command": "true", "shell": "sh"}, "shell: unknown field"),
    ],
)
async def test_a_wrong_request_names_the_field(
    api: Api, body: dict[str, Any], problem: str
) -> None:
    answer = await api.http.post("/execute", json=body)
    assert refused(answer, 400, "invalid").startswith(problem)


async def test_an_unknown_session_is_not_found(api: Api) -> None:
    unknown = {"session_id": "abc-123"}
    for path, more in (("/execute", {"command": "true"}), ("/cleanup", {})):
        answer = await api.http.post(path, json={**unknown, **more})
        assert "session 'abc-123' does not exist" in refused(answer, 404, "not_found")
    refused(await upload(api, "abc-123", ("a", b"x")), 404, "not_found")


async def test_files_are_uploaded(api: Api, session: str) -> None:
    binary = bytes(range(256)) * 10
    answer = await upload(api, session, ("data.csv", b"a,b\n"), ("sub/ü.bin", binary), ("e", b""))
    assert answer.status_code == 200
    assert answer.json() == {
        "files": [
            {"path": "/workspace/data.csv", "size": 4},
            {"path": "/workspace/sub/ü.bin", "size": 2560},
            {"path": "/workspace/e", "size": 0},
        ]
    }
    got = await api.http.get(f"/v1/sandboxes/{session}/files?path=sub/ü.bin")
    assert got.content == binary
    named = await upload(api, session, ("C:\\x\\y.txt", b"text"), path="./in/here.txt")
    assert named.json() == {"files": [{"path": "/workspace/in/here.txt", "size": 4}]}
    large = await upload(api, session, ("big", b"\r\n--x" * (4 * MIB)))
    assert large.json()["files"][0]["size"] == 20 * MIB, "more than other bodies may have"


async def test_names_that_lead_out_are_refused(api: Api, session: str) -> None:
    for name, problem in (
        ("../x", "'..' component"),
        ("a/../../x", "'..' component"),
        ("/etc/passwd", "is absolute"),
        (".", "no file's name"),
        ("n" * 256, "255 bytes"),
    ):
        assert problem in refused(await upload(api, session, (name, b"x")), 400, "invalid")
    assert (await execute(api, session, "ls -A"))["output"] == ""
    await execute(api, session, "ln -s /etc/hostname link; ln -s /usr dir")
    for link in ("link", "dir/x"):
        refused(await upload(api, session, (link, b"x")), 403, "forbidden")


FIELD = b'--b\r\nContent-Disposition: form-data; name="session_id"\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"no form at all", ""),
        (FIELD + b"cut in the midd", "ends in the middle"),
        (FIELD + b"\xff\r\n--b--\r\n", ""),
        (b"--b\r\n" + b"x" * 100_000, ""),
    ],
)
async def test_broken_forms_are_refused(api: Api, body: bytes, problem: str) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await api.http.post("/upload", content=body, headers=headers)
    assert problem in refused(answer, 400, "invalid")
