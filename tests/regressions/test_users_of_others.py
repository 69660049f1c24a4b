"""What the users of other sandbox systems suffered from, by the numbers of that list.

Elsewhere: 8 (files changed between pause and resume) in tests/unit/test_pause_real.py, 10 (leaks
of the network) in tests/escape, 16 (one key reaching another's ports) in tests/api.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from capsule_sdk import Capsule, CapsuleClient, Output
from capsule_sdk.errors import ExecFailedError, GoneError, NotFoundError
from tests.api.client import events
from tests.support import ROOT, clean_env, wait_for
from tests.support.servers import CAPSULE, RealServer, real_server, started

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

MIB = 1024 * 1024


@pytest.fixture
def client(server: RealServer) -> Iterator[CapsuleClient]:
    with CapsuleClient(server.url) as made:
        yield made


@pytest.fixture
def capsule(client: CapsuleClient) -> Iterator[Capsule]:
    with client.create("bash", ttl=120) as made:
        yield made


@pytest.fixture
def base() -> Iterator[Path]:
    """Not pytest's own directory: that is closed to others, and too long for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="cr-", dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def is_over(client: CapsuleClient, id: str) -> bool:
    try:
        client.get(id)
    except (GoneError, NotFoundError):
        return True
    return False


def descendants(pid: int) -> list[str]:
    """The names of a process's children, theirs, and so on; not those inside of sandboxes."""
    names: list[str] = []
    here = os.readlink("/proc/self/ns/pid")
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            # Another test's that has ended, or one with its own user namespace: in a sandbox.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if os.readlink(f"/proc/{child}/ns/pid") == here:
                    names.append(Path(f"/proc/{child}/comm").read_text().strip())
                    names += descendants(int(child))
    return names


def test_1_hosting_it_takes_one_process_and_nothing_beside(server: RealServer) -> None:
    with CapsuleClient(server.url) as client, client.create("bash") as capsule:
        assert capsule.exec("echo $((6 * 7))").stdout == "42\n"
        assert set(descendants(server.process.pid)) <= {"capsule-agent"}
        assert connections_of(server.process.pid) <= {server.port}


def connections_of(pid: int) -> set[int]:
    """The local ports of all TCP sockets that a process has, so of every service it talks to."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def test_1_not_even_a_server_is_needed(agent_binary: Path, base: Path) -> None:
    env = clean_env(CAPSULE_DATA_DIR=str(base / "data"), CAPSULE_RUN_DIR=str(base / "run"))
    done = subprocess.run(
        [*CAPSULE, "run", "print(6 * 7)"], env=env, capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


def test_2_a_renewal_and_the_timer_cannot_both_win(client: CapsuleClient) -> None:
    def race(n: int) -> None:
        capsule = client.create("bash", ttl=1.0)
        dice = random.Random(n)
        until = time.monotonic() + 1.0 + dice.uniform(-0.1, 0.5)
        wait_for(lambda: time.monotonic() >= until, what="the moment")
        try:
            capsule.set_timeout(60)
        except (GoneError, NotFoundError):
            wait_for(lambda: is_over(client, capsule.id), what="it ends")
            return
        assert capsule.exec("echo here").stdout == "here\n", "a renewal that worked holds"
        capsule.delete()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(race, range(12)))


def test_2_what_is_left_behind_is_swept(client: CapsuleClient, server: RealServer) -> None:
    left = client.create("bash", ttl=1.0)
    left.start("trap '' TERM HUP; sleep 1000")
    folder = server.base / "run/boxes" / left.id
    assert folder.exists()
    wait_for(lambda: not folder.exists(), what="nothing is left of it")
    with pytest.raises(GoneError, match="its time was over"):
        left.refresh()


def test_2_a_restart_leaves_no_stale_state(agent_binary: Path) -> None:
    with real_server(DRAIN="keep") as server, CapsuleClient(server.url) as client:
        kept, brief = client.create("bash", ttl=300), client.create("bash", ttl=1.5)
        server.process.kill()
        server.process.wait()
        ended = time.monotonic() + 1.5
        wait_for(lambda: time.monotonic() > ended, what="one is over while no server runs")
        with open(server.base / "log", "a") as log:
            again = subprocess.Popen([*CAPSULE, "serve"], env=server.env, stdout=log, stderr=log)
        try:
            wait_for(lambda: answers(server.url), what="the server is back", within=40)
            assert client.get(kept.id).exec("echo here").stdout == "here\n"
            wait_for(lambda: is_over(client, brief.id), what="what was over is gone")
            assert [each.id for each in client.list()] == [kept.id]
            client.get(kept.id).delete()
            assert list((server.base / "run/boxes").iterdir()) == []
        finally:
            again.send_signal(signal.SIGTERM)
            again.wait(15)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as page:
        return bool(page.status == 200)
    return False


EVASIONS = {
    "a child": "sleep 1000 & echo $! > pid; wait",
    "a daemon": "setsid bash -c 'echo $$ > pid; exec sleep 1000' < /dev/null & wait; sleep 1000",
    "an orphan": "( (bash -c 'echo $$ > pid; exec sleep 1000' &) & ); sleep 1000",
    "deaf to signals": "trap '' TERM INT HUP QUIT; echo $$ > pid; while :; do sleep 0.1; done",
    "stopped by itself": "echo $$ > pid; kill -STOP $$",
    "a stopped child": "bash -c 'echo $$ > pid; kill -STOP $$' & wait",
}


@pytest.mark.parametrize("script", EVASIONS.values(), ids=EVASIONS)
def test_3_a_timeout_ends_everything_the_exec_started(capsule: Capsule, script: str) -> None:
    stream = capsule.start(script, timeout=2.5)
    wait_for(lambda: capsule.exec("test -s pid").ok, what="the victim wrote its number")
    victim = capsule.read_file_text("pid").strip()
    assert capsule.exec(f"kill -0 {victim}").ok
    ended = stream.wait()
    assert (ended.reason, ended.timed_out) == ("timed_out", True)
    assert not capsule.exec(f"kill -0 {victim}").ok, "it does not outlive the timeout"


def test_4_no_exit_is_invented_while_the_program_runs(capsule: Capsule) -> None:
    """Its output is closed, and still it has not ended."""
    wait = "until test -e go; do sleep 0.1; done"
    stream = capsule.start(f"exec > /dev/null 2>&1; touch quiet; {wait}; exit 9", timeout=60)
    wait_for(lambda: capsule.exists("quiet"), what="it has closed its output")
    (info,) = [each for each in capsule.execs() if each.id == stream.exec_id]
    assert info.running and info.exit is None
    capsule.write_file("go", "")
    assert stream.wait().exit_code == 9


def test_4_out_of_memory_is_the_reason(client: CapsuleClient) -> None:
    with client.create("python", memory=64 * MIB) as capsule:
        if any(each.what == "memory" for each in capsule.info.unenforced):
            pytest.skip("this host cannot limit the memory of a whole sandbox")
        result = capsule.run("x = bytearray(300 * 1024 * 1024)")
        assert result.reason == "oom_killed"
        with pytest.raises(ExecFailedError, match="out of memory"):
            result.check()
        assert capsule.run("print('alive')").stdout == "alive\n"


def test_5_characters_are_never_split(capsule: Capsule) -> None:
    text = "añ€😀" * 50_000
    capsule.write_file("text", text)
    slowly = 'python3 -c \'import sys, os\nd = open("text", "rb").read()\n'
    slowly += "for i in range(0, len(d), 4093): os.write(1, d[i:i+4093])'"
    for _ in range(2):
        pieces = [event for event in capsule.stream(slowly) if isinstance(event, Output)]
        assert len(pieces) > 1
        assert "".join(piece.data.decode("utf-8") for piece in pieces) == text
    assert capsule.exec("cat text").stdout == text


@pytest.mark.parametrize("output", ["no newline", "one\ntwo", "\n\n", "", "cr\r\nlf"])
def test_5_the_last_line_needs_no_newline(capsule: Capsule, output: str) -> None:
    capsule.write_file("out", output)
    assert capsule.exec("cat out; cat out >&2").stdout == output
    assert "".join(e.text for e in capsule.stream("cat out") if isinstance(e, Output)) == output


def test_5_output_over_the_limit_is_cut_and_marked(capsule: Capsule) -> None:
    result = capsule.exec("seq 1000000; echo done >&2", output_limit=1000)
    assert result.ok
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 1000))[:1000]
    assert result.stdout_truncated and not result.stderr_truncated
    assert (result.stdout_bytes, result.stderr) == (6_888_896, "done\n")


async def test_6_a_dropped_stream_goes_on_where_it_was(server: RealServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
        id = (await http.post("/v1/sandboxes", json={"template": "bash"})).json()["id"]
        body = {"cmd": "for i in $(seq 200); do echo $i; sleep 0.005; done; exit 5"}
        answer = await http.post(f"/v1/sandboxes/{id}/execs?wait=false", json=body)
        exec_id = answer.json()["exec_id"]
        text, last, cuts = "", "", 0
        end: dict[str, Any] | None = None
        while end is None:
            headers = {"Last-Event-ID": last} if last else {}
            path = f"/v1/sandboxes/{id}/execs/{exec_id}/stream"
            async with http.stream("GET", path, headers=headers) as answer:
                seen = 0
                async for event in events(answer):
                    last = event.id or last
                    if event.name == "exit":
                        end = event.data
                    elif event.name == "stdout":
                        text += event.data["data"]
                    seen += 1
                    if seen == 7:  # the connection drops
                        cuts += 1
                        break
        assert text == "".join(f"{n}\n" for n in range(1, 201)), "nothing lost, nothing twice"
        assert end["exit_code"] == 5
        assert cuts > 3
        await http.delete(f"/v1/sandboxes/{id}")


@pytest.mark.parametrize("size", [0, 1, 18 * 1024, 18 * 1024 + 1, 65_537, 5 * MIB])
def test_7_files_of_any_size_arrive_whole(capsule: Capsule, size: int) -> None:
    content = random.Random(size).randbytes(size)
    written = capsule.write_file("file", content)
    assert written.size == size
    assert capsule.read_file("file") == content
    assert capsule.exec("wc -c < file").stdout.strip() == str(size)


def test_7_a_large_file_is_not_held_in_memory(capsule: Capsule, server: RealServer) -> None:
    block = os.urandom(MIB)

    def memory() -> int:
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    most = before = memory()

    def content() -> Iterator[bytes]:
        nonlocal most
        for _ in range(96):
            most = max(most, memory())
            yield block

    assert capsule.write_file("big", content()).size == 96 * MIB
    for _ in capsule.read_stream("big"):
        most = max(most, memory())
    assert most - before < 32 * MIB


def test_9_a_burst_runs_side_by_side_without_a_pool(client: CapsuleClient) -> None:
    """Twenty at once: none goes on before all of them run."""
    all_run = Barrier(20, timeout=40)

    def one(n: int) -> str:
        with client.create("bash") as capsule:
            stream = capsule.start(f"until test -e go; do sleep 0.1; done; echo {n}")
            all_run.wait()
            capsule.write_file("go", "")
            return stream.wait().stdout

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == [f"{n}\n" for n in range(20)]


def test_9_a_full_server_refuses(agent_binary: Path) -> None:
    with real_server(MAX_SANDBOXES="2") as server, httpx.Client(base_url=server.url) as http:
        made = [http.post("/v1/sandboxes", json={"template": "bash"}) for _ in range(3)]
        assert [each.status_code for each in made] == [201, 201, 429]
        assert made[2].json()["error"]["code"] == "capacity"
        assert int(made[2].headers["retry-after"]) >= 1


def test_11_no_secret_of_the_server_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t-key-of-the-operator"
    monkeypatch.setenv("OPERATORS_TOKEN", secret)
    with real_server(started, API_KEYS=secret) as server:
        assert secret in Path(f"/proc/{server.process.pid}/environ").read_text()
        with CapsuleClient(server.url, api_key=secret) as client, client.create("bash") as capsule:
            look = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n';"
            look += " cat /proc/self/mountinfo; ls -laR /run /var /root /home 2>/dev/null"
            seen = capsule.exec(look)
            assert "HOME=/workspace" in seen.stdout
            assert secret not in seen.stdout + seen.stderr
            files = capsule.exec(f"grep -rls {secret} /etc /tmp /workspace /run")
            assert files.stdout == ""
            assert secret not in repr(capsule.info)
        assert secret not in (server.base / "log").read_text()


def test_12_a_disk_quota_is_applied(client: CapsuleClient) -> None:
    with client.create("bash", disk=16 * MIB, inodes=300, memory=256 * MIB) as capsule:
        if any(each.what in ("disk", "inodes") for each in capsule.info.unenforced):
            pytest.skip("this host cannot limit a sandbox's disk")
        fill = "i=0; while head -c 1000000 /dev/zero > {}/f$i; do i=$((i+1)); done 2>/dev/null;"
        fill += " du -sk {} | cut -f1"

        def filled(folder: str) -> int:
            return int(capsule.exec(fill.replace("{}", folder)).stdout) * 1024

        assert 8 * MIB < filled("/workspace") <= 17 * MIB
        assert filled("/tmp") <= 17 * MIB
        # A folder in memory counts as memory.
        assert 8 * MIB < filled("/dev/shm") < 256 * MIB
        assert (capsule.metrics().memory_bytes or 256 * MIB) > 8 * MIB
        capsule.exec("rm -f /workspace/* /tmp/* /dev/shm/*")
        touch = "i=0; while : > f$i; do i=$((i+1)); done 2>/dev/null; echo $i"
        assert 100 < int(capsule.exec(touch).stdout) <= 400


@pytest.mark.parametrize("cpus", [0.5, 1.0, 2.0])
def test_13_programs_see_the_sandbox_and_not_the_host(client: CapsuleClient, cpus: float) -> None:
    shown = max(1, min(round(cpus), os.cpu_count() or 1))
    with client.create("python", cpus=cpus, memory=100 * MIB) as capsule:
        assert capsule.exec("nproc").stdout.strip() == str(shown)
        assert capsule.run("import os; print(len(os.sched_getaffinity(0)))").stdout == f"{shown}\n"
        if capsule.info.isolation == "namespaces":
            assert capsule.run("import os; print(os.cpu_count())").stdout == f"{shown}\n"
            total = capsule.exec("awk '/^MemTotal/ {print $2}' /proc/meminfo").stdout
            assert int(total) == 100 * 1024


def test_14_the_agent_answers_while_the_cpu_is_full(client: CapsuleClient) -> None:
    with client.create("bash", processes=64) as capsule:
        busy = capsule.start(
            "for i in $(seq 40); do (while :; do :; done) & done; wait", timeout=50
        )
        for _ in range(3):
            assert capsule.exists("/workspace")
            assert len(capsule.execs()) == 1
        assert busy.kill()


def test_15_a_retry_makes_no_second_sandbox(server: RealServer) -> None:
    headers = {"Idempotency-Key": f"regression-15-{os.getpid()}"}
    with httpx.Client(base_url=server.url, timeout=20) as http:

        def create(_: int) -> httpx.Response:
            return http.post("/v1/sandboxes", json={"template": "bash"}, headers=headers)

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(create, range(8)))
        assert {each.status_code for each in made} == {201}
        (id,) = {each.json()["id"] for each in made}
        other = http.post("/v1/sandboxes", json={"template": "python"}, headers=headers)
        assert other.status_code == 409, "the key means the first request"
        run = {"cmd": "echo ran >> runs; exit 4"}
        again = [
            http.post(f"/v1/sandboxes/{id}/execs", json=run, headers=headers) for _ in range(3)
        ]
        assert [each.json()["exit_code"] for each in again] == [4, 4, 4]
        runs = http.post(f"/v1/sandboxes/{id}/execs", json={"cmd": "cat runs"})
        assert runs.json()["stdout"] == "ran\n"
        http.delete(f"/v1/sandboxes/{id}")


def test_17_limits_hold_under_the_cgroups_that_this_host_has(client: CapsuleClient) -> None:
    """The other version is booted in tests/vm, and has to hold the same limits there."""
    assert (ROOT / "tests/vm/test_cgroup2.py").exists()
    with client.create("bash", processes=20, memory=64 * MIB) as capsule:
        if capsule.info.unenforced:
            pytest.skip("no cgroups for this user on this host")
        usage = capsule.metrics()
        assert usage.source in ("cgroup1", "cgroup2")
        bomb = "for i in $(seq 100); do sleep 5 & done 2>/dev/null; jobs -p | wc -l"
        assert int(capsule.exec(bomb).stdout or 0) <= 20
        assert (capsule.metrics().memory_peak_bytes or 0) <= 64 * MIB


def test_18_an_idle_sandbox_ends_and_a_used_one_does_not(client: CapsuleClient) -> None:
    idle, used = (client.create("bash", ttl=60, idle_timeout=1.5) for _ in range(2))

    def idle_is_over() -> bool:
        assert used.exec("echo here").stdout == "here\n"
        return is_over(client, idle.id)

    wait_for(idle_is_over, what="the idle one is over")
    with pytest.raises(GoneError, match="nobody used it"):
        idle.refresh()
    wait_for(lambda: is_over(client, used.id), what="and the other when nobody uses it")


def test_18_every_kind_of_use_extends_it(client: CapsuleClient) -> None:
    uses = {
        "files": lambda c: c.write_file("f", "x"),
        "a running program": lambda c: c.start("sleep 30", timeout=60),
        "keep_alive": lambda c: c.keep_alive(),
    }
    made = {name: client.create("bash", ttl=60, idle_timeout=1.5) for name in uses}
    uses["a running program"](made["a running program"])
    until = time.monotonic() + 3.5
    while time.monotonic() < until:
        for name in ("files", "keep_alive"):
            uses[name](made[name])
    for name, capsule in made.items():
        assert not is_over(client, capsule.id), name
        capsule.delete()
