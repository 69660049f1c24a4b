"""Processes as they are on the wire: framing, ends, errors, and what no SDK would send."""

from __future__ import annotations

import base64

import pytest

from tests.api.client import Api
from tests.e2b.wire import Wire, pack
from tests.support import eventually

pytestmark = pytest.mark.real

START = "/process.Process/Start"


async def test_a_process_starts_speaks_and_ends(wire: Wire) -> None:
    frames = await wire.frames(
        START, {"process": {"cmd": "/bin/sh", "args": ["-c", "echo hi; echo no >&2"]}}
    )
    events = [frame.body["event"] for frame in frames[:-1]]
    assert list(events[0]) == ["start"] and events[0]["start"]["pid"] > 0
    assert {"data": {"stdout": base64.b64encode(b"hi\n").decode()}} in events
    assert {"data": {"stderr": base64.b64encode(b"no\n").decode()}} in events
    assert events[-1] == {"end": {"exited": True, "status": "exit status 0"}}
    assert frames[-1] == (2, {})


@pytest.mark.parametrize(
    ("script", "end"),
    [
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
async def test_how_it_ended_is_told(wire: Wire, script: str, end: dict[str, object]) -> None:
    assert (await wire.run(script)).end == end


async def test_time_over_kills_and_is_told_in_the_last_frame(wire: Wire) -> None:
    ran = await wire.run("echo $$; sleep 60", connect_timeout_ms="500")
    assert ran.end is None
    assert ran.last["error"]["code"] == "deadline_exceeded"
    pid = int(ran.stdout)
    assert (await wire.run(f"kill -0 {pid}")).end != {"exited": True, "status": "exit status 0"}


async def test_a_silent_process_is_kept_alive(wire: Wire) -> None:
    frames = await wire.frames(
        START, {"process": {"cmd": "sleep", "args": ["1.5"]}}, keepalive_ping_interval="1"
    )
    assert {"event": {"keepalive": {}}} in [frame.body for frame in frames]


async def test_output_is_not_limited_and_not_lost(wire: Wire) -> None:
    """More than is kept of any exec, and with a reader that takes its time."""
    size = 12_000_000
    script = f"head -c {size} /dev/zero | tr '\\0' x"
    assert len((await wire.run(script)).stdout) == size


@pytest.mark.parametrize(
    ("process", "text"),
    [
        ({"cmd": "true", "cwd": "/nowhere"}, "cwd '/nowhere' does not exist"),
        ({"cmd": "/no/such/program"}, "program not found: /no/such/program"),
        ({"cmd": ""}, "cmd"),
        ({"cmd": "true", "envs": {"A=B": "c"}}, "has a '='"),
    ],
)
async def test_what_cannot_start_says_why_in_the_last_frame(
    wire: Wire, process: dict[str, object], text: str
) -> None:
    frames = await wire.frames(START, {"process": process})
    assert len(frames) == 1
    assert frames[0].body["error"]["code"] == "invalid_argument"
    assert text in frames[0].body["error"]["message"]


async def test_an_unknown_user_is_refused(wire: Wire) -> None:
    name = base64.b64encode(b"nobody-here:").decode()
    frames = await wire.frames(START, {"process": {"cmd": "id"}}, authorization=f"Basic {name}")
    assert frames[0].body == {
        "error": {"code": "unauthenticated", "message": "invalid username: 'nobody-here'"}
    }


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


async def test_a_command_that_is_too_long_is_no_matter_of_time(wire: Wire) -> None:
    last = (await wire.run("echo " + "a" * 200_000)).last
    said = "cmd: 200005 bytes, limit 131071: write it to a file, and run that"
    assert last == {"error": {"code": "invalid_argument", "message": said}}


async def test_calls_need_the_token_of_their_own_sandbox(wire: Wire) -> None:
    wire.headers["x-access-token"] = "ea_" + "0" * 40
    refused = await wire.call("/process.Process/List", {})
    assert refused.status_code == 401
    assert refused.json()["code"] == 401 and "valid access token" in refused.json()["message"]


async def test_unknown_calls_and_paths_have_the_shape_of_errors(wire: Wire) -> None:
    unknown = await wire.call("/process.Process/Frobnicate", {})
    assert unknown.status_code == 404 and unknown.json()["code"] == "unimplemented"
    lost = await wire.http.get("/nothing/here/at/all", headers=wire.headers)
    assert lost.status_code == 404 and lost.json()["code"] == 404
    wrong = await wire.http.get("/process.Process/List", headers=wire.headers)
    assert wrong.status_code == 405
    headers = {**wire.headers, "content-type": "application/proto"}
    binary = await wire.http.post("/process.Process/List", content=b"", headers=headers)
    assert binary.status_code == 415


async def test_slashes_before_a_call_do_not_matter(wire: Wire) -> None:
    there = f"{wire.http.base_url}".rstrip("/") + "//process.Process/List"
    assert (await wire.call(there, {})).status_code == 200


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


async def test_an_exec_of_our_own_api_can_be_connected_to(wire: Wire, api: Api) -> None:
    script = "head -c 100000 /dev/zero; echo out >&2; sleep 60"
    begun = await api.rpc("start", id=wire.id, cmd=["sh", "-c", script], output_limit=1000)
    (listed,) = (await wire.ask("/process.Process/List"))["processes"]
    assert listed["config"] == {"cmd": "sh", "args": ["-c", script]}

    async def written() -> bool:
        (found,) = (await api.rpc("execs", id=wire.id))["execs"]
        return bool(found["stderr_bytes"])

    await eventually(written, what="all of its output")
    selector = {"process": {"pid": listed["pid"]}}
    async with wire.stream("/process.Process/Connect", selector) as frames:
        assert "start" in (await frames.next()).body["event"]
        await api.rpc("kill", id=wire.id, exec_id=begun["exec_id"])
        assert "end" in (await frames.next()).body["event"]


@pytest.mark.parametrize("name", ["Connect", "SendInput", "Update", "CloseStdin", "SendSignal"])
async def test_nobody_is_found_under_a_wrong_number(wire: Wire, name: str) -> None:
    message = {"process": {"pid": 4_000_000}, "input": {"stdin": "eA=="}, "signal": 9}
    if name == "Connect":
        (only,) = await wire.frames("/process.Process/Connect", message)
        told = only.body["error"]
    else:
        answer = await wire.call(f"/process.Process/{name}", message)
        assert answer.status_code == 404
        told = answer.json()
    assert told == {"code": "not_found", "message": "process with pid 4000000 not found"}


async def test_input_streams_begin_with_whose_they_are(wire: Wire) -> None:
    name = "/process.Process/StreamInput"
    early = pack({"data": {"input": {"stdin": "eA=="}}})
    nobody = pack({"start": {"process": {"pid": 4_000_000}}})
    for raw, code in ((early, "invalid_argument"), (nobody, "not_found")):
        async with wire.stream(name, None, raw=raw) as frames:
            (only,) = await frames.rest()
            assert only.body["error"]["code"] == code
