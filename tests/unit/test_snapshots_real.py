"""Snapshots and forks of real boxes: what is kept, what it costs, and that nothing is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    WrongStateError,
)
from capsule.model import MIB, State
from capsule.service import CreateRequest, ExecCall, ExecResult, Service, Snapshot, sandboxes
from capsule.service.entry import Entry
from capsule.service.happenings import Happening
from tests.support import backends, eventually
from tests.support.backends import layers
from tests.unit.test_service_real import boxes, folder, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]


async def sh(service: Service, id: str, text: str) -> str:
    done: ExecResult = await service.exec(id, ExecCall(("sh", "-c", text)))
    assert done.exit.exit_code == 0, done.stderr.decode()
    return done.stdout.decode()


async def make(service: Service, text: str = "", **options: object) -> str:
    id = (await service.create(CreateRequest("bash", **options))).id  # type: ignore[arg-type]
    if text:
        await sh(service, id, text)
    return id


async def restore(service: Service, name: str, **options: object) -> str:
    request = CreateRequest(snapshot=name, **options)  # type: ignore[arg-type]
    return (await service.create(request)).id


async def test_a_snapshot_is_where_another_begins(folder: Path) -> None:
    async with serving(folder) as service:
        text = "mkdir -p a/b && echo one > a/b/f && ln -s b a/l && ln a/b/f hard && echo t > /tmp/t"
        first = await make(service, text + " && echo v > /var/tmp/v && chmod 640 a/b/f")
        made = await service.snapshots.make(first, "base", {"team": "blue"})
        assert made.size == 8 and made.files > 8 and service.snapshots.list() == [made]
        await sh(service, first, "echo two > a/b/f && rm /tmp/t")
        second = await restore(service, "base")
        assert service.get(second).snapshot == "base"
        assert await sh(service, second, "cat a/l/f hard /tmp/t /var/tmp/v") == "one\none\nt\nv\n"
        assert await sh(service, second, "stat -c '%a %u %h' a/b/f") == "640 1000 2\n"
        modes = await sh(service, second, "stat -c '%a %u' /tmp /workspace")
        assert modes == "1777 1000\n755 1000\n"
        await sh(service, second, "echo mine > a/b/f; rm -r a/l; mkdir new; touch new/x")
        assert await sh(service, first, "cat a/b/f; ls") == "two\na\nhard\n"


async def test_a_snapshot_of_what_began_from_one_holds_only_what_changed(folder: Path) -> None:
    async with serving(folder) as service:
        big = "head -c 3000000 /dev/urandom > big; mkdir d e; touch d/gone d/stays e/x; echo 1 > f"
        first = await make(service, big)
        await service.snapshots.make(first, "one", {})
        second = await restore(service, "one")
        await sh(service, second, "rm d/gone; rm -r e; mkdir e; echo new > e/y; echo 22 > f")
        await sh(service, second, "mv d dd")
        two = await service.snapshots.make(second, "two", {})
        if backends.of(folder).copies:
            assert len(two.layers) == 1
        else:
            assert two.layers[0].size < 100 and len(two.layers) == 2
        third = await restore(service, "two")
        assert await sh(service, third, "find . | sort; cat f; stat -c %s big") == (
            ".\n./big\n./dd\n./dd/stays\n./e\n./e/y\n./f\n22\n3000000\n"
        )


async def test_odd_files_are_kept_or_left_out(folder: Path) -> None:
    odd = r"""
    mkdir shut && echo secret > shut/f && chmod 000 shut/f shut
    mkfifo pipe
    touch -- '-rf' '.wh.name' '.wh..wh..opq' 'a b' "$(printf 'x\ny')" "$(printf '\377\376')"
    ln -s /etc/passwd out && ln -s ../../.. up && ln -s nowhere dead
    truncate -s 500M holes && echo end >> holes
    touch -d '1999-01-01 00:00:00 UTC' old
    """
    async with serving(folder) as service:
        first = await make(service, odd)
        made = await service.snapshots.make(first, "odd", {})
        assert made.size < 100_000
        second = await restore(service, "odd")
        look = "ls -A | LC_ALL=C sort | od -c; readlink out up dead; stat -c '%s %b' holes"
        look += "; stat -c %Y old; stat -c %a shut; chmod 700 shut; stat -c %a shut/f; rm -f pipe"
        await sh(service, first, "rm pipe")
        assert await sh(service, second, look) == await sh(service, first, look)
        assert await sh(service, second, "chmod 600 shut/f; cat shut/f") == "secret\n"
        await service.delete(second)
        await service.snapshots.delete("odd")
        assert layers(folder) == []  # folders without rights are removed as well


async def exported(service: Service, name: str) -> bytes:
    return b"".join([piece async for piece in service.moves.export(name)])


async def import_(service: Service, name: str, data: bytes, **options: str) -> Snapshot:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    return await service.moves.import_(name, pieces(), **options)


async def test_a_snapshot_moves_to_another_server_as_an_archive(folder: Path) -> None:
    odd = r"""
    touch -- '-rf' '.wh.name' 'a b' "$(printf 'x\ny')" "$(printf '\377\376')"
    ln -s /etc/passwd out && ln -s ../../.. up && ln -s nowhere dead
    mkdir -p d/e && echo one > d/e/f && ln d/e/f hard && chmod 640 hard && mkfifo pipe
    truncate -s 5M holes && echo end >> holes && touch -d '1999-01-01 00:00:00.5 UTC' old
    echo t > /tmp/t; mkdir /var/tmp/v && chmod 711 /var/tmp/v
    """
    look = "find . /tmp /var/tmp -exec stat -c '%n %F %a %u %.9Y' {} + | LC_ALL=C sort | od -c"
    look += "; readlink out up dead; cat d/e/f /tmp/t; tail -c 4 holes; stat -c '%s %b' holes"
    async with serving(folder / "one") as service:
        first = await make(service, odd)
        await service.snapshots.make(first, "low", {"team": "blue"})
        second = await restore(service, "low")
        await sh(service, second, "rm '-rf' pipe; mv d moved; mkdir d; echo two > d/new")
        await sh(service, second, "rm -f pipe; touch -d @5 . d moved /tmp /var/tmp")
        await service.snapshots.make(second, "high", {"team": "red"})
        look = look.replace("cat d", "cat moved")
        seen = await sh(service, await restore(service, "high"), look)
        archive = await exported(service, "high")
        with pytest.raises(ConflictError):
            await import_(service, "low", archive)
    async with serving(folder / "two") as service:
        made = await import_(service, "from-one", archive)
        assert made.metadata == {"team": "red"} and made.template == "bash"
        assert len(made.layers) == 1 and service.snapshots.list() == [made]
        third = await restore(service, "from-one")
        assert await sh(service, third, look) == seen
        with pytest.raises(NotFoundError, match="template"):
            await import_(service, "other", archive, template="none")
        with pytest.raises(InvalidError, match="sha256"):
            await import_(service, "other", archive[:-3000] + b"x" + archive[-2999:])
        assert len(layers(folder / "two")) == 1


async def test_a_snapshot_larger_than_the_limit_is_refused_and_leaves_nothing(
    folder: Path,
) -> None:
    async with serving(folder, max_snapshot=2 * MIB) as service:
        id = await make(service, "head -c 3000000 /dev/zero | tr '\\0' x > f")
        with pytest.raises(TooLargeError, match="more than"):
            await service.snapshots.make(id, "large", {})
        assert layers(folder) == [] and service.snapshots.list() == []


async def test_it_is_of_one_moment_while_programs_write(folder: Path) -> None:
    """Two files that are always written in the same order: never the later one ahead."""
    async with serving(folder) as service:
        id = await make(service)
        step = "echo $i > a.new; mv a.new a; echo $i > b.new; mv b.new b"
        loop = f"i=0; while :; do i=$((i+1)); {step}; done"
        async with await service.start(id, ExecCall(("sh", "-c", loop), timeout=60)):
            await eventually(lambda: _runs(service, id), what="it to write")
            for n in range(5):
                await service.snapshots.make(id, f"s{n}", {})
                other = await restore(service, f"s{n}")
                a, b = (await sh(service, other, "cat a b")).split()
                assert int(a) - int(b) in (0, 1)
                await service.delete(other)


async def _runs(service: Service, id: str) -> bool:
    done = await service.exec(id, ExecCall(("cat", "b")))
    return done.stdout != b""


async def test_a_paused_one_is_saved_and_stays_paused(folder: Path) -> None:
    async with serving(folder) as service:
        id = await make(service, "echo x > f")
        await service.pause(id)
        await service.snapshots.make(id, "p", {})
        assert service.get(id).state is State.PAUSED
        with pytest.raises(WrongStateError):
            await sh(service, id, "true")
        assert await sh(service, await restore(service, "p"), "cat f") == "x\n"


async def test_snapshots_and_their_users_outlive_the_server(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        id = await make(service, "echo x > f")
        made = await service.snapshots.make(id, "one", {})
        user = await restore(service, "one")
        await service.snapshots.make(user, "two", {})
        await service.snapshots.delete("two")
        await service.snapshots.make(user, "three", {})
    kept = folder / "d" / backends.of(folder).layers
    (kept / "orphan").mkdir()
    (kept / ".draft").mkdir()
    async with serving(folder) as service:
        assert {s.name for s in service.snapshots.list()} == {"one", "three"}
        assert service.snapshots.find("one") == made
        assert len(layers(folder)) == 2
        assert await sh(service, user, "cat f") == "x\n"
        assert await sh(service, await restore(service, "three"), "cat f") == "x\n"


async def test_a_fork_has_the_files_and_is_its_own(folder: Path) -> None:
    async with serving(folder) as service:
        options = {"env": {"A": "1"}, "metadata": {"k": "v"}, "limits": {"processes": 20}}
        id = await make(service, "echo base > f", **options)
        forks = await service.snapshots.fork(id, 5)
        assert len({fork.id for fork in forks} | {id}) == 6
        assert {fork.limits.processes for fork in forks} == {20}
        assert all(fork.metadata == {"k": "v"} for fork in forks)
        for n, fork in enumerate(forks):
            await sh(service, fork.id, f"test $A = 1 && echo {n} >> f")
        found = [await sh(service, fork.id, "cat f") for fork in forks]
        assert found == [f"base\n{n}\n" for n in range(5)]
        assert await sh(service, id, "cat f") == "base\n" and len(layers(folder)) == 1
        for fork in forks:
            await service.delete(fork.id)
        await eventually(lambda: layers(folder) == [], what="its layers to go")


async def test_a_fork_is_all_or_nothing(folder: Path) -> None:
    async with serving(folder, max_sandboxes=3) as service:
        id = await make(service, "echo base > f")
        with pytest.raises(Exception, match="all sandboxes are taken"):
            await service.snapshots.fork(id, 5)
        assert [s.id for s in service.list()] == [id] and boxes(folder) == [id]
        assert layers(folder) == []


async def test_a_fork_whose_last_launch_fails_has_never_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        id = await make(service, "echo base > f")
        told: list[Happening] = []
        service.happenings.listeners.append(told.append)
        begun = 0

        async def begin_or_fail(entry: Entry) -> None:
            nonlocal begun
            begun += 1
            if begun == 5:
                raise UnavailableError("it does not begin")

        monkeypatch.setattr(sandboxes, "begin", begin_or_fail)
        with pytest.raises(UnavailableError, match="it does not begin"):
            await service.snapshots.fork(id, 5)
        assert [s.id for s in service.list()] == [id] and boxes(folder) == [id]
        assert told == [] and layers(folder) == []
