"""What tests of several folders share. Import from here; fixtures are in tests/conftest.py."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")

T = TypeVar("T")


def component_missing(reason: str) -> NoReturn:
    """This machine lacks something the test needs: skipped here, a failure in CI."""
    if IN_CI:
        pytest.fail(f"missing component: {reason}", pytrace=False)
    pytest.skip(reason)


def clean_env(**more: str) -> dict[str, str]:
    """Our environment without settings of Capsule that somebody may have exported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CAPSULE_")}
    return {**kept, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def alive(pid: int | None) -> bool:
    return os.path.lexists(f"/proc/{pid}")


def listens(port: int) -> bool:
    """Whether somebody does, at this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], T], *, what: str, within: float = 10.0) -> T:
    """Poll until `condition` returns something true, and return that."""
    deadline = time.monotonic() + within
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"after {within} s still not: {what}")
        time.sleep(0.01)


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]], *, what: str, within: float = 10.0
) -> T: ...


@overload
async def eventually(condition: Callable[[], T], *, what: str, within: float = 10.0) -> T: ...


async def eventually(condition: Callable[[], Any], *, what: str, within: float = 10.0) -> Any:
    """The same for coroutines; `condition` may be plain or async."""
    deadline = time.monotonic() + within
    while True:
        found = condition()
        value = await found if isinstance(found, Awaitable) else found
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"after {within} s still not: {what}")
        await asyncio.sleep(0.01)
