"""The life of a sandbox through E2B's own SDK: create, connect, kill, list, info, timeout."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from e2b import (
    E2B,
    AsyncSandbox,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)

from tests.support import eventually
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

NOBODYS = "abcdefghijklmnop"


def test_the_environment_is_all_that_a_program_needs(e2b_env: RealServer) -> None:
    with Sandbox.create() as sandbox:
        assert sandbox.is_running()
        assert sandbox.sandbox_domain == f"localhost:{e2b_env.port}"
        assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.localhost:{e2b_env.port}"
    assert not sandbox.is_running()


def test_kill_says_whether_there_was_one(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert e2b.Sandbox.kill(NOBODYS) is False


def test_info_has_what_was_asked_for(e2b: E2B) -> None:
    before = datetime.now(UTC)
    sandbox = e2b.Sandbox.create(timeout=100, metadata={"who": "mé & co"}, envs={"A": "1"})
    info = sandbox.get_info()
    sandbox.kill()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"who": "mé & co"}
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1 and info.memory_mb >= 64
    assert before - timedelta(seconds=1) <= info.started_at <= datetime.now(UTC)
    assert info.end_at - info.started_at == timedelta(seconds=100)
    assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}
    assert info.allow_internet_access is False


def test_without_a_timeout_it_is_five_minutes(e2b: E2B) -> None:
    with e2b.Sandbox.create() as sandbox:
        info = sandbox.get_info()
        assert info.end_at - info.started_at == timedelta(seconds=300)


def test_what_does_not_exist_is_told_as_such(e2b: E2B) -> None:
    with pytest.raises(SandboxNotFoundException):
        e2b.Sandbox.connect(NOBODYS)
    with pytest.raises(SandboxNotFoundException):
        e2b.Sandbox.get_info(NOBODYS)
    with pytest.raises(SandboxNotFoundException):
        e2b.Sandbox.set_timeout(NOBODYS, 10)
    with pytest.raises(SandboxException, match="404: template 'nosuch' does not exist"):
        e2b.Sandbox.create("nosuch")


def test_one_that_has_ended_does_not_exist(e2b: E2B) -> None:
    sandbox = e2b.Sandbox.create()
    sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxNotFoundException):
        e2b.Sandbox.connect(sandbox.sandbox_id)


def test_connect_extends_and_never_shortens(sandbox: Sandbox, e2b: E2B) -> None:
    end = sandbox.get_info().end_at
    again = e2b.Sandbox.connect(sandbox.sandbox_id, timeout=5)
    assert again.get_info().end_at == end
    e2b.Sandbox.connect(sandbox.sandbox_id, timeout=500)
    assert sandbox.get_info().end_at > end + timedelta(seconds=300)
    assert again.is_running()
    assert again._envd_access_token == sandbox._envd_access_token


def test_a_timeout_may_be_shortened(sandbox: Sandbox) -> None:
    sandbox.set_timeout(1000)
    later = sandbox.get_info().end_at
    sandbox.set_timeout(30)
    assert sandbox.get_info().end_at < later - timedelta(seconds=900)


async def test_a_timeout_of_nothing_ends_it(e2b: E2B) -> None:
    sandbox = await e2b.AsyncSandbox.create()
    await sandbox.set_timeout(0)

    async def ended() -> bool:
        return not await sandbox.is_running()

    await eventually(ended, what="it has ended")


def test_a_timeout_over_the_servers_is_refused(e2b: E2B) -> None:
    with pytest.raises(SandboxException, match="400: timeout: 10000000 seconds, at most 86400"):
        e2b.Sandbox.create(timeout=10_000_000)


def test_a_list_is_filtered_by_metadata(e2b: E2B) -> None:
    mark = {"mark &=%": f"{uuid.uuid4()} ü+/"}
    with e2b.Sandbox.create(metadata=mark) as sandbox, e2b.Sandbox.create():
        found = e2b.Sandbox.list(query=SandboxQuery(metadata=mark)).next_items()
        assert [each.sandbox_id for each in found] == [sandbox.sandbox_id]
        assert found[0].metadata == mark
        template = found[0].template_id
        ours = SandboxQuery(metadata=mark, template=template)
        assert len(e2b.Sandbox.list(query=ours).next_items()) == 1
        others = SandboxQuery(metadata=mark, template="another")
        assert e2b.Sandbox.list(query=others).next_items() == []


async def test_a_list_comes_in_pages_in_either_order(e2b: E2B) -> None:
    mark = {"mark": str(uuid.uuid4())}
    made = [await e2b.AsyncSandbox.create(metadata=mark) for _ in range(3)]
    ids = [each.sandbox_id for each in made]
    try:
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            pages = e2b.AsyncSandbox.list(
                query=SandboxQuery(metadata=mark),
                limit=2,
                order=order,  # type: ignore[arg-type]
            )
            found, more = [], []
            while pages.has_next:
                found += await pages.next_items()
                more.append(pages.has_next)
            assert [each.sandbox_id for each in found] == expected
            assert more == [True, False]
        second_start = (await made[1].get_info()).started_at
        late = SandboxQuery(metadata=mark, started_after=second_start)
        found = await e2b.AsyncSandbox.list(query=late).next_items()
        assert {each.sandbox_id for each in found} == set(ids[1:])
        paused = SandboxQuery(metadata=mark, state=[SandboxState.PAUSED])
        assert await e2b.AsyncSandbox.list(query=paused).next_items() == []
    finally:
        await asyncio.gather(*(each.kill() for each in made))


def test_a_key_makes_one_sandbox(e2b: E2B) -> None:
    key = str(uuid.uuid4())
    with e2b.Sandbox.create(idempotency_key=key) as first:
        again = e2b.Sandbox.create(idempotency_key=key)
        assert again.sandbox_id == first.sandbox_id
        with pytest.raises(SandboxException, match="409: "):
            e2b.Sandbox.create(idempotency_key=key, metadata={"other": "request"})
    with pytest.raises(SandboxException, match="409: "):
        e2b.Sandbox.create(idempotency_key=key)


async def test_many_are_made_at_once(e2b: E2B) -> None:
    made = await asyncio.gather(*(e2b.AsyncSandbox.create() for _ in range(5)))
    assert len({each.sandbox_id for each in made}) == 5
    assert all(await asyncio.gather(*(each.kill() for each in made)))


async def test_the_async_sdk_does_the_same(async_sandbox: AsyncSandbox, e2b: E2B) -> None:
    assert await async_sandbox.is_running()
    again = await e2b.AsyncSandbox.connect(async_sandbox.sandbox_id)
    assert (await again.get_info()).sandbox_id == async_sandbox.sandbox_id
    with pytest.raises(SandboxNotFoundException):
        await e2b.AsyncSandbox.connect(NOBODYS)
