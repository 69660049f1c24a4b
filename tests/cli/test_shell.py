"""`capsule shell` as somebody at a terminal sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from capsule_sdk import Capsule, CapsuleClient
from tests.cli.conftest import Cli
from tests.cli.terminal import Screen, at_terminal
from tests.support.servers import CAPSULE, forked, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@contextlib.contextmanager
def shell(remote: Cli, *args: str, rows: int = 24, cols: int = 80) -> Iterator[Screen]:
    command = [*CAPSULE, "shell", *args]
    with at_terminal(command, remote.env, remote.cwd, rows=rows, cols=cols) as screen:
        screen.wait_for("$ ")
        yield screen


def test_a_sandbox_of_its_own_is_deleted_at_the_end(remote: Cli) -> None:
    with at_terminal([*CAPSULE, "shell"], remote.env, remote.cwd) as screen:
        own = screen.wait_for(" (python), deleted when you leave").split()[-6]
        screen.wait_for("$ ")
        assert own in remote("ls", "-q").out.split()
        screen.type("echo $((6*7)); exit 3\n")
        screen.wait_for("42")
        assert screen.finish() == 3
        assert "ended with code 3" in screen.seen
        assert screen.cooked()
    assert own not in remote("ls", "-q").out.split()


def test_a_shell_can_be_left_and_connected_to_again(remote: Cli, capsule: Capsule) -> None:
    with shell(remote, capsule.id) as screen:
        screen.type("COLOUR=blue; echo $((1+1))set\n")
        screen.wait_for("2set")
        screen.type("\r~.")
        assert screen.finish() == 0
        assert "the shell goes on" in screen.seen
        assert screen.cooked()
    with at_terminal([*CAPSULE, "shell", capsule.id], remote.env, remote.cwd) as screen:
        screen.wait_for("2set")  # the recent screen comes back
        screen.type("echo is-$COLOUR; exit\n")
        screen.wait_for("is-blue")
        assert screen.finish() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(
    remote: Cli, capsule: Capsule, number: signal.Signals
) -> None:
    with shell(remote, capsule.id, "--name", f"s{int(number)}") as screen:
        screen.type("printf '\\033[?1049h\\033[?25l'; echo $((1+1))alternate\n")
        screen.wait_for("2alternate")
        assert not screen.cooked()
        os.kill(screen.process.pid, number)
        assert screen.finish() == 128 + number
        assert screen.cooked()
        assert "\x1b[?1049l" in screen.seen
        assert "\x1b[?25h" in screen.seen


def test_the_end_of_the_sandbox_is_an_error(remote: Cli, capsule: Capsule) -> None:
    with shell(remote, capsule.id) as screen:
        screen.process.send_signal(signal.SIGSTOP)
        capsule.delete()
        screen.type("echo too late\n")
        screen.process.send_signal(signal.SIGCONT)
        assert screen.finish() == 1
        assert "error:" in screen.seen
        assert "never retrieved" not in screen.seen


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_comes_back_after_the_server_restarted(remote: Cli, number: signal.Signals) -> None:
    with real_server(DRAIN="keep") as server, CapsuleClient(server.url) as client:
        own = Cli({**remote.env, "CAPSULE_URL": server.url}, remote.cwd)
        capsule = client.create("bash")
        with shell(own, capsule.id) as screen:
            screen.type("COLOUR=blue; echo $((1+1))set\n")
            screen.wait_for("2set")
            server.process.send_signal(number)
            server.process.wait(30)
            again = forked(server.env, server.base)
            try:
                screen.wait_for("coming back")
                screen.wait_for("2set", within=20)
                screen.type("echo is-$COLOUR; exit\n")
                screen.wait_for("is-blue")
                assert screen.finish() == 0
                capsule.delete()
            finally:
                again.send_signal(signal.SIGTERM)
                again.wait(30)


def test_without_a_terminal_it_says_what_to_use(remote: Cli, capsule: Capsule) -> None:
    done = remote("shell", capsule.id)
    assert done.code == 1
    assert done.err.startswith("error: capsule shell needs a terminal\nhint: ")
