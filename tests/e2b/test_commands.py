"""`sandbox.commands` of E2B's SDK: what its documentation shows, and what goes wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from e2b import (
    E2B,
    AsyncSandbox,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
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


def test_what_fails_raises_with_all_that_is_known(shared: Sandbox) -> None:
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


def test_text_is_never_cut_inside_a_character(shared: Sandbox) -> None:
    text = "é€😀" * 20_000
    shared.files.write("/tmp/text", text)
    assert shared.commands.run("cat /tmp/text").stdout == text


def test_variables_and_folder_are_those_asked_for(shared: Sandbox) -> None:
    done = shared.commands.run("echo $FOO; pwd", envs={"FOO": "bar baz"}, cwd="/tmp")
    assert done.stdout == "bar baz\n/tmp\n"


def test_variables_of_the_sandbox_are_everywhere_and_those_of_the_command_win(e2b: E2B) -> None:
    with e2b.Sandbox.create(envs={"A": "1", "B": "2"}) as sandbox:
        assert sandbox.commands.run("echo $A $B", envs={"B": "3"}).stdout == "1 3\n"


def test_a_program_knows_where_it_is(shared: Sandbox) -> None:
    words = shared.commands.run("echo $E2B_SANDBOX $USER $LOGNAME $HOME; pwd").stdout.split()
    assert words[:3] == ["true", "user", "user"] and words[3] == words[4]
    ids = shared.commands.run("echo $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout.split()
    assert ids == [shared.sandbox_id, shared.get_info().template_id]


def test_python_has_both_its_names(server: RealServer) -> None:
    code = "import sys; print(sys.version_info[0])"
    with E2B(**cast(Any, parameters(server))).Sandbox.create(timeout=60) as sandbox:
        for name in ("python", "python3"):
            assert sandbox.commands.run(f'{name} -c "{code}"').stdout == "3\n"


def test_a_folder_that_is_not_there_is_an_error(shared: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="cwd '/nowhere' does not exist"):
        shared.commands.run("true", cwd="/nowhere")


def test_one_that_takes_too_long_is_killed(shared: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        shared.commands.run("echo $$ > /tmp/slow; sleep 60", timeout=0.5)
    pid = int(shared.files.read("/tmp/slow"))
    wait_for(lambda: pid not in [p.pid for p in shared.commands.list()], what="its end")
    assert shared.commands.run(f"kill -0 {pid} || echo gone").stdout == "gone\n"


def test_a_timeout_of_zero_is_none(shared: Sandbox) -> None:
    assert shared.commands.run("echo fine", timeout=0).stdout == "fine\n"


def test_one_in_the_background_can_be_listed_and_killed(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 60", background=True, envs={"X": "y"}, cwd="/tmp")
    (found,) = [each for each in shared.commands.list() if each.pid == handle.pid]
    assert (found.cmd, found.args) == ("/bin/bash", ["-l", "-c", "sleep 60"])
    assert (found.envs, found.cwd, found.tag) == ({"X": "y"}, "/tmp", None)
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert shared.commands.kill(handle.pid) is False


def test_a_kill_ends_it_although_a_child_holds_its_output(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 60 & wait", background=True)
    handle.kill()
    with pytest.raises(CommandExitException):
        handle.wait()


def test_a_child_left_behind_does_not_hold_up_the_end(shared: Sandbox) -> None:
    assert shared.commands.run("sleep 3 & echo started", timeout=15).stdout == "started\n"


def test_what_is_disconnected_from_goes_on(shared: Sandbox) -> None:
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


def test_one_that_has_just_ended_still_tells_how(shared: Sandbox) -> None:
    handle = shared.commands.run("exit 5", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as replayed:
        shared.commands.connect(handle.pid).wait()
    assert (replayed.value.exit_code, replayed.value.stdout) == (5, "")


def test_nobody_is_found_under_a_wrong_number(shared: Sandbox) -> None:
    assert shared.commands.kill(999_999) is False
    with pytest.raises(NotFoundException):
        shared.commands.connect(999_999)
    with pytest.raises(NotFoundException):
        shared.commands.send_stdin(999_999, "x")


def test_several_can_follow_one(shared: Sandbox) -> None:
    handle = shared.commands.run("read x; echo got $x", background=True, stdin=True)
    second = shared.commands.connect(handle.pid)
    shared.commands.send_stdin(handle.pid, "it\n")
    assert handle.wait().stdout == second.wait().stdout == "got it\n"


def test_input_can_be_sent_in_pieces_and_closed(shared: Sandbox) -> None:
    handle = shared.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("one\n")
    handle.send_stdin(b"two\n")
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\n"


def test_input_can_be_streamed(shared: Sandbox) -> None:
    handle = shared.commands.run("wc -c", background=True, stdin=True)
    shared.commands.stream_input(handle.pid, (b"x" * 100_000 for _ in range(30)))
    handle.close_stdin()
    assert handle.wait().stdout.strip() == "3000000"


def test_a_slow_reader_of_input_is_waited_for(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 0.5; wc -c", background=True, stdin=True)
    shared.commands.stream_input(handle.pid, (b"x" * 1000_000 for _ in range(8)))
    handle.close_stdin()
    assert handle.wait().stdout.strip() == "8000000"


def test_one_without_input_says_so(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 60", background=True)
    with pytest.raises(SandboxException, match="error writing to stdin"):
        handle.send_stdin("x")
    handle.kill()


def test_output_without_end_goes_through(shared: Sandbox) -> None:
    """Far more than is kept of any exec, in order."""
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


def test_many_run_at_once(shared: Sandbox) -> None:
    with ThreadPoolExecutor(30) as pool:
        outputs = list(pool.map(lambda n: shared.commands.run(f"echo {n}").stdout, range(30)))
    assert outputs == [f"{n}\n" for n in range(30)]


def test_the_end_of_the_sandbox_cuts_what_runs(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create()
    handle = sandbox.commands.run("sleep 60", background=True)
    threading.Timer(0.3, sandbox.kill).start()
    with pytest.raises(SandboxException, match="killed or reached its end of life"):
        handle.wait()
    with pytest.raises(SandboxException):
        sandbox.commands.run("true")


async def test_the_async_sdk_does_the_same(async_sandbox: AsyncSandbox) -> None:
    commands = async_sandbox.commands
    assert (await commands.run("echo hi")).stdout == "hi\n"
    seen: list[str] = []
    handle = await commands.run("cat", background=True, stdin=True, on_stdout=seen.append)
    assert handle.pid in [each.pid for each in await commands.list()]
    await handle.send_stdin("a\n")
    await commands.send_stdin(handle.pid, "b\n")
    await commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "a\nb\n" == "".join(seen)
    sleeper = await commands.run("sleep 60", background=True)
    again = await commands.connect(sleeper.pid)
    assert await commands.kill(sleeper.pid)
    with pytest.raises(CommandExitException):
        await again.wait()
    with pytest.raises(TimeoutException):
        await commands.run("sleep 60", timeout=0.3)


def test_root_is_root_inside(shared: Sandbox) -> None:
    done = shared.commands.run("id -u; whoami; pwd; echo $HOME", user="root")
    assert done.stdout.split() == ["0", "root", "/root", "/root"]
    assert shared.commands.run("id -u; echo $USER", user="user").stdout == "1000\nuser\n"
