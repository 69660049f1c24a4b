"""A step looks at what happened since the one before, and at nothing else. What is not heard of in
the usual way is there all the same: writes through mappings, lost events, further names, layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.errors import CapsuleError
from capsule.providers.local import watchers
from capsule.providers.local.layer_delta import LayerDelta
from capsule.providers.local.layers import Parser
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.watchers import half_of_a_users
from capsule.service import CreateRequest, ExecCall, Service, VolumeWish
from tests.support import backends, eventually
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import make, sh
from tests.unit.test_steps_real import changes, stepping

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]

TREE = "for i in $(seq 20); do mkdir d$i; for k in $(seq 20); do echo $i $k > d$i/f$k; done; done"
# Writes a line into a mapping, or a file that stays open, for each line that it is sent.
MAPPED = """
import mmap, sys
file = open("mapped", "r+b")
place = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
for line in sys.stdin:
    place[: len(line)] = line.encode()
    print("written", flush=True)
"""
OPEN = """
import sys
file = open("mapped", "r+b", buffering=0)
print("ready", flush=True)
for line in sys.stdin:
    file.seek(0)
    file.write(line.encode())
    print("written", flush=True)
"""


class Told:
    """How often a part was told, and what of it."""

    def __init__(self) -> None:
        self.parts = 0
        self.entries: list[str] = []

    def clear(self) -> None:
        self.parts = 0
        self.entries.clear()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    told = Told()
    begin, take = LayerDelta.begin_part, Parser._take_entry

    def begin_part(self: LayerDelta) -> None:
        told.parts += 1
        begin(self)

    def take_entry(self: Parser, view: memoryview) -> int:
        kind = bytes(view[:1]).decode()
        used = take(self, view)
        if used and kind != "o":
            size = int.from_bytes(view[23:25], "big")
            told.entries.append(f"{kind} {bytes(view[27 : 27 + size]).decode()}")
        return used

    monkeypatch.setattr(LayerDelta, "begin_part", begin_part)
    monkeypatch.setattr(Parser, "_take_entry", take_entry)
    yield told


def watches(folder: Path) -> bool:
    return backends.of(folder).name == "local"


async def check(service: Service, id: str, number: int, text: str, expected: str) -> None:
    (other,) = await service.fork(id, 1, at=number)
    try:
        assert await sh(service, other.id, text) == expected
    finally:
        await service.delete(other.id)


async def test_only_what_changed_is_told(folder: Path, told: Told) -> None:
    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; sleep 0.05")
        if not watches(folder):
            pytest.skip("agents in containers look at every file")
        d7_f8 = ["e workspace", "e workspace/d7", "f workspace/d7/f8"]
        # Opened to write, and not written to; in memory no times tell whether it was mapped.
        unwritten = [] if backends.of(folder).sized else d7_f8
        for command, entries in (
            ("echo new > d7/f7", ["e workspace", "e workspace/d7", "f workspace/d7/f7"]),
            ("rm d8/f1", ["e workspace", "p workspace/d8", "g workspace/d8/f1"]),
            ("chmod 700 d9", ["e workspace", "p workspace/d9"]),
            (": > /tmp/t", ["p tmp", "f tmp/t"]),
            ("exec 3<>d7/f8; read line <&3", unwritten),
            ("truncate -s 0 d7/f8", d7_f8),
            ("mv d20 d21", ["p workspace", "g workspace/d20", "d workspace/d21"]),
        ):
            told.clear()
            await sh(service, id, command)
            seen = [each for each in told.entries if not each.startswith("m workspace/d21/")]
            assert seen == entries, command
        assert told.parts == 1, "all of them were parts"


async def test_a_folder_that_was_moved_is_not_copied(folder: Path, told: Told) -> None:
    async with serving(folder) as service:
        some = f"{TREE}; head -c 2000000 /dev/urandom > d1/large; mkdir d1/in; echo 0 > d1/in/x"
        id = await stepping(service, f"{some}; sleep 0.05")
        told.clear()
        await sh(service, id, "echo 1 > d1/f1; mkdir n; mv d1 n/m; echo 2 > n/m/f2; rm n/m/f3")
        await sh(service, id, "mv n/m/in d2; mv n/m d1; rmdir n; echo 3 > d1/f4")
        steps = service.steps.list(id)
        if watches(folder):
            assert max(step.copied for step in steps[2:]) < 100, "nothing but what was written"
            assert "m workspace/n/m/large" in told.entries
            assert "f workspace/n/m/f1" in told.entries
        assert (steps[2].size, steps[3].size) == (steps[1].size - 8, steps[1].size - 10)  # type: ignore[operator]
        look = "cd n/m 2> /dev/null || cd d1; cat f1 f2 f4 $(ls -d in/x ../d2/in/x 2> /dev/null)"
        look += "; test ! -e f3; stat -c %s large"
        await check(service, id, 2, look, "1\n2\n1 4\n0\n2000000\n")
        await check(service, id, 3, look, "1\n2\n3\n0\n2000000\n")


async def test_a_step_has_what_a_program_writes_through_a_mapping(folder: Path) -> None:
    """The pages are the program's to write to since an earlier step."""
    await follows(folder, MAPPED)


async def test_a_step_has_what_a_program_writes_to_a_file_that_it_keeps_open(folder: Path) -> None:
    await follows(folder, OPEN)


async def until_it_reads(service: Service, id: str, text: str) -> None:
    async def reads() -> bool:
        return await sh(service, id, "head -n 1 mapped") == text

    await eventually(reads, what=f"the file begins with {text}")


@pytest.mark.parametrize("program", [MAPPED, OPEN], ids=["mapped", "open"])
async def test_a_step_has_what_is_written_to_a_file_under_a_name_that_is_gone(
    folder: Path, program: str
) -> None:
    """As a log is rotated by links: nothing is heard of what comes after that."""
    if program is MAPPED and not watches(folder):
        pytest.skip("in containers writes through a mapping do not always show")
    await follows(folder, program, then="ln mapped other; rm mapped; mv other mapped")


async def follows(folder: Path, program: str, *, then: str = "true") -> None:
    async with serving(folder) as service:
        start = f"{TREE}; head -c 300000 /dev/zero > mapped; sleep 0.05"
        id = await stepping(service, start, template="python")
        writer = ExecCall(("python3", "-uc", program))
        seen: dict[int, str] = {}
        async with await service.start(id, writer, stdin_open=True) as running:
            for word in ("one", "two", "three"):
                await service.send_input(id, running.exec_id, f"{word}\n".encode())
                await until_it_reads(service, id, f"{word}\n")
                seen[service.steps.list(id)[-1].number] = f"{word}\n"
                await sh(service, id, then)
                then = "true"
            await service.kill(id, running.exec_id)
        for number, text in seen.items():
            await check(service, id, number, "head -n 1 mapped", text)


async def test_a_file_with_further_names_is_told_under_all_of_them(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(
            service,
            f"{TREE}; ln d1/f1 d2/other; sleep 0.05",
            "true",
            "echo again > d1/f1; rm d1/f1",  # heard of where it is no more
            "ln d3/f3 d4/more",
            "true",
            "echo third >> d4/more",
        )
        await check(service, id, 3, "cat d2/other; test ! -e d1/f1", "again\n")
        same = "test d3/f3 -ef d4/more && cat d3/f3"
        await check(service, id, 6, same, "3 3\nthird\n")
        await check(service, id, 5, same, "3 3\n")


async def test_more_events_than_the_kernel_keeps(folder: Path, told: Told) -> None:
    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; sleep 0.05")
        told.clear()
        await sh(service, id, "for i in $(seq 9000); do echo $i >> d1/f1; echo $i >> d2/f2; done")
        assert told.parts == 0, "some were lost: everything was looked at"
        await sh(service, id, "echo last > d3/f3")
        assert told.parts == watches(folder), "and then no longer"
        text = "tail -n 1 d1/f1 d2/f2 d3/f3 -q"
        await check(service, id, 2, text, "9000\n9000\n3 3\n")
        await check(service, id, 3, text, "9000\n9000\nlast\n")


async def test_a_save_that_was_cut_off_is_made_up_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; sleep 0.05")
        real = Parser.end

        def fail(self: Parser) -> None:
            raise CapsuleError("no space, say")

        monkeypatch.setattr(Parser, "end", fail)
        await sh(service, id, "echo lost > d1/f1; sleep 0.05")
        monkeypatch.setattr(Parser, "end", real)
        assert len(service.steps.list(id)) == 2, "that step is missing"
        await sh(service, id, "echo other > d2/f2")
        await check(service, id, 2, "cat d1/f1 d2/f2", "lost\nother\n")


async def test_a_snapshot_in_between_takes_nothing_from_the_next_step(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; sleep 0.05")
        await service.files(id).write("/workspace/d1/f1", b"by the file API\n")
        await service.snapshots.make(id, "between", {})
        await sh(service, id, "sleep 0.05")
        await check(service, id, 2, "cat d1/f1", "by the file API\n")


async def test_over_layers_a_folder_that_is_copied_up_is_heard_of(folder: Path, told: Told) -> None:
    async with serving(folder) as service:
        id = await stepping(service, f"{TREE}; mkdir -p deep/er/est; echo 1 > deep/er/est/x")
        await service.steps.undo(id, 1)  # the box lies over the layers of that
        for command in (
            "sleep 0.05",
            "echo 2 > deep/er/est/x",
            "echo 3 > deep/er/y; rm d1/f1; chmod 600 d2/f2",
            "rm -r deep/er/est; mkdir deep/er/est; echo 4 > deep/er/est/z",
            "echo 5 >> deep/er/est/z; echo 5 >> d2/f2; echo tmp > /tmp/x; echo root > /root/x || :",
            "mv deep/er/est/z d1/f1",
        ):
            await sh(service, id, f"{command}; sleep 0.02")
        assert told.parts == 4 * watches(folder), "each is a part, once there is a layer"
        look = (
            "cd deep; find . -type f | sort | xargs tail -n 1 -q; cd ..; cat d1/f1; tail -n 1 d2/f2"
        )
        await check(service, id, 3, look, "2\n1 1\n2 2\n")
        await check(service, id, 4, f"rm -f d1/f1; echo gone > d1/f1; {look}", "2\n3\ngone\n2 2\n")
        await check(service, id, 5, f"test ! -e d1/f1; echo > d1/f1; {look}", "4\n3\n\n2 2\n")
        await check(service, id, 6, f"echo > d1/f1; {look}; cat /tmp/x", "5\n3\n\n5\ntmp\n")
        await check(service, id, 7, look, "3\n4\n5\n5\n")
        assert await changes(service, id, 6, 7) == [
            "added /workspace/d1/f1",
            "removed /workspace/deep/er/est/z",
        ]


async def test_more_folders_than_the_kernel_watches(folder: Path, told: Told) -> None:
    async with serving(folder) as service:
        many = "seq -f d%g 17000 | xargs mkdir; sleep 0.05"
        id = await stepping(service, many, "echo 1 > d1/x; sleep 0.05", "echo 2 > d2/x")
        assert told.parts == 0
        await check(service, id, 2, "cat d*/x", "1\n")
        await check(service, id, 3, "cat d*/x", "1\n2\n")


async def test_a_volume_in_the_workspace_is_no_part_of_a_step(folder: Path) -> None:
    async with serving(folder) as service:
        await service.volumes.create("data")
        mounts = (VolumeWish("data", "/workspace/data"),)
        id = await stepping(service, f"{TREE}; echo 1 > data/x; sleep 0.05", volumes=mounts)
        for command in ("echo 2 > data/x", "echo 3 > d1/f1"):
            await sh(service, id, command)
        assert await changes(service, id, 1, 2) == []
        assert await changes(service, id, 2, 3) == ["modified /workspace/d1/f1"]
        await service.delete(id)
        await service.volumes.delete("data")


async def test_a_volume_over_layers_is_no_part_of_a_step(folder: Path) -> None:
    """Its place is in the upper folder, where programs see the volume."""
    async with serving(folder) as service:
        await service.snapshots.make(await make(service, TREE), "plain", {})
        await service.volumes.create("data")
        mounts = (VolumeWish("data", "/workspace/data"),)
        request = CreateRequest(snapshot="plain", checkpoint="each", volumes=mounts)
        id = (await service.create(request)).id
        for command in (
            "echo 1 > d1/f1; sleep 0.05",
            "echo 2 > data/y",
            "rm data/y; echo 3 > d2/f2",
        ):
            await sh(service, id, command)
        steps = service.steps.list(id)
        assert steps[2].layers == steps[1].layers, "nothing changed, but in the volume"
        assert await changes(service, id, 2, 3) == ["modified /workspace/d2/f2"]
        await service.delete(id)
        await service.volumes.delete("data")


async def test_a_step_has_the_size_of_what_there_is(folder: Path) -> None:
    """Whether it is told as a part, or every file is looked at; holes are nothing."""
    async with serving(folder) as service:
        id = await stepping(
            service,
            "head -c 500000 /dev/zero | tr '\\0' . > big; truncate -s 200M sparse; sleep 0.05",
            "echo 1 > small; sleep 0.05",
            "truncate -s 300M sparse; sleep 0.05",
            "mkdir d; mv sparse big d; sleep 0.05",
            "ln small other; sleep 0.05",  # every file is looked at
            "rm -r d",
        )
        sizes = [step.size for step in service.steps.list(id)[1:]]
        assert sizes == [500_000, 500_002, 500_002, 500_002, 500_002, 2]


async def test_more_paths_than_are_noted(folder: Path, told: Told) -> None:
    """The worker is not in the box's cgroup: names of files, of which there may be any number, are
    not to fill the machine's memory."""
    many = """
import os
os.mkdir("x")
for i in range(14):
    os.chdir(max(os.listdir(".")))
    os.mkdir("n" * 250)
os.chdir("n" * 250)
open("file", "w").write("1")
for i in range(5000):
    os.link("file", f"{i:0200}")
"""
    async with serving(folder) as service:
        id = await stepping(service, f"python3 -c '{many}'; sleep 0.05", template="python")
        for command in ("echo 1 > a; sleep 0.05", "echo 2 > b"):
            await sh(service, id, command)
        assert told.parts == 0
        await check(service, id, 3, "cat a b; find . -links 5001 | wc -l", "1\n2\n5001\n")


def at_most_one_watches(service: Service) -> None:
    provider = service._parts.providers["local"]
    assert isinstance(provider, LocalProvider)
    provider._ready().watchers.most = 1


async def test_boxes_of_one_user_leave_him_half_of_what_watching_takes(
    folder: Path, told: Told
) -> None:
    async with serving(folder) as service:
        if not watches(folder):
            pytest.skip("agents in containers look at every file")
        at_most_one_watches(service)
        first = await stepping(service, f"{TREE}; sleep 0.05")
        second = await stepping(service, f"{TREE}; sleep 0.05")
        told.clear()
        await sh(service, second, "echo new > d1/f1")
        assert told.parts == 0, "it looked at everything"
        await check(service, second, 2, "cat d1/f1 d2/f2", "new\n2 2\n")
        await sh(service, first, "echo new > d1/f1")
        assert told.parts == 1
        await service.delete(first)
        third = await stepping(service, f"{TREE}; sleep 0.05", "echo new > d1/f1")
        assert told.parts == 2, "the place is free again"
        await check(service, third, 2, "cat d1/f1", "new\n")


async def test_boxes_that_watch_are_counted_by_the_next_server(folder: Path, told: Told) -> None:
    async with serving(folder, drain="keep") as service:
        if not watches(folder):
            pytest.skip("agents in containers look at every file")
        at_most_one_watches(service)
        first = await stepping(service, f"{TREE}; sleep 0.05", "echo new > d1/f1")
        second = await stepping(service, f"{TREE}; sleep 0.05")
        assert told.parts == 1
    async with serving(folder) as service:
        at_most_one_watches(service)
        for command in ("echo newer > d1/f1; sleep 0.05", "echo newest > d1/f1"):
            told.clear()
            await sh(service, second, command)
            assert told.parts == 0, "it looked at everything: the first watches, and goes on"
        await sh(service, first, "echo newer > d1/f1; sleep 0.05")
        told.clear()
        await sh(service, first, "echo newest > d1/f1")
        assert told.parts == 1
        await service.delete(first)
        for command in ("echo 1 > d1/f1; sleep 0.05", "echo 2 > d1/f1"):
            await sh(service, second, command)
        assert told.parts == 2, "the place is free again"


def test_half_of_the_hosts_limit_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "INSTANCES", tmp_path / "instances")
    assert half_of_a_users() == 64
    (tmp_path / "instances").write_text("1024\n")
    assert half_of_a_users() == 512
