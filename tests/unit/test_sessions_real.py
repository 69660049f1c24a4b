"""Sessions over real boxes: what is kept how, what a restart finds, what is removed when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.errors import (
    CapacityError,
    NoSpaceError,
    NotSupportedError,
)
from capsule.model import Isolation
from capsule.service import Service
from capsule.service.caller import DEFAULT_TENANT as ME
from capsule.sessions.ledger import verify_file
from capsule.sessions.plan import Wish
from capsule.sessions.records import Phase
from capsule.sessions.sessions import Sessions
from tests.support import backends
from tests.support.backends import Backend
from tests.unit.service_double import TurnedClock
from tests.unit.test_service_real import boxes, folder, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

DAY = 86400.0
BASH = Wish(environment="bash", session_id="s")


@asynccontextmanager
async def sitting(
    service: Service, clock: TurnedClock | None = None, **settings: object
) -> AsyncIterator[Sessions]:
    config = replace(service.config, **settings)  # type: ignore[arg-type]
    async with Sessions(config, service, clock) as sessions:
        yield sessions


async def sh(sessions: Sessions, code: str, id: str = "s") -> str:
    done = await sessions.execute(ME, id, code, language="bash")
    assert done.outcome.status == "ok", done.outcome
    return done.outcome.stdout.decode()


def blobs(folder: Path) -> list[str]:
    return [p.name for p in (folder / "d/storage/artifacts").glob("??/*")]


@pytest.mark.needs("landlock")
async def test_without_snapshots_the_workspace_is_kept_as_an_archive(folder: Path) -> None:
    backends.register(folder, Backend(level=Isolation.LANDLOCK))
    kept = folder / "d/storage/workspaces"
    async with serving(folder) as service, sitting(service) as sessions:
        with pytest.raises(NotSupportedError, match="has no disk of its own"):
            await service.volumes.create("one")
        await sessions.create(ME, BASH)
        await sh(sessions, "mkdir -p a/b; (umask 077; echo kept > a/b/f); ln -s b a/l; cd a")
        closed = await sessions.close(ME, "s")
        assert closed.kept is not None and closed.kept.how == "archive"
        assert "files outside /workspace" in closed.kept.not_kept
        assert os.listdir(kept) == [closed.kept.name] and boxes(folder) == []
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat a/l/f; stat -c %a a/b/f") == "kept\n600\n"
        await sh(sessions, "echo more > g")
        again = await sessions.close(ME, "s")
        assert again.kept is not None and os.listdir(kept) == [again.kept.name]
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat a/b/f g") == "kept\nmore\n"
        await sessions.delete(ME, "s")
        assert os.listdir(kept) == []


async def test_a_stopped_server_keeps_files_where_it_deletes_sandboxes(folder: Path) -> None:
    async with serving(folder) as service, sitting(service, drain="delete") as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "echo 1 > f")
    assert boxes(folder) == []
    async with serving(folder) as service, sitting(service) as sessions:
        found = await sessions.get(ME, "s")
        assert found.phase is Phase.CLOSED and found.reason == "the server stopped"
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat f") == "1\n"


async def test_a_reopen_that_fails_leaves_it_closed_with_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "echo 1 > f")
        await sessions.close(ME, "s")

        async def full(*args: object) -> None:
            raise CapacityError("full")

        with monkeypatch.context() as patch:
            patch.setattr(service, "create", full)
            with pytest.raises(CapacityError):
                await sessions.reopen(ME, "s")
        found = await sessions.get(ME, "s")
        assert found.phase is Phase.CLOSED and found.kept is not None
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat f") == "1\n"


async def test_a_run_that_ends_with_its_sandbox_is_logged_as_lost(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        made = await sessions.create(ME, BASH)
        running = asyncio.create_task(sessions.execute(ME, "s", "touch began; sleep 60"))
        files = service.files(made.sandbox_id)
        async with asyncio.timeout(10), files.watch("/workspace") as changes:
            async for change in changes:
                if "began" in change.path:
                    break
        await sessions.delete(ME, "s")
        result = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(result[0], Exception)
        (logged,) = await sessions.log(ME, "s")
        assert logged.said["status"] == "lost" and logged.texts.command is not None


async def test_close_reopen_and_execute_at_once_end_well(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        acts = [act(ME, "s") for act in (sessions.close, sessions.reopen) * 3]
        runs = [sessions.execute(ME, "s", "echo 1") for _ in range(3)]
        await asyncio.gather(*acts, *runs, return_exceptions=True)
        assert (await sessions.get(ME, "s")).phase in (Phase.OPEN, Phase.CLOSED)
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "echo 2") == "2\n"
        assert len(boxes(folder)) == 1
        assert len(service.snapshots.list()) <= 1
        await sessions.delete(ME, "s")
        assert boxes(folder) == [] and service.snapshots.list() == []
    assert verify_file(folder / "d/storage/sessions.db").broken == ()


async def test_what_is_old_is_removed(folder: Path) -> None:
    clock = TurnedClock()
    async with serving(folder) as service, sitting(service, clock) as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "echo old > artifacts/old")
        await sessions.close(ME, "s")
        assert len(service.snapshots.list()) == 1
        clock.pass_time(29 * DAY)
        await sessions.tidy()
        assert (await sessions.get(ME, "s")).phase is Phase.CLOSED
        assert len(blobs(folder)) == 1
        clock.pass_time(2 * DAY)
        await sessions.tidy()
        assert blobs(folder) == [] and service.snapshots.list() == []
        assert await sessions.list(ME) == []
        (gone,) = await sessions.list(ME, Phase.DELETED)
        assert gone.kept is None
        clock.pass_time(31 * DAY)
        await sessions.tidy()
        assert await sessions.list(ME, Phase.DELETED) == []


async def test_what_one_tenant_keeps_pushes_out_nothing_of_others(folder: Path) -> None:
    clock = TurnedClock()
    most = 1024 * 1024
    async with serving(folder) as service, sitting(service, clock, storage_bytes=most) as sessions:
        code = "head -c 250000 /dev/urandom > artifacts/a; head -c 250000 /dev/zero"
        for number, tenant in enumerate(("other", ME, ME, ME, ME, ME)):
            await sessions.create(tenant, replace(BASH, session_id=f"s{number}"))
            await sessions.execute(tenant, f"s{number}", code)
            await sessions.close(tenant, f"s{number}")
            clock.pass_time(1)
        await sessions.tidy()
        assert len(await sessions.artifacts("other", "s0")) == 1
        assert (await sessions.get("other", "s0")).kept
        assert (await sessions.log("other", "s0"))[0].texts.stdout
        left = [len(await sessions.artifacts(ME, f"s{each}")) for each in range(1, 6)]
        assert left == [0, 0, 1, 1, 1]
        assert [bool(each.kept) for each in await sessions.list(ME)] == [False] * 2 + [True] * 3


async def test_files_that_cannot_be_removed_stay_with_their_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a snapshot that nobody has: the delete fails, and can be asked for again."""

    async def full(name: str, tenant: str) -> None:
        raise NoSpaceError("no space left for the server's records")

    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sessions.close(ME, "s")
        with monkeypatch.context() as patched:
            patched.setattr(service.snapshots, "delete", full)
            with pytest.raises(NoSpaceError):
                await sessions.delete(ME, "s")
        assert (await sessions.get(ME, "s")).phase is Phase.CLOSED
        await sessions.delete(ME, "s")
        assert service.snapshots.list(ME) == []


async def test_what_a_deleted_session_has_left_goes_at_the_start(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        made = await sessions.create(ME, BASH)
        left = await sessions._kept.keep(made, 0.0)  # as by a close that was cut off
        await sessions.delete(ME, "s")
        assert [each.name for each in service.snapshots.list(ME)] == [left.name]
    async with serving(folder) as service, sitting(service):
        assert service.snapshots.list(ME) == []
