"""The service over real boxes: what only a kernel and a real agent can show."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import shutil
import signal
import sqlite3
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capsule.config import Config
from capsule.errors import (
    CapsuleError,
    GoneError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from capsule.link.exec_stream import Output
from capsule.model import MIB, Reason, State
from capsule.service import CreateRequest, ExecCall, RunCall, Service
from capsule.service.code import MAX_INLINE
from capsule.service.room import holding
from tests.support import backends, component_missing, eventually
from tests.support.backends import LEVEL
from tests.support.folders import server_folder

pytestmark = pytest.mark.real


@pytest.fixture
def folder(agent_binary: Path) -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    with server_folder("cs-") as path:
        yield path


@asynccontextmanager
async def serving(
    folder: Path, *, drain: str = "delete", **settings: Any
) -> AsyncIterator[Service]:
    backend = backends.of(folder)
    config = Config(
        data_dir=folder / "d",
        run_dir=folder / "r",
        drain=drain,
        isolation=backend.level,
        provider=backend.name,
        **settings,
    )
    provider = await asyncio.to_thread(backend.make, config)
    service = Service(config, {backend.name: provider}, backend.catalog)
    try:
        await service.open()
    except UnavailableError as error:
        component_missing(f"no {LEVEL} for the service's tests: {error.message}")
    try:
        yield service
    finally:
        await service.aclose()


def boxes(folder: Path) -> list[str]:
    return backends.of(folder).boxes(folder)


def keeper(folder: Path, id: str) -> int:
    return int(json.loads((folder / "r" / "boxes" / id / "box.json").read_bytes())["keeper"])


async def test_run_exec_files_and_delete(folder: Path) -> None:
    async with serving(folder) as service:
        made = await service.create(CreateRequest(env={"GREETING": "hi"}))
        run = await service.run(
            made.id, RunCall("import os; print(os.environ['GREETING'], os.getcwd())")
        )
        assert run.stdout == b"hi /workspace\n"
        failed = await service.exec(
            made.id, ExecCall(("sh", "-c", "echo out; echo err >&2; exit 7"))
        )
        assert (failed.stdout, failed.stderr, failed.exit.exit_code) == (b"out\n", b"err\n", 7)
        files = service.files(made.id)
        await files.write("mod.py", b"x = 42")
        assert (await service.run(made.id, RunCall("import mod; print(mod.x)"))).stdout == b"42\n"
        assert await files.read_bytes("/workspace/mod.py", limit=100) == (b"x = 42", 6)
        await service.delete(made.id)
        assert boxes(folder) == []


async def test_stdin_timeouts_and_limits_reach_the_program(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        data = os.urandom(300_000)
        assert (await service.exec(id, ExecCall(("cat",), stdin=data))).stdout == data
        slow = await service.exec(id, ExecCall(("sleep", "60"), timeout=0.2))
        assert slow.exit.reason is Reason.TIMED_OUT
        flood = await service.exec(
            id, ExecCall(("head", "-c", "100000", "/dev/zero"), output_limit=10)
        )
        assert flood.stdout == bytes(10)
        assert flood.exit.stdout_truncated
        assert flood.exit.stdout_bytes == 100_000


async def test_code_larger_than_an_argument_runs_and_leaves_no_file(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        await service.files(id).write("mod.py", b"x = 1")
        code = "import mod\n" + "#" * 300_000 + "\nprint(mod.x + 1)"
        for session in (None, "s"):
            result = await service.run(id, RunCall(code, session=session))
            assert (result.stdout, result.stderr) == (b"2\n", b"")
        shell = await service.run(id, RunCall("#" * 300_000 + "\necho $((1+2))", language="bash"))
        assert shell.stdout == b"3\n"
        listing = await service.files(id).list("/workspace")
        assert {entry.name for entry in listing.entries} <= {"mod.py", "__pycache__"}


async def test_code_that_could_not_start_leaves_no_file(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        call = RunCall("#" * 300_000, cwd="/nowhere")
        with pytest.raises(NotFoundError):
            await service.run(id, call)
        with pytest.raises(NotFoundError):
            await service.start(id, call)
        assert (await service.files(id).list("/workspace")).entries == []


async def test_what_is_read_at_once_takes_room(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        files, room = service.files(id), service._parts.room
        await files.write("large", bytes(MIB))
        with holding():
            await files.read_bytes("large", length=1000, limit=MIB)
            assert room.taken == 0
            whole = await files.read_bytes("large", offset=10, limit=MIB)
            assert (len(whole.data), whole.size, room.taken) == (MIB - 10, MIB, MIB - 10)
        assert room.taken == 0
        with pytest.raises(TooLargeError, match=f"{MIB} bytes, limit 1000"):
            await files.read_bytes("large", limit=1000)


SESSION: list[tuple[ExecCall | RunCall, int]] = [
    (ExecCall(("bash", "-c", "cd /tmp; export A='x y'$'\\n'z; B=not-exported; exit 3")), 3),
    (ExecCall(("sh", "-c", 'test "$PWD" = /tmp && test "$A" = "x y\nz" && test -z "${B-}"')), 0),
    (RunCall("import os; os.environ['C'] = 'ü'; os.chdir('/'); del os.environ['A']"), 0),
    (RunCall("import os; assert os.environ['C'] == 'ü' and 'A' not in os.environ"), 0),
    (RunCall('test "$PWD" = / && test "$C" = ü && unset C', language="bash"), 0),
    (ExecCall(("env",), env={"ONCE": "1"}), 0),
    (RunCall("import os, sys; sys.exit('C' in os.environ or 'ONCE' in os.environ)"), 0),
    (RunCall("from __future__ import annotations\nimport sys; sys.exit(len(sys.argv) - 1)"), 0),
    (ExecCall(("bash", "-c", "mkdir /tmp/d; cd /tmp/d")), 0),
    (ExecCall(("bash", "-c", "rmdir /tmp/d")), 0),
    (ExecCall(("bash", "-c", 'test "$PWD" = /workspace')), 0),
]


async def test_a_session_carries_over_between_languages(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        for number, (call, code) in enumerate(SESSION):
            (result,) = await service.batch(id, [replace(call, session="s")])
            assert result.exit.exit_code == code, (number, result.stderr)


@pytest.mark.parametrize("filler", ["", "# " + "x" * MAX_INLINE], ids=["argument", "file"])
async def test_a_session_and_a_trap_of_the_scripts_own(folder: Path, filler: str) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        script = f"trap 'echo bye $?' EXIT; export LEFT=behind; cd /tmp; exit 3\n{filler}"
        first = await service.run(id, RunCall(script, session="s"))
        assert (first.exit.exit_code, first.stdout) == (3, b"bye 3\n")
        second = await service.run(id, RunCall('echo "$LEFT $PWD"', session="s"))
        assert second.stdout == b"behind /tmp\n"


async def test_what_a_left_program_reports_reaches_its_session(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        script = 'read word; export LEFT="$word"; cd /tmp; sleep 0.2'
        call = ExecCall(("bash", "-c", script), session="s", stdin=b"behind\n")
        async with await service.start(id, call):
            pass  # gone before the program was

        async def told() -> bool:
            show = ExecCall(("printenv", "LEFT"), session="s")  # reports nothing itself
            return (await service.exec(id, show)).stdout == b"behind\n"

        await eventually(told, what="the session knows what the program left")


async def test_a_session_shows_tracebacks_as_python_does(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        for code in (
            "def f():\n  1/0\nf()",
            "a b",
            "import sys; sys.exit('bye')",
            "raise SystemExit(4)",
        ):
            plain = await service.run(id, RunCall(code))
            carried = await service.run(id, RunCall(code, session="s"))
            assert carried.stderr == plain.stderr
            assert carried.exit.exit_code == plain.exit.exit_code


async def test_a_hostile_report_changes_nothing_else(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        flood = "while :; do head -c 65536 /dev/zero; done >&9"
        result = await service.exec(id, ExecCall(("bash", "-c", flood), session="s", timeout=0.5))
        assert result.exit.reason is Reason.TIMED_OUT
        odd = r'printf "capsule1\0/proc/self\0PATH=/evil\0LD_PRELOAD=x\0\0" >&9; trap - EXIT'
        await service.exec(id, ExecCall(("bash", "-c", odd), session="s"))
        other = await service.exec(
            id, ExecCall(("sh", "-c", 'echo "$PATH$LD_PRELOAD"'), session="t")
        )
        assert b"evil" not in other.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_node_code_runs_and_carries(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest(template="node"))).id
        first = await service.run(
            id, RunCall("process.env.N = 'ü'; process.chdir('/tmp'); console.log(6*7)", session="s")
        )
        assert (first.stdout, first.stderr) == (b"42\n", b"")
        second = await service.run(
            id, RunCall("console.log(process.env.N, process.cwd())", session="s")
        )
        assert second.stdout == "ü /tmp\n".encode()


async def test_a_stream_with_input(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        async with await service.start(id, ExecCall(("cat",)), stdin_open=True) as live:
            await live.send(b"one ")
            first = await anext(live)
            assert isinstance(first, Output)
            await service.send_input(id, live.exec_id, b"two", eof=True)
            rest = b"".join([item.data async for item in live if isinstance(item, Output)])
        assert first.data + rest == b"one two"
        assert live.exit is not None


async def test_large_input_of_a_stream_is_fed_while_it_is_read(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        data = os.urandom(2 * MIB)
        async with await service.start(id, ExecCall(("cat",), stdin=data)) as live:
            out = b"".join([item.data async for item in live if isinstance(item, Output)])
        assert out == data


async def test_folders_travel_as_tar(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        files = service.files(id)
        tree = (
            "mkdir -p a/b; echo 1 > a/b/one; ln -s b/one a/link; head -c 3000000 /dev/urandom > big"
        )
        await service.exec(
            id, ExecCall(("bash", "-c", tree + "; mkfifo a/pipe; chmod 755 a/b/one"))
        )
        data = b"".join([piece async for piece in files.tar_out("/workspace")])
        with tarfile.open(fileobj=io.BytesIO(data)) as made:
            assert sorted(made.getnames()) == ["a", "a/b", "a/b/one", "a/link", "big"]

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 65_536):
                yield data[start : start + 65_536]

        assert (await files.tar_in("/workspace/copy", chunks())).files == 2
        check = "cmp big copy/big && cmp a/b/one copy/a/link && test -x copy/a/b/one"
        result = await service.exec(id, ExecCall(("bash", "-c", check)))
        assert result.exit.exit_code == 0, result.stderr


async def test_hostile_archives_change_nothing_elsewhere(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as made:
            link = tarfile.TarInfo("l")
            link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
            made.addfile(link)
            evil = tarfile.TarInfo("l/evil")
            evil.size = 1
            made.addfile(evil, io.BytesIO(b"x"))

        async def chunks() -> AsyncIterator[bytes]:
            yield out.getvalue()

        with pytest.raises(InvalidError, match="leads through a symbolic link"):
            await service.files(id).tar_in("x", chunks())
        with pytest.raises(NotFoundError):
            await service.files(id).stat("/tmp/evil")


@pytest.mark.parametrize("target", ["/tmp/there", "/tmp/not-there"])
async def test_a_file_of_an_archive_takes_the_place_of_its_link(folder: Path, target: str) -> None:
    async with serving(folder) as service:
        files = service.files((await service.create(CreateRequest())).id)
        await files.write("/tmp/there", b"old")
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as made:
            link, file = tarfile.TarInfo("x"), tarfile.TarInfo("x")
            link.type, link.linkname, file.size = tarfile.SYMTYPE, target, 3
            made.addfile(link)
            made.addfile(file, io.BytesIO(b"new"))

        async def chunks() -> AsyncIterator[bytes]:
            yield out.getvalue()

        await files.tar_in("/workspace", chunks())
        assert (await files.stat("x")).type == "file"
        assert [entry.name for entry in (await files.list("/tmp")).entries] == ["there"]
        assert (await files.read_bytes("/tmp/there", limit=10)).data == b"old"


async def test_an_archive_larger_than_the_disk_is_no_space(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest(limits={"disk": 16 * MIB}))).id

        async def chunks() -> AsyncIterator[bytes]:
            from capsule.service.tarformat import FILE, Header, format_header

            for block in format_header(Header("big", FILE, 200 * MIB)):
                yield block
            for _ in range(200):
                yield bytes(MIB)

        with pytest.raises(NoSpaceError):
            await service.files(id).tar_in("/workspace", chunks())
        listing = await service.files(id).list("/workspace")
        assert [e.name for e in listing.entries if e.name != "lost+found"] == []


async def test_a_terminal_is_shared_left_and_joined_again(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        async with await service.terminal(id, rows=30, cols=100) as first:
            await first.send(b"stty size; echo mark$((40+2))\n")
            assert b"30 100" in await until(first, b"mark42")
            async with await service.terminal(id, rows=40, cols=120) as second:
                assert second.exec_id == first.exec_id
                assert b"mark42" in await until(second, b"mark42"), "the recent screen"
                await second.send(b"stty size; echo both$((1+1))\n")
                assert b"40 120" in await until(second, b"both2")
                await until(first, b"both2")
        async with await service.terminal(id) as third:
            assert third.exec_id == first.exec_id
            await third.send(b"exit 9\n")
            _ = [piece async for piece in third]
            assert third.closing is not None
            assert third.closing.code == "exited"
            assert third.closing.exit is not None
            assert third.closing.exit.exit_code == 9
        async with await service.terminal(id) as fresh:
            assert fresh.exec_id != first.exec_id
        other = await service.terminal(id, name="other")
        assert other.exec_id != fresh.exec_id
        await other.aclose()


async def until(session: object, mark: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(10):
        async for piece in session:  # type: ignore[attr-defined]
            seen += piece
            if mark in seen:
                break
    return seen


async def test_a_terminal_ends_with_its_sandbox_and_says_so(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        async with await service.terminal(id) as viewer:
            await viewer.send(b"echo up$((1+1))\n")
            await until(viewer, b"up2")
            delete = asyncio.create_task(service.delete(id))
            _ = [piece async for piece in viewer]
            await delete
            assert viewer.closing is not None
            assert viewer.closing.code in ("gone", "exited")
            with pytest.raises(GoneError):
                await service.terminal(id)


async def test_a_viewer_that_falls_behind_holds_up_nobody_and_goes_on_at_the_end(
    folder: Path,
) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        async with await service.terminal(id) as slow, await service.terminal(id) as quick:
            await slow.send(b"yes; echo after$((1+1))\n")
            seen = 0
            async with asyncio.timeout(15):
                async for piece in quick:
                    seen += len(piece)
                    if seen > 6 * MIB:
                        break
            await quick.send(b"\x03echo over$((1+1))\n")
            await until(quick, b"over2")
            assert len(await until(slow, b"over2")) < 3 * MIB


async def test_sandboxes_outlive_the_service_with_their_execs(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        id = (await service.create(CreateRequest())).id
        call = ExecCall(("sh", "-c", "echo begun; sleep 0.5; echo done"), idempotency_key="k")
        live = await service.start(id, call)
        await live.aclose()
    async with serving(folder) as service:
        assert service.get(id).state is State.RUNNING
        result = await service.exec(id, call)
        assert result.id == live.exec_id
        assert result.stdout == b"begun\ndone\n"


async def test_a_box_killed_from_outside_fails_within_5_seconds(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        pid = keeper(folder, id)
        os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        await eventually(lambda: service.get(id).state is State.FAILED, what="failed", within=5.5)
        assert time.monotonic() - began < 5.5
        with pytest.raises(GoneError, match="failed: its box is gone"):
            await service.exec(id, ExecCall(("true",)))
        await service.delete(id)
        assert boxes(folder) == []


async def test_an_exec_whose_box_is_killed_is_an_error_at_once(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        call = asyncio.create_task(service.exec(id, ExecCall(("sleep", "60"), timeout=60)))
        await eventually(lambda: _execs_of(service, id), what="it runs")
        os.kill(keeper(folder, id), signal.SIGKILL)
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(5):
                await call


async def _execs_of(service: Service, id: str) -> bool:
    return any(x.running for x in await service.execs(id))


async def test_a_locked_database_is_503_not_a_hang(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule.service.database.PATIENCE", 0.3)
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        other = sqlite3.connect(folder / "d" / "capsule.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError, match="locked"):
                await service.create(CreateRequest())
            with pytest.raises(UnavailableError, match="locked"):
                await service.set_timeout(id, 100)
            assert (await service.exec(id, ExecCall(("true",)))).exit.exit_code == 0
            await service.delete(id)
        assert boxes(folder) == []
        other.execute("ROLLBACK")
        other.close()
        await service.create(CreateRequest())
        await service.reaper.tidy()
        rows = sqlite3.connect(folder / "d" / "capsule.db").execute("SELECT id FROM sandboxes")
        assert len(rows.fetchall()) == len(service.list()) == 1


async def test_a_server_without_file_descriptors_gives_up_no_sandbox(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        entry = service._sandboxes.find(id)
        taken: list[int] = []
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard)
        )
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(CapsuleError):
                await service.exec(id, ExecCall(("true",)))
            entry.checked -= 10
            await service._pulse.round()
            with suppress(CapsuleError):
                await service.reaper.tidy()
            with pytest.raises(CapsuleError):
                await service.create(CreateRequest())
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert service.get(id).state is State.RUNNING
        assert (await service.exec(id, ExecCall(("true",)))).exit.exit_code == 0
        await service.delete((await service.create(CreateRequest())).id)
        await service.reaper.tidy()  # a launch that failed may have left something
        assert boxes(folder) == [id]


async def test_many_at_once(folder: Path) -> None:
    async with serving(folder) as service:

        async def life() -> int:
            id = (await service.create(CreateRequest())).id
            result = await service.exec(id, ExecCall(("true",)))
            await service.delete(id)
            return result.exit.exit_code

        assert await asyncio.gather(*(life() for _ in range(30))) == [0] * 30
        assert boxes(folder) == []
        assert service.stats().sandboxes == {}


async def test_activity_of_files_and_terminals_counts(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest(idle_timeout=1.5))).id
        files = service.files(id)
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            await files.stat("/workspace")
            await asyncio.sleep(0.1)
        assert service.get(id).state is State.RUNNING
        await eventually(lambda: not service.list(), what="idle and gone", within=5)


async def test_errors_of_files_are_those_of_the_file_system(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        files = service.files(id)
        cases: list[tuple[object, type[CapsuleError]]] = [
            (files.read_bytes("nope", limit=10), NotFoundError),
            (files.read_bytes("/workspace/../etc/passwd", limit=10), InvalidError),
            (files.write("a\0b", b""), InvalidError),
            (files.list(""), InvalidError),
            (files.mkdir("/workspace/" + "x" * 5000), CapsuleError),
            (files.chmod("nope", 0o10000), InvalidError),
        ]
        for call, error in cases:
            with pytest.raises(error):
                await call  # type: ignore[misc]
