"""Terminals over a WebSocket, for threads and asyncio."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from capsule_sdk import (
    AsyncCapsule,
    Capsule,
    GoneError,
    InvalidError,
    Terminal,
    UnavailableError,
)
from tests.support import free_port


def read_until(terminal: Terminal, text: str, within: float = 10.0) -> str:
    said = ""
    deadline = time.monotonic() + within
    while text not in said:
        said += terminal.recv(timeout=deadline - time.monotonic()).decode("utf-8", "replace")
    return said


def test_a_shell_answers_and_has_an_exit_code(capsule: Capsule) -> None:
    with capsule.connect_terminal() as terminal:
        terminal.send("echo $((6*7))\n")
        read_until(terminal, "42")
        terminal.send("exit 5\n")
        assert "exit" in b"".join(terminal).decode()
        assert terminal.exit is not None
        assert (terminal.exit.exit_code, terminal.code) == (5, 1000)
        assert terminal.reason
        with pytest.raises(GoneError):
            terminal.send("echo too late\n")


def test_the_size_can_change(capsule: Capsule) -> None:
    with capsule.connect_terminal(rows=33, cols=99) as terminal:
        terminal.send("stty size\n")
        read_until(terminal, "33 99")
        terminal.resize(40, 120)
        terminal.send("stty size\n")
        read_until(terminal, "40 120")


def test_nothing_in_time_is_a_timeout(capsule: Capsule) -> None:
    with capsule.connect_terminal() as terminal:
        terminal.send("echo ready\n")
        read_until(terminal, "ready")
        with pytest.raises(TimeoutError):
            while True:
                terminal.recv(timeout=0.2)


def test_a_server_that_is_not_there() -> None:
    from capsule_sdk._target import Target

    target = Target.at(f"http://127.0.0.1:{free_port()}", {"User-Agent": "x"}, 0)
    with pytest.raises(UnavailableError, match="capsule serve"):
        Terminal.open(target, "x", name="main", rows=24, cols=80)


async def test_the_async_one_does_the_same(async_capsule: AsyncCapsule) -> None:
    async with asyncio.timeout(10), await async_capsule.connect_terminal(rows=30) as terminal:
        await terminal.resize(31, 91)
        await terminal.send("stty size; exit 3\n")
        said = b"".join([data async for data in terminal])
        assert b"31 91" in said
        assert terminal.exit is not None
        assert terminal.exit.exit_code == 3


@pytest.mark.parametrize("timeout", [float("nan"), "5", True])
def test_a_timeout_that_is_none_is_refused(capsule: Capsule, timeout: Any) -> None:
    with capsule.connect_terminal() as terminal, pytest.raises(InvalidError, match=r"^timeout="):
        terminal.recv(timeout=timeout)
