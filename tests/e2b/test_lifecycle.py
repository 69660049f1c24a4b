"""The life of a sandbox through E2B's own SDK: create, connect, kill, list, info, timeout."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from e2b import (
    E2B,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)

from tests.support import wait_for
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

UNKNOWN = "abcdefghijklmnop"


def test_the_environment_is_all_that_a_program_needs(e2b_env: RealServer) -> None:
    with Sandbox.create() as sandbox:
        assert sandbox.is_running()
        assert sandbox.sandbox_domain == f"localhost:{e2b_env.port}"
        assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.localhost:{e2b_env.port}"
    assert not sandbox.is_running()


def test_info_has_what_was_asked_for(e2b: E2B) -> None:
    with e2b.Sandbox.create() as default:
        info = default.get_info()
        assert info.end_at - info.started_at == timedelta(seconds=300)
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


def test_an_unknown_or_ended_sandbox_is_not_found(e2b: E2B) -> None:
    ended = e2b.Sandbox.create()
    assert ended.kill() is True
    for id in (UNKNOWN, ended.sandbox_id):
        assert e2b.Sandbox.kill(id) is False
        for call in (
            lambda id: e2b.Sandbox.connect(id),
            lambda id: e2b.Sandbox.get_info(id),
            lambda id: e2b.Sandbox.set_timeout(id, 10),
            lambda id: e2b.Sandbox.pause(id),
            lambda id: e2b.Sandbox.create_snapshot(id),
            lambda id: e2b.Sandbox.fork(id),
            lambda id: e2b.Sandbox.get_metrics(id),
            lambda id: e2b.Sandbox.update_network(id, {}),
        ):
            with pytest.raises(SandboxNotFoundException):
                call(id)
    with pytest.raises(SandboxException, match="404: template 'nosuch' does not exist"):
        e2b.Sandbox.create("nosuch")


def test_connect_extends_and_never_shortens(sandbox: Sandbox, e2b: E2B) -> None:
    end = sandbox.get_info().end_at
    again = e2b.Sandbox.connect(sandbox.sandbox_id, timeout=5)
    assert again.get_info().end_at == end
    e2b.Sandbox.connect(sandbox.sandbox_id, timeout=500)
    assert sandbox.get_info().end_at > end + timedelta(seconds=300)
    assert again.is_running()
    assert again._envd_access_token == sandbox._envd_access_token


def test_a_timeout_may_be_shortened_and_then_ends_it(sandbox: Sandbox) -> None:
    sandbox.set_timeout(1000)
    later = sandbox.get_info().end_at
    sandbox.set_timeout(30)
    assert sandbox.get_info().end_at < later - timedelta(seconds=900)
    sandbox.set_timeout(0)
    wait_for(lambda: not sandbox.is_running(), what="it has ended")


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


def test_a_list_comes_in_pages_in_either_order(e2b: E2B) -> None:
    mark = {"mark": str(uuid.uuid4())}
    made = [e2b.Sandbox.create(metadata=mark) for _ in range(3)]
    ids = [each.sandbox_id for each in made]

    def listed(**query: Any) -> list[str]:
        found = e2b.Sandbox.list(query=SandboxQuery(metadata=mark, **query)).next_items()
        return sorted(each.sandbox_id for each in found)

    try:
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            query: Any = {"query": SandboxQuery(metadata=mark), "limit": 2, "order": order}
            pages = e2b.Sandbox.list(**query)
            found, more = [], []
            while pages.has_next:
                found += pages.next_items()
                more.append(pages.has_next)
            assert [each.sandbox_id for each in found] == expected
            assert more == [True, False]
        assert listed(started_after=made[1].get_info().started_at) == sorted(ids[1:])
        made[0].pause()
        assert listed(state=[SandboxState.PAUSED]) == ids[:1]
        assert listed(state=[SandboxState.RUNNING]) == sorted(ids[1:])
        assert listed() == sorted(ids)
    finally:
        for each in made:
            each.kill()


def test_a_key_makes_one_sandbox(e2b: E2B) -> None:
    key = str(uuid.uuid4())
    with e2b.Sandbox.create(idempotency_key=key) as first:
        again = e2b.Sandbox.create(idempotency_key=key)
        assert again.sandbox_id == first.sandbox_id
        with pytest.raises(SandboxException, match="409: "):
            e2b.Sandbox.create(idempotency_key=key, metadata={"other": "request"})
    with pytest.raises(SandboxException, match="409: "):
        e2b.Sandbox.create(idempotency_key=key)
