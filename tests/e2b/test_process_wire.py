"""Processes as they are on the wire: frames, ends, errors, and requests that no SDK sends."""

from __future__ import annotations

import base64

import pytest

from tests.e2b.wire import Wire, pack

pytestmark = pytest.mark.real

START = "/process.Process/Start"


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("true", {"exited": True, "status": "exit status 0"}),
        (
            "exit 3",
            {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"},
        ),
        (
            "kill -9 $$",
            {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"},
        ),
        (
            "kill -TERM $$",
            {"exitCode": -1, "status": "signal: terminated", "error": "signal: terminated"},
        ),
    ],
)
async def test_frames_of_a_process(wire: Wire, script: str, end: dict[str, object]) -> None:
    process = {"cmd": "/bin/sh", "args": ["-c", f"echo hi; echo no >&2; {script}"]}
    frames = await wire.frames(START, {"process": process})
    events = [frame.body["event"] for frame in frames[:-1]]
    assert list(events[0]) == ["start"] and events[0]["start"]["pid"] > 0
    assert {"data": {"stdout": base64.b64encode(b"hi\n").decode()}} in events
    assert {"data": {"stderr": base64.b64encode(b"no\n").decode()}} in events
    assert events[-1] == {"end": end}
    assert frames[-1] == (2, {})
    late = await wire.run("sleep 60", connect_timeout_ms="300")
    assert (late.end, late.last["error"]["code"]) == (None, "deadline_exceeded")


async def test_a_silent_process_is_kept_alive(wire: Wire) -> None:
    frames = await wire.frames(
        START, {"process": {"cmd": "sleep", "args": ["1.5"]}}, keepalive_ping_interval="1"
    )
    assert {"event": {"keepalive": {}}} in [frame.body for frame in frames]


@pytest.mark.parametrize(
    ("process", "text"),
    [
        ({"cmd": "true", "cwd": "/nowhere"}, "cwd '/nowhere' does not exist"),
        ({"cmd": "/no/such/program"}, "program not found: /no/such/program"),
        ({"cmd": ""}, "cmd"),
        ({"cmd": "true", "envs": {"A=B": "c"}}, "has a '='"),
    ],
)
async def test_a_failed_start_says_why_in_the_last_frame(
    wire: Wire, process: dict[str, object], text: str
) -> None:
    frames = await wire.frames(START, {"process": process})
    assert len(frames) == 1
    assert frames[0].body["error"]["code"] == "invalid_argument"
    assert text in frames[0].body["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0\0\0", "invalid_argument"),
        (b"\0\0\0\0\x09{}", "invalid_argument"),
        (b"\0\xff\xff\xff\xff", "invalid_argument"),
        (pack({"process": {"cmd": "true"}}, flags=1), "unimplemented"),
        (b"\0\0\0\0\x02[]", "invalid_argument"),
        (b"\0\0\0\0\x03{x}", "invalid_argument"),
        (pack({"process": {"cmd": 7}}), "invalid_argument"),
        (pack({"process": {"cmd": "true"}}) * 2, "invalid_argument"),
    ],
)
async def test_broken_envelopes_are_refused(wire: Wire, raw: bytes, code: str) -> None:
    async with wire.stream(START, None, raw=raw) as frames:
        assert frames.answer.status_code == 200
        (only,) = await frames.rest()
        assert only.flags == 2 and only.body["error"]["code"] == code


async def test_calls_need_the_token_of_their_own_sandbox(wire: Wire) -> None:
    wire.headers["x-access-token"] = "ea_" + "0" * 40
    refused = await wire.call("/process.Process/List", {})
    assert refused.status_code == 401
    assert refused.json()["code"] == 401 and "valid access token" in refused.json()["message"]


async def test_unknown_calls_and_paths_are_errors_of_that_shape(wire: Wire) -> None:
    unknown = await wire.call("/process.Process/Frobnicate", {})
    assert unknown.status_code == 404 and unknown.json()["code"] == "unimplemented"
    lost = await wire.http.get("/nothing/here/at/all", headers=wire.headers)
    assert lost.status_code == 404 and lost.json()["code"] == 404
    wrong = await wire.http.get("/process.Process/List", headers=wire.headers)
    assert wrong.status_code == 405
    headers = {**wire.headers, "content-type": "application/proto"}
    binary = await wire.http.post("/process.Process/List", content=b"", headers=headers)
    assert binary.status_code == 415


async def test_numbers_may_be_text_and_null_is_nothing(wire: Wire) -> None:
    process = {"cmd": "sleep", "args": ["60"], "envs": None, "cwd": None}
    async with wire.stream(START, {"process": process, "tag": "mine", "pty": None}) as frames:
        pid = (await frames.next()).body["event"]["start"]["pid"]
        (listed,) = (await wire.ask("/process.Process/List"))["processes"]
        assert (listed["pid"], listed["tag"]) == (pid, "mine")
        wrong = {"process": {"tag": "other"}, "signal": "SIGNAL_SIGTERM"}
        assert (await wire.call("/process.Process/SendSignal", wrong)).status_code == 404
        await wire.ask("/process.Process/SendSignal", process={"pid": str(pid)}, signal=15)
        rest = await frames.rest()
        assert rest[0].body["event"]["end"]["status"] == "signal: terminated"


@pytest.mark.parametrize("name", ["Connect", "SendInput", "Update", "CloseStdin", "SendSignal"])
async def test_an_unknown_process_is_not_found(wire: Wire, name: str) -> None:
    message = {"process": {"pid": 4_000_000}, "input": {"stdin": "eA=="}, "signal": 9}
    if name == "Connect":
        (only,) = await wire.frames("/process.Process/Connect", message)
        error = only.body["error"]
    else:
        answer = await wire.call(f"/process.Process/{name}", message)
        assert answer.status_code == 404
        error = answer.json()
    assert error == {"code": "not_found", "message": "process with pid 4000000 not found"}


async def test_an_input_stream_begins_with_its_process(wire: Wire) -> None:
    name = "/process.Process/StreamInput"
    early = pack({"data": {"input": {"stdin": "eA=="}}})
    unknown = pack({"start": {"process": {"pid": 4_000_000}}})
    for raw, code in ((early, "invalid_argument"), (unknown, "not_found")):
        async with wire.stream(name, None, raw=raw) as frames:
            (only,) = await frames.rest()
            assert only.body["error"]["code"] == code
