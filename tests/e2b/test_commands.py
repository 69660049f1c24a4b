"""`sandbox.commands` of E2B's SDK: what its documentation shows, and what goes wrong."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from e2b import (
    E2B,
    CommandExitException,
    InvalidArgumentException,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from tests.e2b.conftest import parameters
from tests.support import wait_for
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


def test_a_command_has_output_and_an_exit_code(shared: Sandbox) -> None:
    done = shared.commands.run("echo hello; echo problem >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("hello\n", "problem\n", 0)
    assert done.error is None


def test_a_failure_raises_with_output_and_exit_code(shared: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        shared.commands.run("echo so far; echo why >&2; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "so far\n")
    assert (failed.value.stderr, failed.value.error) == ("why\n", "exit status 3")


def test_output_comes_while_it_runs(shared: Sandbox) -> None:
    seen: list[str] = []
    shared.commands.run(
        "echo one; sleep 0.1; echo two; echo three >&2",
        on_stdout=seen.append,
        on_stderr=lambda text: seen.append("! " + text),
    )
    assert seen[:2] == ["one\n", "two\n"] and "! three\n" in seen


def test_variables_and_folder(e2b: E2B) -> None:
    with e2b.Sandbox.create(envs={"A": "1", "B": "2"}) as sandbox:
        done = sandbox.commands.run("echo $A $B; pwd", envs={"B": "3 4"}, cwd="/tmp")
        assert done.stdout == "1 3 4\n/tmp\n"
        words = sandbox.commands.run("echo $E2B_SANDBOX $USER $LOGNAME $HOME; pwd").stdout.split()
        assert words[:3] == ["true", "user", "user"] and words[3] == words[4]
        ids = sandbox.commands.run("echo $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout.split()
        assert ids == [sandbox.sandbox_id, sandbox.get_info().template_id]
        with pytest.raises(InvalidArgumentException, match="cwd '/nowhere' does not exist"):
            sandbox.commands.run("true", cwd="/nowhere")


def test_python_has_both_its_names(server: RealServer) -> None:
    code = "import sys; print(sys.version_info[0])"
    with E2B(**cast(Any, parameters(server))).Sandbox.create(timeout=60) as sandbox:
        for name in ("python", "python3"):
            assert sandbox.commands.run(f'{name} -c "{code}"').stdout == "3\n"


def test_a_timeout_kills(shared: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        shared.commands.run("echo $$ > /tmp/slow; sleep 60", timeout=0.5)
    pid = int(shared.files.read("/tmp/slow"))
    wait_for(lambda: pid not in [p.pid for p in shared.commands.list()], what="its end")
    assert shared.commands.run(f"kill -0 {pid} || echo gone", timeout=0).stdout == "gone\n"


def test_one_in_the_background_is_listed_and_killed(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 60", background=True, envs={"X": "y"}, cwd="/tmp")
    (found,) = [each for each in shared.commands.list() if each.pid == handle.pid]
    assert (found.cmd, found.args) == ("/bin/bash", ["-l", "-c", "sleep 60"])
    assert (found.envs, found.cwd, found.tag) == ({"X": "y"}, "/tmp", None)
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert shared.commands.kill(handle.pid) is False


def test_a_command_goes_on_after_a_disconnect(shared: Sandbox) -> None:
    handle = shared.commands.run(
        "echo before; until [ -e /tmp/go ]; do sleep 0.05; done; echo after; exit 4",
        background=True,
        timeout=0,
    )
    assert next(iter(handle)) == ("before\n", None, None)
    handle.disconnect()
    again = shared.commands.connect(handle.pid)
    shared.files.write("/tmp/go", "")
    with pytest.raises(CommandExitException) as ended:
        again.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (4, "after\n")
    with pytest.raises(CommandExitException) as replayed:  # for some seconds after its end
        shared.commands.connect(handle.pid).wait()
    assert replayed.value.exit_code == 4


def test_input_is_sent_in_pieces_and_closed(shared: Sandbox) -> None:
    handle = shared.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("one\n")
    handle.send_stdin(b"two\n")
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\n"
    without = shared.commands.run("sleep 60", background=True)
    with pytest.raises(SandboxException, match="error writing to stdin"):
        without.send_stdin("x")
    without.kill()


def test_output_of_any_length_comes_whole(shared: Sandbox) -> None:
    """Far more than the server keeps of an exec."""
    seen = 0

    def count(text: str) -> None:
        nonlocal seen
        seen += len(text)

    done = shared.commands.run(
        "for i in $(seq 30); do head -c 1000000 /dev/zero | tr '\\0' x; done",
        on_stdout=count,
        retain_output=False,
    )
    assert done.stdout is None and seen == 30_000_000


def test_the_end_of_the_sandbox_ends_its_commands(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create()
    handle = sandbox.commands.run("sleep 60", background=True)
    threading.Timer(0.3, sandbox.kill).start()
    with pytest.raises(SandboxException, match="killed or reached its end of life"):
        handle.wait()
    with pytest.raises(SandboxException):
        sandbox.commands.run("true")


def test_root_is_root_inside(shared: Sandbox) -> None:
    done = shared.commands.run("id -u; whoami; pwd; echo $HOME", user="root")
    assert done.stdout.split() == ["0", "root", "/root", "/root"]
    assert shared.commands.run("id -u; echo $USER", user="user").stdout == "1000\nuser\n"
    assert shared.commands.run("id -u; sudo id -u; sudo -n whoami").stdout == "1000\n0\nroot\n"
    with pytest.raises(CommandExitException) as failed:
        shared.commands.run("sudo sh -c 'echo why >&2; exit 3'")
    assert (failed.value.exit_code, failed.value.stderr) == (3, "why\n")
