"""Closing, interrupting, cancelling: nothing half done stays behind, and errors are ours."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule_sdk import (
    AsyncCapsule,
    Capsule,
    CapsuleClient,
    Output,
    WrongStateError,
)
from tests.sdk.crooked import crooked_server, result
from tests.sdk.test_rpc import SANDBOX

MIB = 1024 * 1024


def test_a_closed_client_says_so() -> None:
    with crooked_server(result(SANDBOX)) as server:
        with CapsuleClient(server.url) as client:
            capsule = client.get("abc12345")
        client.close()
        calls: list[Callable[[], Any]] = [
            client.list,
            lambda: capsule.run("pass"),
            lambda: list(capsule.stream(["true"])),
            lambda: list(capsule.read_stream("f")),
        ]
        for call in calls:
            with pytest.raises(WrongStateError, match="closed"):
                call()
        assert len(server.requests) == 1


def test_closing_while_a_call_is_under_way_leaves_no_connection() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slowly(connection: Any, request: Any) -> bool:
        arrived.set()
        go_on.wait(10)
        return result(SANDBOX)(connection, request)

    with crooked_server(slowly) as server:
        client = CapsuleClient(server.url)
        lines = client._driver._lines
        call = threading.Thread(target=client.get, args=("x",))
        call.start()
        assert arrived.wait(10)
        client.close()
        go_on.set()
        call.join(10)
        assert lines is not None
        assert lines._idle == []


async def test_a_cancelled_download_leaves_nothing(
    async_capsule: AsyncCapsule, tmp_path: Path
) -> None:
    await async_capsule.write_file("big", bytes(8 * MIB))
    begun = asyncio.Event()
    download = asyncio.ensure_future(
        async_capsule.download("big", tmp_path / "copy", progress=lambda _: begun.set())
    )
    await begun.wait()
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    assert list(tmp_path.iterdir()) == []
    assert (await async_capsule.exec(["echo", "on"])).stdout == "on\n"


def test_iterators_can_be_closed_by_hand(capsule: Capsule) -> None:
    with contextlib.closing(iter(capsule.stream(["yes"], timeout=20))) as events:
        assert isinstance(next(events), Output)
    with contextlib.closing(capsule.read_stream("/etc/hostname")) as pieces:
        assert next(pieces)
