"""Sessions over real boxes: what is kept how, what a restart finds, what is removed when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.config import Config
from capsule.errors import (
    CapacityError,
    ConflictError,
    ForbiddenError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from capsule.model import MIB, Isolation
from capsule.providers.registry import make_provider
from capsule.service import Service
from capsule.service.caller import DEFAULT_TENANT as ME
from capsule.sessions.ledger import verify_file
from capsule.sessions.plan import Wish
from capsule.sessions.records import Phase
from capsule.sessions.sessions import Sessions
from tests.support import component_missing
from tests.support.backends import CATALOG
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


def archives(folder: Path) -> list[str]:
    return os.listdir(folder / "d/storage/workspaces")


@asynccontextmanager
async def serving_without_snapshots(folder: Path) -> AsyncIterator[Service]:
    """The level that has no overlays, and so no layers."""
    level = Isolation.LANDLOCK
    config = Config(data_dir=folder / "d", run_dir=folder / "r", drain="delete", isolation=level)
    provider = await asyncio.to_thread(make_provider, "local", config, CATALOG)
    try:
        async with Service(config, {"local": provider}, CATALOG) as service:
            yield service
    except UnavailableError as error:
        component_missing(f"no {level}: {error.message}")


async def test_without_snapshots_the_workspace_is_kept_as_an_archive(folder: Path) -> None:
    async with serving_without_snapshots(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "mkdir -p a/b; echo kept > a/b/f; chmod 700 a/b/f; ln -s b a/l; cd a")
        closed = await sessions.close(ME, "s")
        assert closed.kept is not None and closed.kept.how == "archive"
        assert "files outside /workspace" in closed.kept.not_kept
        assert archives(folder) == [closed.kept.name] and boxes(folder) == []
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat a/l/f; stat -c %a a/b/f") == "kept\n700\n"
        await sh(sessions, "echo more > g")
        again = await sessions.close(ME, "s")
        assert again.kept is not None and archives(folder) == [again.kept.name]
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "cat a/b/f g") == "kept\nmore\n"
        await sessions.delete(ME, "s")
        assert archives(folder) == []


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


async def test_a_restarted_server_goes_on_where_the_old_one_was(folder: Path) -> None:
    wish = Wish(environment="python", session_id="s")
    async with serving(folder, drain="keep") as service:
        async with sitting(service, drain="keep") as sessions:
            await sessions.create(ME, wish)
            await sessions.execute(ME, "s", "x = 41; open('artifacts/a','w').write('1')")
    async with serving(folder) as service, sitting(service) as sessions:
        done = await sessions.execute(ME, "s", "x + 1")
        assert done.number == 2 and done.outcome.results[0].text == "42"
        assert [each.name for each in await sessions.artifacts(ME, "s")] == ["a"]


async def test_opening_that_was_cut_off_is_finished_with_the_same_sandbox(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        async with sitting(service, drain="keep") as sessions:
            made = await sessions.create(ME, BASH)
            # As a server leaves it that is killed when the box runs and nobody has been told.
            half = replace(made, phase=Phase.OPENING, sandbox_id="", key="k", kept=None)
            request = sessions._life._request(half)
            box = await service.create(request)
            await sessions._ledger.save(half)
            await service.delete(made.sandbox_id)
    async with serving(folder) as service, sitting(service) as sessions:
        found = await sessions.get(ME, "s")
        assert (found.phase, found.sandbox_id) == (Phase.OPEN, box.id)
        assert await sh(sessions, "echo fine") == "fine\n"
        assert len(boxes(folder)) == 1


async def test_a_create_that_fails_leaves_no_session(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        with pytest.raises(NotFoundError):
            await sessions.create(ME, Wish(provider="nowhere", session_id="s"))
        assert await sessions.list(ME) == []
        with pytest.raises(NotFoundError):
            await sessions.get(ME, "s")
        await sessions.create(ME, BASH)  # the id is free


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


async def test_a_quota_of_storage_costs_no_session_its_files(folder: Path) -> None:
    async with serving(folder, tenant_storage=MIB) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "head -c 3000000 /dev/urandom > big; sha256sum big > sum")
        box = (await sessions.get(ME, "s")).sandbox_id
        with pytest.raises(ForbiddenError, match="its quota is"):
            await service.snapshots.make(box, "mine", {})
        await sessions.close(ME, "s")
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "sha256sum -c sum") == "big: OK\n"


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


async def test_the_oldest_artifacts_and_files_give_way(folder: Path) -> None:
    clock = TurnedClock()
    most = 1024 * 1024
    async with serving(folder) as service, sitting(service, clock, storage_bytes=most) as sessions:
        for number in range(6):
            await sessions.create(ME, replace(BASH, session_id=f"s{number}"))
            code = "head -c 250000 /dev/urandom > artifacts/a; head -c 10 /dev/zero > artifacts/b"
            done = await sessions.execute(ME, f"s{number}", code)
            assert [each.name for each in done.artifacts] == ["a", "b"]
            await sessions.close(ME, f"s{number}")
            clock.pass_time(1)
        await sessions.tidy()
        left = [len(await sessions.artifacts(ME, f"s{each}")) for each in range(6)]
        assert left == [0, 1, 2, 2, 2, 2] and len(blobs(folder)) == 5
        kept = [each.id for each in await sessions.list(ME) if each.kept]
        assert kept == ["s2", "s3", "s4", "s5"] and len(service.snapshots.list()) == 4
        assert (await sessions.get(ME, "s0")).reason == "its files gave way to newer ones"


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


async def test_one_session_has_its_share_of_the_storage(folder: Path) -> None:
    most = 1024 * 1024
    async with serving(folder) as service, sitting(service, storage_bytes=most) as sessions:
        await sessions.create(ME, BASH)
        code = "for i in 1 2 3; do head -c 100000 /dev/urandom > artifacts/$i; done"
        done = await sessions.execute(ME, "s", code)
        assert len(done.artifacts) == 2
        assert "may have 62144 more" in done.skipped[0].reason


async def test_many_files_come_in_parts(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        code = "for i in $(seq 1 250); do echo $((i % 3)) > artifacts/$i; done"
        done = await sessions.execute(ME, "s", code)
        assert len(done.artifacts) == 200 and len(done.skipped) == 50
        assert "next execution" in done.skipped[0].reason and len(blobs(folder)) == 3
        assert len((await sessions.execute(ME, "s", "true")).artifacts) == 50


async def test_a_snapshot_that_somebody_removed_is_told_once(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sh(sessions, "echo 1 > f")
        closed = await sessions.close(ME, "s")
        assert closed.kept is not None
        await service.snapshots.delete(closed.kept.name)
        with pytest.raises(ConflictError, match="files of session s are gone"):
            await sessions.reopen(ME, "s")
        assert (await sessions.get(ME, "s")).phase is Phase.CLOSED
        await sessions.reopen(ME, "s")
        assert await sh(sessions, "ls") == "artifacts\n"


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


async def test_a_file_that_is_too_large_is_named_and_not_kept(folder: Path) -> None:
    async with serving(folder) as service, sitting(service, max_artifact=1000) as sessions:
        await sessions.create(ME, BASH)
        code = "head -c 1001 /dev/zero > artifacts/big; echo 1 > artifacts/small"
        done = await sessions.execute(ME, "s", code)
        assert [each.name for each in done.artifacts] == ["small"]
        (skipped,) = done.skipped
        assert (skipped.name, skipped.size) == ("big", 1001) and "limit 1000" in skipped.reason


async def test_two_sessions_with_one_content_keep_it_once(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        for id in ("s", "t"):
            await sessions.create(ME, replace(BASH, session_id=id))
            await sh(sessions, "echo same > artifacts/f", id)
        assert len(blobs(folder)) == 1
        await sessions.delete(ME, "s", purge=True)
        assert len(blobs(folder)) == 1
        await sessions.delete(ME, "t", purge=True)
        assert blobs(folder) == []


async def test_another_tenants_session_does_not_exist(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        for act in (sessions.get, sessions.close, sessions.reopen, sessions.delete, sessions.log):
            with pytest.raises(NotFoundError):
                await act("other", "s")
        with pytest.raises(NotFoundError):
            await sessions.execute("other", "s", "id")
        assert await sessions.list("other") == []
        await sessions.create("other", BASH)  # an id is one's own
        assert len(await sessions.list("other")) == 1
        await sessions.close("other", "s")
        assert (await sessions.get(ME, "s")).phase is Phase.OPEN
        await sessions.reopen("other", "s")
        await sessions.close("other", "s")
        await sessions.delete("other", "s")
        assert service.snapshots.list("other") == []


async def test_files_of_a_closed_session_wait_for_it(folder: Path) -> None:
    async with serving(folder) as service, sitting(service) as sessions:
        await sessions.create(ME, BASH)
        await sessions.close(ME, "s")
        with pytest.raises(WrongStateError, match="is closed: it was closed"):
            await sessions.files(ME, "s")
        assert (await sessions.close(ME, "s")).phase is Phase.CLOSED
