"""Restore points of real boxes: what a step costs, what differs, and going back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule.errors import NotFoundError
from capsule.service import ContextRun, CreateRequest, ExecCall, RunCall, Service
from capsule.service import steps as steps_module
from tests.support import eventually
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
        # What is written within a tick of the clock before a step counts for the next, too, and
        # after two steps within a tick all files are copied.
        tick = "sleep 0.05"
        commands = (f"{big}; {tick}", f"echo new > small; {tick}", tick, "echo x >> f7")
        id = await stepping(service, *commands)
        steps = service.steps.list(id)
        assert steps[1].copied > 5_000_000
        assert [step.copied for step in steps[2:]] == [4, 0, 4]
        assert steps[3].layers == steps[2].layers, "nothing changed: the same layer"
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
        assert max(len(step.layers) for step in steps) == 5
        assert [step.copied for step in steps[2:]] == [2 * len(f"{n}\n") for n in range(1, 13)]
        for number in (13, 9, 6, 2):
            (other,) = await service.fork(id, 1, at=number)
            seen = await sh(service, other.id, "cat d/e/n; ls d | wc -l; ls d | sort | head -n 3")
            n = number - 1
            assert seen.split()[:2] == [f"{n}", "51"] and f"f{n}" not in seen.split()
            await service.delete(other.id)


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


async def test_what_ends_at_once_leaves_one_step_each(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service)
        await asyncio.gather(*(sh(service, id, f"echo {n} > f{n}") for n in range(6)))
        assert [step.number for step in service.steps.list(id)] == list(range(7))
        await service.steps.undo(id, 6)
        assert len((await sh(service, id, "ls")).split()) == 6
        with pytest.raises(NotFoundError, match="no step 9"):
            await service.steps.undo(id, 9)


async def test_steps_outlive_the_server_and_go_with_the_sandbox(folder: Path) -> None:
    async with serving(folder, drain="keep") as service:
        id = await stepping(service, "echo 1 > n", "echo 2 > n")
    async with serving(folder) as service:
        await sh(service, id, "echo 3 > n")
        await sh(service, id, "echo 4 > n")
        assert [step.number for step in service.steps.list(id)] == [0, 1, 2, 3, 4]
        await service.steps.undo(id, 3)
        assert await sh(service, id, "cat n") == "3\n"
        await service.steps.undo(id, 2)
        assert await sh(service, id, "cat n") == "2\n"
        await service.delete(id)
        await eventually(lambda: layers(folder) == [], what="its layers to go")


def layers_of(service: Service, *ids: str) -> set[str]:
    """The layers that these sandboxes and their steps lie on."""
    entries = [service._sandboxes.find(id) for id in ids]
    stacks = [s for entry in entries for s in (entry.layers, *(t.layers for t in entry.steps))]
    return {layer.id for stack in stacks for layer in stack}


async def test_what_only_a_deleted_sandbox_had_goes_with_it(folder: Path) -> None:
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > n" for n in range(1, 6)))
        (branch,) = await service.fork(id, 1, at=2)
        kept = await service.snapshots.make(id, "kept", {})
        own, shared = layers_of(service, id), layers_of(service, branch.id)
        assert len(own) == 5 and shared & own
        await service.delete(id)
        left = shared | {layer.id for layer in kept.layers}
        assert own - left, "or nothing is seen"
        await eventually(lambda: set(layers(folder)) == left, what="its layers to go")
        again = await restore(service, "kept")
        assert await sh(service, again, "cat n") == "5\n"
        await sh(service, branch.id, "echo 2b >> n")
        await service.delete(branch.id)
        left = {layer.id for layer in kept.layers}
        await eventually(lambda: set(layers(folder)) == left, what="the branch's to go")
        await service.snapshots.delete("kept")
        assert await sh(service, again, "cat n") == "5\n", "it still has them"
        await service.delete(again)
        await eventually(lambda: layers(folder) == [], what="the last to go")
