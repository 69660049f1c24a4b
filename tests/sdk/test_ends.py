"""Closing, interrupting, cancelling: nothing half done stays behind, and errors are ours."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule_sdk import (
    AsyncCapsule,
    AsyncCapsuleClient,
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


async def test_a_closed_async_client_says_so() -> None:
    with crooked_server(result(SANDBOX)) as server:
        async with AsyncCapsuleClient(server.url) as client:
            capsule = await client.get("abc12345")
        await client.aclose()
        with pytest.raises(WrongStateError, match="closed"):
            await capsule.run("pass")
        with pytest.raises(WrongStateError, match="closed"):
            await anext(capsule.read_stream("f"))
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


def test_an_interrupted_download_leaves_nothing(capsule: Capsule, tmp_path: Path) -> None:
    capsule.write_file("big", bytes(3 * MIB))
    kept: list[BaseException] = []

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    try:
        capsule.download("big", tmp_path / "copy", progress=interrupt)
    except KeyboardInterrupt as error:
        kept.append(error)  # with its frames: nothing was cleaned up by being forgotten
    assert kept
    assert list(tmp_path.iterdir()) == []
    assert len(capsule.read_file("big")) == 3 * MIB


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


async def test_a_cancelled_upload_from_a_pipe_is_a_cancellation(
    async_capsule: AsyncCapsule,
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as source, os.fdopen(writer, "wb", 0) as sink:
        sink.write(b"first")
        upload = asyncio.ensure_future(async_capsule.write_file("f", source))
        done, _ = await asyncio.wait({upload}, timeout=0.3)
        assert not done
        upload.cancel()
        await asyncio.wait({upload}, timeout=0.3)
        sink.write(b"the thread that reads it cannot be called back")
        sink.close()
        with pytest.raises(asyncio.CancelledError):
            await upload


def test_iterators_can_be_closed_by_hand(capsule: Capsule) -> None:
    with contextlib.closing(iter(capsule.stream(["yes"], timeout=20))) as events:
        assert isinstance(next(events), Output)
    with contextlib.closing(capsule.read_stream("/etc/hostname")) as pieces:
        assert next(pieces)


async def test_async_iterators_can_be_closed_by_hand(async_capsule: AsyncCapsule) -> None:
    async with contextlib.aclosing(aiter(async_capsule.stream(["yes"], timeout=20))) as events:
        assert isinstance(await anext(events), Output)


@pytest.mark.parametrize("cls", [Capsule, AsyncCapsule])
def test_methods_explain_themselves(cls: Any) -> None:
    assert list(inspect.signature(cls.run).parameters)[:3] == ["self", "code", "language"]
    names = [name for name in dir(cls) if not name.startswith("_") and name != "info"]
    assert [name for name in names if not inspect.getdoc(getattr(cls, name))] == []


def test_a_method_can_be_called_on_its_class(capsule: Capsule) -> None:
    assert list(map(Capsule.exists, [capsule], ["/workspace"])) == [True]
