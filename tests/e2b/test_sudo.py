"""`sudo` without a password, through E2B's SDK: as its templates have it."""

from __future__ import annotations

import pytest
from e2b import CommandExitException, PtySize, Sandbox, TimeoutException

from tests.e2b.test_pty import until
from tests.support import wait_for

pytestmark = pytest.mark.real


def test_a_command_is_root_without_a_password(shared: Sandbox) -> None:
    assert shared.commands.run("id -u").stdout == "1000\n"
    assert shared.commands.run("sudo id -u").stdout == "0\n"
    assert shared.commands.run("sudo -n whoami").stdout == "root\n"
    assert shared.commands.run("sudo -u root -H sh -c 'echo $HOME $USER'").stdout == "/root root\n"


def test_it_is_a_part_of_a_pipeline(shared: Sandbox) -> None:
    shared.commands.run("echo x | sudo tee /root/of-sudo | cat")
    assert shared.commands.run("sudo cat /root/of-sudo; sudo rm /root/of-sudo").stdout == "x\n"


def test_the_exit_code_is_the_commands(shared: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        shared.commands.run("sudo sh -c 'echo why >&2; exit 3'")
    assert (failed.value.exit_code, failed.value.stderr) == (3, "why\n")
    with pytest.raises(CommandExitException) as unknown:
        shared.commands.run("sudo no-such-program")
    assert unknown.value.exit_code == 1
    assert unknown.value.stderr == "sudo: no-such-program: command not found\n"


def test_a_shell_on_a_terminal(shared: Sandbox) -> None:
    handle = shared.pty.create(PtySize(rows=30, cols=100), timeout=30)
    shared.pty.send_stdin(handle.pid, b"sudo sh\n")
    shared.pty.send_stdin(handle.pid, b"echo uid $(id -u); tty; stty size; echo in$((40 + 2))\n")
    shown = until(handle, "\nin42")
    assert "uid 0\n/dev/pts/" in shown and "\n30 100\n" in shown
    shared.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    wide = b'until [ "$(stty size)" = "40 120" ]; do sleep .02; done; '
    shared.pty.send_stdin(handle.pid, wide + b"sh -c 'echo up$((1 + 1)); exec sleep 77'\n")
    until(handle, "up2")
    shared.pty.send_stdin(handle.pid, b"\x03")
    shared.pty.send_stdin(handle.pid, b"echo ended by $?\n")
    until(handle, "ended by 130")
    shared.pty.send_stdin(handle.pid, b"exit 7\n")
    until(handle, "$ ")  # what is typed before is the session's
    shared.pty.send_stdin(handle.pid, b"echo back: $? $(id -u); exit 5\n")
    assert "back: 7 1000" in until(handle, "back: 7 1000")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.exit_code == 5


def test_a_command_is_stopped_and_goes_on(shared: Sandbox) -> None:
    handle = shared.pty.create(PtySize(rows=30, cols=100), timeout=10)
    shared.pty.send_stdin(handle.pid, b"sudo sh -c 'echo up$((1 + 1)); exec cat'\n")
    until(handle, "up2")
    shared.pty.send_stdin(handle.pid, b"\x1a")
    until(handle, "Stopped")
    shared.pty.send_stdin(handle.pid, b"echo meanwhile $((40 + 2)); fg\n")
    until(handle, "meanwhile 42")
    shared.pty.send_stdin(handle.pid, b"again\n")
    until(handle, "again\nagain")
    shared.pty.send_stdin(handle.pid, b"\x04")
    until(handle, "$ ")
    shared.pty.send_stdin(handle.pid, b"stty -a | grep -o ' icanon' | tr a-z A-Z; exit\n")
    until(handle, " ICANON")
    handle.wait()


def test_a_command_of_the_background_comes_to_the_foreground(shared: Sandbox) -> None:
    handle = shared.pty.create(PtySize(rows=30, cols=100), timeout=10)
    shared.pty.send_stdin(handle.pid, b"sudo sh -c 'echo up$((1 + 1)); exec cat' &\n")
    until(handle, "up2")
    shared.pty.send_stdin(handle.pid, b"fg\n")
    until(handle, "exec cat'\n")
    shared.pty.send_stdin(handle.pid, b"typed\n")
    until(handle, "typed\ntyped")
    shared.pty.send_stdin(handle.pid, b"\x04")
    until(handle, "$ ")
    shared.pty.send_stdin(handle.pid, b"exit\n")
    handle.wait()


def test_a_timeout_ends_it(shared: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        shared.commands.run("sudo sleep 1234", timeout=1)
    wait_for(lambda: "sleep 1234" not in running(shared), what="the program's end")


def test_a_kill_ends_it(shared: Sandbox) -> None:
    before = {each.pid for each in shared.commands.list()}
    handle = shared.commands.run("sudo sleep 4321", background=True)
    wait_for(lambda: "sleep 4321" in running(shared), what="its start")
    assert {each.pid for each in shared.commands.list()} == before | {handle.pid}
    handle.kill()
    wait_for(lambda: "sleep 4321" not in running(shared), what="its end")


def running(sandbox: Sandbox) -> str:
    """Who is there, as root sees it."""
    script = "for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; echo; done 2>/dev/null"
    found = sandbox.commands.run(script, user="root").stdout
    return "\n".join(line for line in found.splitlines() if not line.startswith(("sh ", "/bin/")))
