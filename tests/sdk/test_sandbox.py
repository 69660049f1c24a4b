"""A sandbox through the client: programs, their ends, lifetimes, state."""

from __future__ import annotations

import contextlib
import datetime
import io
from pathlib import Path
from typing import Any

import pytest

from capsule_sdk import (
    Capsule,
    CapsuleClient,
    ConflictError,
    ExecFailedError,
    Exit,
    GoneError,
    InvalidError,
    NotFoundError,
    Output,
    WrongStateError,
)


def test_run_gives_what_the_program_did(capsule: Capsule) -> None:
    result = capsule.run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert (result.reason, result.signal, result.timed_out, result.ok) == (
        "exited",
        0,
        False,
        False,
    )
    assert result.stdout_bytes == 4
    assert result.duration_ms > 0
    assert capsule.exec(["echo", "$HOME", "*"]).stdout == "$HOME *\n"
    assert capsule.exec("echo $HOME | tr a-z A-Z").stdout == "/WORKSPACE\n"
    with pytest.raises(NotFoundError, match="nosuchprogram"):
        capsule.exec(["nosuchprogram"])


def test_a_timeout_a_signal_and_a_cut_are_data(capsule: Capsule) -> None:
    late = capsule.run("import time; print('begun', flush=True); time.sleep(60)", timeout=0.5)
    assert (late.timed_out, late.reason, late.stdout) == (True, "timed_out", "begun\n")
    ended = capsule.exec("kill -TERM $$")
    assert (ended.reason, ended.signal, ended.exit_code) == ("signaled", 15, 143)
    cut = capsule.run("print('x' * 5000)", output_limit=100)
    assert (cut.stdout, cut.stdout_truncated, cut.stdout_bytes) == ("x" * 100, True, 5001)
    started = capsule.start(["sleep", "600"])
    assert started.kill()
    assert started.wait().reason == "cancelled"
    assert not capsule.kill(started.exec_id)


def test_check_raises_with_the_last_line_of_stderr(capsule: Capsule) -> None:
    assert capsule.run("pass").check().ok
    with pytest.raises(ExecFailedError, match="ValueError: no such luck") as caught:
        capsule.run("raise ValueError('no such luck')").check()
    assert caught.value.result.exit_code == 1


def test_options_reach_the_program(capsule: Capsule) -> None:
    code = "import os, sys; print(os.environ['NAME'], os.getcwd(), sys.stdin.read())"
    result = capsule.run(code, env={"NAME": "välue"}, cwd="/tmp", stdin="typed")
    assert result.stdout == "välue /tmp typed\n"


def test_a_batch_stops_at_the_first_failure(capsule: Capsule) -> None:
    commands: list[Any] = [["echo", "1"], "exit 4", {"cmd": "cat", "stdin": b"3"}]
    assert [r.exit_code for r in capsule.batch(commands)] == [0, 4]
    assert [r.stdout for r in capsule.batch(commands, stop_on_error=False)] == ["1\n", "", "3"]


def test_a_stream_comes_while_the_program_runs(capsule: Capsule) -> None:
    stream = capsule.stream("echo one; read line; echo got $line >&2", stdin_open=True)
    events = iter(stream)
    assert next(events) == Output("stdout", 0, b"one\n")
    stream.send_input("two\n")
    assert next(events) == Output("stderr", 0, b"got two\n")
    last = next(events)
    assert isinstance(last, Exit)
    assert stream.exit == last
    with contextlib.closing(iter(capsule.stream(["yes"], timeout=20))) as endless:
        assert isinstance(next(endless), Output)


def test_a_program_goes_on_without_its_reader(capsule: Capsule) -> None:
    started = capsule.start("echo begun; read line; echo $line", stdin_open=True)
    assert next(iter(started)) == Output("stdout", 0, b"begun\n")
    again = capsule.attach(started.exec_id, stdout=6)
    capsule.send_input(started.exec_id, b"later\n", eof=True)
    assert again.wait().stdout == "later\n"
    (info,) = [each for each in capsule.execs() if each.id == started.exec_id]
    assert not info.running
    assert info.exit is not None
    assert info.exit.exit_code == 0


def test_start_takes_code_too(capsule: Capsule) -> None:
    assert capsule.start(code="print(6 * 7)").wait().stdout == "42\n"
    with pytest.raises(InvalidError, match="either"):
        capsule.start()
    with pytest.raises(InvalidError, match="either"):
        capsule.start("true", code="pass")


def test_limits_environment_and_metadata_of_create(client: CapsuleClient) -> None:
    options = {"env": {"A": "1"}, "metadata": {"owner": "ann"}}
    with client.create("python", memory=128 << 20, cpus=0.25, ttl=90, **options) as capsule:  # type: ignore[arg-type]
        assert capsule.info.limits is not None
        assert (capsule.info.limits.memory, capsule.info.limits.cpus) == (128 << 20, 0.25)
        assert capsule.exec("echo $A").stdout == "1\n"
        assert [c.id for c in client.list(metadata={"owner": "ann"})] == [capsule.id]
        assert client.list(metadata={"owner": "bob"}) == []


def test_the_end_can_be_moved(capsule: Capsule) -> None:
    now = datetime.datetime.now(datetime.UTC)
    soon = capsule.set_timeout(120).expires_at
    later = capsule.keep_alive().expires_at
    assert soon is not None
    assert later is not None
    assert datetime.timedelta(seconds=100) < soon - now < datetime.timedelta(seconds=130)
    assert later > soon
    assert capsule.refresh().expires_at == later


def test_a_reset_keeps_only_the_id(capsule: Capsule) -> None:
    id = capsule.id
    capsule.write_file("a", "x")
    info = capsule.reset()
    assert (info.id, info.started) == (id, "cold")
    assert capsule.info == info
    assert not capsule.exists("a")
    assert capsule.exec("echo on").stdout == "on\n"


def test_a_sandbox_is_connected_to_by_id_and_deleted_at_the_end(client: CapsuleClient) -> None:
    with pytest.raises(ZeroDivisionError), client.create("python") as capsule:
        capsule.write_file("note", "mine")
        again = client.connect(capsule.id)
        assert again.read_file_text("/workspace/note") == "mine"
        assert again.info.template == "python"
        capsule.exec("export COLOUR=blue; cd /tmp", session="work")
        assert capsule.exec("echo $COLOUR $PWD", session="work").stdout == "blue /tmp\n"
        raise ZeroDivisionError
    capsule.delete()
    with pytest.raises((GoneError, NotFoundError)):
        again.run("print(1)")


def test_pause_and_resume(client: CapsuleClient, capsule: Capsule) -> None:
    assert capsule.pause().state == "paused"
    with pytest.raises(WrongStateError, match="paused"):
        capsule.exec("true")
    assert capsule.resume().state == "running"
    assert capsule.exec("echo on").stdout == "on\n"
    with client.create("bash", auto_resume=True, on_timeout="pause") as other:
        assert (other.info.auto_resume, other.info.on_timeout) == (True, "pause")
        other.pause()
        assert other.exec("echo up").stdout == "up\n"


def test_snapshot_restore_and_fork(client: CapsuleClient, capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("f", "base")
    made = capsule.snapshot("sdk-base", metadata={"a": "b"})
    try:
        assert client.snapshots.get("sdk-base") == made and made.size == 4
        assert made in client.snapshots.list()
        with client.create(snapshot="sdk-base") as other:
            assert other.read_file_text("f") == "base" and other.info.snapshot == "sdk-base"
        forks = capsule.fork(2)
        assert [fork.read_file_text("f") for fork in forks] == ["base", "base"]
        for fork in forks:
            fork.delete()
        target = tmp_path / "base.tar"
        assert client.snapshots.export("sdk-base", target) == target.stat().st_size
        copy = io.BytesIO()
        client.snapshots.export("sdk-base", copy)
        assert copy.getvalue() == target.read_bytes()
        with pytest.raises(ConflictError):
            client.snapshots.import_("sdk-base", target)
        moved = client.snapshots.import_("sdk-moved", target)
        assert (moved.size, moved.metadata, moved.template) == (4, {"a": "b"}, made.template)
        with client.create(snapshot="sdk-moved") as other:
            assert other.read_file_text("f") == "base"
        client.snapshots.delete("sdk-moved")
    finally:
        client.snapshots.delete("sdk-base")
    with pytest.raises(NotFoundError):
        client.snapshots.export("sdk-base", tmp_path / "none.tar")
    assert not (tmp_path / "none.tar").exists()
    with pytest.raises(NotFoundError):
        client.snapshots.get("sdk-base")


@pytest.mark.needs("root", "e2fsprogs")
def test_steps_undo_and_volumes(client: CapsuleClient) -> None:
    volume = client.volumes.create("sdk-data", size=20 << 20)
    assert volume.size == 20 << 20 and volume.used is not None and volume.used < 20 << 20
    try:
        mount = {"name": "sdk-data", "path": "/workspace/data"}
        with client.create("bash", checkpoint="each", volumes=[mount]) as capsule:
            capsule.exec("echo 1 > f; echo kept > data/f").check()
            capsule.exec("echo 2 > f; touch g").check()
            assert [step.step for step in capsule.steps()] == [0, 1, 2]
            changed = {(each.path, each.change) for each in capsule.diff(1)}
            assert changed == {("/workspace/f", "modified"), ("/workspace/g", "added")}
            (fork,) = capsule.fork(at=1)
            assert fork.exec("cat f data/f").stdout == "1\nkept\n"
            fork.delete()
            capsule.undo(1)
            assert capsule.exec("cat f; ls").stdout == "1\ndata\nf\n"
            with pytest.raises(ConflictError, match="in use"):
                client.volumes.delete("sdk-data")
        assert "sdk-data" in [volume.name for volume in client.volumes.list()]
    finally:
        client.volumes.delete("sdk-data")
