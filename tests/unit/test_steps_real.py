"""Restore points of real boxes: what a step costs, what differs, and going back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.errors import InvalidError, NotFoundError
from capsule.model import Step
from capsule.providers.local.layer_folder import LayerFolder
from capsule.service import ContextRun, CreateRequest, ExecCall, RunCall, Service
from capsule.service import steps as steps_module
from tests.support import backends, eventually
from tests.support.backends import layers
from tests.unit.test_service_real import boxes, folder, serving
from tests.unit.test_snapshots_real import make, restore, sh

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]
__all__ = ["folder"]


async def stepping(
    service: Service, *commands: str, template: str = "bash", **options: object
) -> str:
    request = CreateRequest(template, checkpoint="each", **options)  # type: ignore[arg-type]
    id: str = (await service.create(request)).id
    for command in commands:
        await sh(service, id, command)
    return id


async def changes(service: Service, id: str, old: int, new: int | None = None) -> list[str]:
    found = await service.steps.diff(id, old, new)
    return sorted(f"{each.change} {each.path.decode()}" for each in found)


async def test_each_exec_leaves_a_step_and_undo_goes_back(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "echo 1 > a", "echo 2 > a; mkdir d; touch d/x", "rm -r d a")
        steps = service.steps.list(id)
        assert [step.number for step in steps] == [0, 1, 2, 3]
        assert all(step.exec_id and "sh -c" in step.cmd for step in steps[1:])
        assert await changes(service, id, 0, 1) == ["added /workspace/a"]  # not /workspace, /tmp …
        assert await changes(service, id, 1, 0) == ["removed /workspace/a"]
        await service.steps.undo(id, 2)
        assert await sh(service, id, "cat a; ls d") == "2\nx\n"
        assert [step.number for step in service.steps.list(id)] == [0, 1, 2, 3]
        await service.steps.undo(id, 1)
        assert await sh(service, id, "ls; cat a") == "a\n1\n"
        await service.steps.undo(id, 0)
        assert await sh(service, id, "ls") == ""
        own = service._sandboxes.find(id).box_id
        await eventually(lambda: boxes(folder) == [own], what="the other boxes to go")


async def test_a_step_copies_what_changed_and_not_what_there_is(folder: Path) -> None:
    async with serving(folder) as service:
        big = "head -c 5000000 /dev/urandom > big; for i in $(seq 200); do echo $i > f$i; done"
        # What is written within a tick of the clock before a step counts for the next, too.
        tick = "sleep 0.05"
        commands = (f"{big}; {tick}", f"echo new > small; {tick}", "true", "echo x >> f7")
        id = await stepping(service, *commands)
        steps = service.steps.list(id)
        assert steps[1].copied > 5_000_000
        assert [step.copied for step in steps[2:]] == [4, 0, 4]
        assert steps[3].layers == steps[2].layers, "nothing changed: the same layer"
        assert [len(step.layers) for step in steps[1:]] == [1, 2, 2, 3], "each on those before"
        sizes = [step.size or 0 for step in steps[1:]]
        assert [size - sizes[0] for size in sizes] == [0, 4, 4, 6]
        kept = folder / "d" / backends.of(folder).layers
        tops = [kept / each.id / "workspace" for each in steps[4].layers[:2]]
        assert [await asyncio.to_thread(os.listdir, top) for top in tops] == [["f7"], ["small"]]
        await service.steps.undo(id, 1)
        assert await sh(service, id, "cat f7; stat -c %s big; ls small || true") == "7\n5000000\n"


async def test_of_many_steps_the_upper_layers_are_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "MAX_DEPTH", 4)
    async with serving(folder) as service:
        many = "mkdir -p d/e; for i in $(seq 50); do echo $i > d/f$i; done; sleep 0.05"
        changes = [f"echo {n} > d/e/n; rm d/f{n}; echo {n} > d/new{n}" for n in range(1, 13)]
        id = await stepping(service, many, *(f"{each}; sleep 0.05" for each in changes))
        steps = service.steps.list(id)
        depths = [len(step.layers) for step in steps]
        assert max(depths) == 5 and depths[-3:] != [1, 2, 3], "not all files again"
        assert {step.layers[-1] for step in steps[1:]} == {steps[1].layers[0]}
        assert [step.copied for step in steps[2:]] == [2 * len(f"{n}\n") for n in range(1, 13)]
        for number in (13, 9, 6, 2):
            (other,) = await service.fork(id, 1, at=number)
            seen = await sh(service, other.id, "cat d/e/n; ls d | wc -l; ls d | sort | head -n 3")
            n = number - 1
            assert seen.split()[:2] == [f"{n}", "51"] and f"f{n}" not in seen.split()
            await service.delete(other.id)
        await service.steps.undo(id, 11)
        assert await sh(service, id, "cat d/e/n; ls d/f*") == await sh(
            service, id, "echo 10; for i in $(seq 11 50); do echo d/f$i; done | sort"
        )


async def test_an_exec_that_changed_nothing_has_nothing_written_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "touch f g h; sleep 0.05", "sleep 0.05")
        monkeypatch.setattr(LayerFolder, "unchanged", lambda self, path: pytest.fail("written"))
        await sh(service, id, "cat f")
        steps = service.steps.list(id)
        assert [step.number for step in steps] == [0, 1, 2, 3]
        assert steps[3].layers == steps[2].layers


@pytest.mark.parametrize("pause", ["sleep 0.05", "true"])
async def test_files_in_renamed_folders_are_those_that_are_there(folder: Path, pause: str) -> None:
    """Their own times do not tell that the folder they are in is another one now."""
    made = "mkdir -p a/in/deep b/in/deep; for d in a b; do echo $d | tee $d/x > $d/in/deep/x; done"
    async with serving(folder) as service:
        id = await stepping(
            service,
            f"{made}; {pause}",
            f"mv a t; mv b a; mv t b; {pause}",
            f"mv a/in c; mv b/in a; mv c b; mv b/c b/in; {pause}",
            f"mkdir up; mv a up/a; mv up a; {pause}",
            f"ln b/x b/y; rm b/x; mv b/y b/x; {pause}",
        )
        seen = ["a b a b", "b a b a", "b a a b", "a b", "a b"]
        places = ["a/x b/x a/in/deep/x b/in/deep/x"] * 3 + ["b/x b/in/deep/x"] * 2
        for number, (want, names) in reversed([*enumerate(zip(seen, places, strict=True), 1)]):
            await service.steps.undo(id, number)
            assert await sh(service, id, f"cat {names}") == "\n".join([*want.split(), ""]), number
        await service.steps.undo(id, 1)
        await sh(service, id, f"mkdir n; {pause}")  # over layers from here on
        await sh(service, id, f"echo 1 > n/x; mkdir m; echo 2 > m/x; {pause}")
        await sh(service, id, f"mv n t; mv m n; mv t m; {pause}")
        await sh(service, id, "rm -r n m")
        await service.steps.undo(id, 4)
        assert await sh(service, id, "cat n/x m/x a/in/deep/x") == "2\n1\na\n"


async def test_a_diff_lists_what_changed_between_two_steps(folder: Path) -> None:
    async with serving(folder) as service:
        base = await make(service, "mkdir old gone; echo 1 > old/f; echo 2 > old/g; touch gone/x")
        await service.snapshots.make(base, "base", {})
        id = await restore(service, "base", checkpoint="each")
        await sh(service, id, "echo new > old/f; mkdir made; ln -s x made/l; rm -r gone")
        await sh(service, id, "rm old/g; touch /tmp/t")
        await sh(service, id, "rm -r old; mkdir old; touch old/h")
        await sh(service, id, "true")
        assert await changes(service, id, 0, 1) == [
            "added /workspace/made",
            "added /workspace/made/l",
            "modified /workspace/old/f",
            "removed /workspace/gone",
            "removed /workspace/gone/x",
        ]
        assert await changes(service, id, 1, 2) == ["added /tmp/t", "removed /workspace/old/g"]
        assert await changes(service, id, 2, 3) == [
            "added /workspace/old/h",
            "removed /workspace/old/f",
        ]
        assert await changes(service, id, 3) == []
        assert await changes(service, id, 2, 1) == ["added /workspace/old/g", "removed /tmp/t"]


async def test_a_fork_in_the_middle(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "echo 1 > n", "echo 2 > n", "echo 3 > n")
        one, two = await service.fork(id, 2, at=1)
        assert await sh(service, one.id, "cat n; echo mine > n") == "1\n"
        assert await sh(service, two.id, "cat n") == "1\n"
        assert await sh(service, id, "cat n") == "3\n"
        assert one.checkpoint == "each" and len(service.steps.list(one.id)) == 2


async def test_streamed_and_failed_execs_leave_steps_while_programs_run_on(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(
            service, "(while :; do date > now; sleep 0.01; done) > /dev/null 2>&1 &"
        )
        async with await service.start(id, ExecCall(("sh", "-c", "echo s > streamed"))) as live:
            async for _ in live:
                pass
        await service.exec(id, ExecCall(("sh", "-c", "echo f > failed; exit 3")))
        await service.run(id, RunCall("echo code > ran", language="bash"))
        await eventually(lambda: len(service.steps.list(id)) == 5, what="all steps")
        await service.steps.undo(id, 3)
        assert await sh(service, id, "ls | grep -v now") == "failed\nstreamed\n"


async def test_runs_in_contexts_leave_steps(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "echo 1 > a; sleep 0.05", template="python")  # a tick before
        code = "import os\nopen('b', 'w').write('2')"
        await service.contexts.run(id, ContextRun(code))
        assert [step.number for step in service.steps.list(id)] == [0, 1, 2]
        last = service.steps.list(id)[-1]
        assert last.cmd == f"python {code}" and last.copied == 1
        await service.contexts.run(id, ContextRun("os.remove('a'); 1 / 0"))
        died = await service.contexts.run(id, ContextRun("open('c', 'w'); os._exit(3)"))
        assert died.end.status == "died"
        assert await changes(service, id, 1, 2) == ["added /workspace/b"]
        assert await changes(service, id, 2, 3) == ["removed /workspace/a"]
        assert await changes(service, id, 3, 4) == ["added /workspace/c"]
        await service.steps.undo(id, 2)
        assert await sh(service, id, "cat a b; ls") == "1\n2a\nb\n"
        again = await service.contexts.run(id, ContextRun("print(open('b').read())"))
        assert again.stdout == b"2\n"


async def test_what_ends_at_once_leaves_one_step_each(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service)
        await asyncio.gather(*(sh(service, id, f"echo {n} > f{n}") for n in range(6)))
        assert [step.number for step in service.steps.list(id)] == list(range(7))
        await service.steps.undo(id, 6)
        assert len((await sh(service, id, "ls")).split()) == 6


async def test_steps_outlive_the_server_and_go_with_the_sandbox(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        id = await stepping(service, "echo 1 > n", "echo 2 > n")
    async with serving(folder) as service:
        await sh(service, id, "echo 3 > n; head -c 100000 /dev/zero > z; sleep 0.05")
        steps = service.steps.list(id)
        assert [step.number for step in steps] == [0, 1, 2, 3] and steps[3].copied < 200_000
        await sh(service, id, "echo 4 > n")
        assert service.steps.list(id)[-1].copied < 10, "what it has told itself it knows"
        await service.steps.undo(id, 3)
        assert await sh(service, id, "cat n") == "3\n"
        await service.steps.undo(id, 2)
        assert await sh(service, id, "cat n") == "2\n"
        await service.delete(id)
        await eventually(lambda: layers(folder) == [], what="its layers to go")


def used(service: Service, *ids: str) -> set[str]:
    """The layers of these sandboxes."""
    entries = [service._sandboxes.find(id) for id in ids]
    return set().union(*map(service.snapshots._layers_of, entries))


async def test_what_only_a_deleted_sandbox_had_goes_with_it(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > n" for n in range(1, 6)))
        (branch,) = await service.fork(id, 1, at=2)
        kept = await service.snapshots.make(id, "kept", {})
        own, shared = used(service, id), used(service, branch.id)
        assert len(own) == 5 and shared & own
        await service.delete(id)
        left = shared | {layer.id for layer in kept.layers}
        assert own - left, "or nothing is seen"
        await eventually(lambda: set(layers(folder)) == left, what="its layers to go")
        again = await restore(service, "kept")
        assert await sh(service, again, "cat n") == "5\n"
        await sh(service, branch.id, "echo 2b >> n")
        await service.steps.undo(branch.id, 1)
        assert await sh(service, branch.id, "cat n") == "2\n2b\n"
        await service.delete(branch.id)
        left = {layer.id for layer in kept.layers}
        await eventually(lambda: set(layers(folder)) == left, what="the branch's to go")
        await service.snapshots.delete("kept")
        assert await sh(service, again, "cat n") == "5\n", "it still has them"
        await service.delete(again)
        await eventually(lambda: layers(folder) == [], what="the last to go")


async def test_a_box_has_its_layers_until_it_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "echo 1 > n", "echo 2 > n")
        await service.steps.undo(id, 2)
        entry = service._sandboxes.find(id)
        began = {layer.id for layer in entry.layers}
        box, going = entry.box, asyncio.Event()
        assert box is not None and began
        destroy = box.destroy

        async def halt() -> None:
            """As if it had ended, which it does later."""

        async def slowly() -> None:
            await going.wait()
            await destroy()

        monkeypatch.setattr(box, "halt", halt, raising=False)
        monkeypatch.setattr(box, "destroy", slowly)
        await service.steps.undo(id, 0)
        assert await sh(service, id, "ls") == ""
        assert began <= set(layers(folder))
        going.set()
        await eventually(lambda: not began & set(layers(folder)), what="its layers to go, too")


async def test_many_sandboxes_with_common_layers_end_at_once(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, *(f"mkdir -p d{n}/e; touch d{n}/e/f" for n in range(8)))
        branches = [branch.id for branch in await service.fork(id, 6, at=8)]
        await asyncio.gather(*(sh(service, each, "touch own") for each in branches))
        last = branches.pop()
        ends = (service.delete(each) for each in (id, *branches))
        await asyncio.gather(*ends, service.snapshots.sweep(), service.snapshots.sweep())
        left = used(service, last)
        await eventually(lambda: set(layers(folder)) == left, what="their layers to go")
        assert await sh(service, last, "find . -name f | wc -l; ls own") == "8\nown\n"


async def test_without_checkpoint_there_are_none(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        with pytest.raises(InvalidError, match="keeps no steps"):
            service.steps.list(id)
        other = await stepping(service, "true")
        with pytest.raises(NotFoundError, match="no step 9"):
            await service.steps.undo(other, 9)
        await service._sandboxes.delete(other)


async def test_a_reset_goes_back_to_the_beginning(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, "echo 1 > n", "echo 2 > n")
        await service.steps.undo(id, 1)
        await service.reset(id)
        assert await sh(service, id, "ls") == ""
        assert len(service.steps.list(id)) == 2


class Walked(tuple[Step, ...]):
    """Counts how often somebody looks at each of these steps."""

    walks = 0

    def __iter__(self) -> Iterator[Step]:
        Walked.walks += 1
        return super().__iter__()


async def test_the_steps_of_a_sandbox_cost_others_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few thousand layers a sweep held the server up for seconds: for each of them it looked
    at every step of everybody."""
    async with serving(folder) as service:
        many = await stepping(service, *(f"echo {n} > a" for n in range(20)))
        entry = service._sandboxes.find(many)
        entry.steps = Walked(entry.steps)
        monkeypatch.setattr(Walked, "walks", 0)
        await stepping(service, *(f"echo {n} > a" for n in range(5)))
        await service.snapshots.sweep()
        assert Walked.walks <= 1
        assert len(layers(folder)) >= 25, "and all of them are there"
