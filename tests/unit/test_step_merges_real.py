"""Stacks of steps that became too deep: their upper layers are merged, and nobody notices."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from capsule.providers.contract import Saved
from capsule.providers.local import layer_merge
from capsule.providers.local import layers as layers_module
from capsule.providers.local.layers import Layers
from capsule.service import Service
from capsule.service import steps as steps_module
from tests.support import eventually
from tests.support.backends import layers
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import make, restore, sh
from tests.unit.test_step_trees_real import PAUSE, SEEDS, TURNS, Trees
from tests.unit.test_steps_real import changes, stepping

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]
__all__ = ["folder"]


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_DEPTH", 3)
    monkeypatch.setattr(steps_module, "LEAST_OWN", 3)


def merges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that are made of others from now on."""
    made: list[str] = []
    real = Layers.merge

    async def noted(self: Layers, id: str, stack: Sequence[str], *, count: int) -> Saved:
        saved = await real(self, id, stack, count=count)
        made.append(id)
        return saved

    monkeypatch.setattr(Layers, "merge", noted)
    return made


def slow_merges(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Set when one has begun; to be set for it to go on."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*stacks: object) -> None:
        begun.set()
        go_on.wait(10)
        layer_merge.merge(*stacks)  # type: ignore[arg-type]

    monkeypatch.setattr(layers_module, "merge", slow)
    return begun, go_on


def used(service: Service, *ids: str) -> list[str]:
    """The layers that records have."""
    entries = [service._sandboxes.find(id) for id in ids]
    stacks = [s for entry in entries for s in (entry.layers, *(t.layers for t in entry.steps))]
    return sorted({layer.id for stack in stacks for layer in stack})


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_step_shows_the_tree_that_was_there(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service)
        trees = Trees(service, id, seed)
        pick = random.Random(seed)
        for _ in range(3):
            for _ in range(14):
                await trees.change()
            for number in trees.seen:
                await trees.check(number)
            assert max(len(step.layers) for step in service.steps.list(id)) <= 3 + 3 + 1
            await trees.undo(pick.choice([*trees.seen][-8:]))
        assert len(made) > 3
        assert layers(folder) == used(service, id), "and nothing is left of what was tried"


async def test_what_takes_the_place_of_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service)
        trees = Trees(service, id, 0)
        for turn in TURNS:
            await trees.do(turn)
        await trees.undo(1)
        for turn in TURNS[1:]:  # over a layer
            await trees.do(turn)
        for number in trees.seen:
            await trees.check(number)
        assert made


async def test_neither_the_first_layer_nor_those_below_the_sandbox_are_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = merges(monkeypatch)
    async with serving(folder) as service:
        base = await make(service, "mkdir d; for i in $(seq 30); do echo $i > d/b$i; done")
        snapshot = await service.snapshots.make(base, "base", {})
        id = await restore(service, "base", checkpoint="each")
        await sh(service, id, f"for i in $(seq 90); do echo $i > d/f$i; done; {PAUSE}")
        for n in range(12):
            await sh(service, id, f"echo {n} > d/f{n}; rm d/b{n + 1}; {PAUSE}")
        steps = service.steps.list(id)
        first = steps[1].layers
        assert first[1:] == snapshot.layers
        assert all(step.layers[-2:] == first for step in steps[1:])
        assert len(made) > 2 and max(len(step.layers) for step in steps) == 5
        assert await changes(service, id, 1) == sorted(
            [f"removed /workspace/d/b{n + 1}" for n in range(12)]
            + [f"modified /workspace/d/f{n}" for n in range(1, 12)]
            + ["added /workspace/d/f0"]
        )
        await service.steps.undo(id, 13)
        assert await sh(service, id, "ls d | wc -l; cat d/f11 d/f90") == "109\n11\n90\n"


async def test_an_exec_that_changed_nothing_keeps_what_was_merged_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > f{n}; {PAUSE}" for n in range(4)))
        deep = service.steps.list(id)[-1]
        assert len(deep.layers) == 4 and not made
        for _ in range(2):
            await sh(service, id, "cat f0")
            last = service.steps.list(id)[-1]
            assert made == [last.layers[0].id] and len(last.layers) < 4
            assert (last.copied, last.size) == (0, deep.size)
        await sh(service, id, "echo more > f0")
        last = service.steps.list(id)[-1]
        assert (last.layers[1].id, last.copied) == (made[0], 5), "its folders are known"
        assert await changes(service, id, 4, 6) == []


async def test_steps_after_a_restart_and_nothing_left_in_the_end(folder: Path) -> None:
    commands = [f"echo {n} > f{n}; rm -f f{n - 3}; {PAUSE}" for n in range(9)]
    async with serving(folder, drain="keep") as service:
        id = await stepping(service, *commands)
    for name in (".half", "made"):  # of a server that was killed while it merged, or just then
        (folder / "d" / "layers" / name / "workspace").mkdir(parents=True)
    async with serving(folder) as service:
        assert layers(folder) == used(service, id)
        await sh(service, id, f"echo after > g; {PAUSE}")
        assert len(service.steps.list(id)[-1].layers) == 1, "which folders there were is forgotten"
        for n in range(9, 14):
            await sh(service, id, f"echo {n} > f{n}; {PAUSE}")
        for number in (15, 11, 8, 5):
            await service.steps.undo(id, number)
            latest = number - 2 if number > 10 else number - 1
            assert f"f{latest}" in (await sh(service, id, "ls")).split()
        await service.delete(id)
        await eventually(lambda: layers(folder) == [], what="its layers to go")


async def test_what_cannot_be_merged_costs_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*stacks: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layers_module, "merge", full)
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > f{n}; {PAUSE}" for n in range(6)))
        assert [len(step.layers) for step in service.steps.list(id)] == [0, 1, 2, 3, 4, 1, 2]
        assert layers(folder) == used(service, id)
        await service.steps.undo(id, 5)
        assert await sh(service, id, "cat f*") == "0\n1\n2\n3\n4\n"


async def test_what_is_merged_while_the_sandbox_goes_is_gone_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = slow_merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > f{n}; {PAUSE}" for n in range(4)))
        task = asyncio.create_task(sh(service, id, "echo x > f0"))
        await eventually(begun.is_set, what="a merge")
        await service.snapshots.sweep()
        assert set(used(service, id)) <= set(layers(folder)), "they are in use"
        await service.delete(id)
        await service.snapshots.sweep()
        go_on.set()
        await asyncio.wait([task])
        await service.reaper.tidy()
        await eventually(lambda: layers(folder) == [], what="its layers to go")


async def test_an_undo_during_a_merge_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = slow_merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service, *(f"echo {n} > f{n}; {PAUSE}" for n in range(4)))
        task = asyncio.create_task(sh(service, id, "echo x > f9"))
        await eventually(begun.is_set, what="a merge")
        await service.steps.undo(id, 2)
        go_on.set()
        await task
        assert [step.number for step in service.steps.list(id)] == [0, 1, 2]
        await service.reaper.tidy()
        assert layers(folder) == used(service, id)
        assert await sh(service, id, "ls") == "f0\nf1\n"


async def test_boxes_that_begin_from_deep_steps_have_room_for_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often one begins where another was deep."""
    made = merges(monkeypatch)
    async with serving(folder) as service:
        id = await stepping(service, f"for i in $(seq 40); do echo $i > f$i; done; {PAUSE}")
        for turn in range(5):
            for n in range(8):
                await sh(service, id, f"echo {turn} > g{n}; rm -f f{5 * turn + n}; {PAUSE}")
            steps = service.steps.list(id)
            deepest = max(steps[-8:], key=lambda step: len(step.layers))
            assert 4 <= len(deepest.layers) <= 7
            seen = await sh(service, id, "true; ls | wc -l")
            if turn % 2:
                await service.steps.undo(id, steps[-1].number)
            else:
                (other,) = await service.fork(id, 1, at=steps[-1].number)
                await service.delete(id)
                id = other.id
            assert len(service._sandboxes.find(id).layers) <= 3
            assert await sh(service, id, "ls | wc -l") == seen
        await service.reaper.tidy()
        await eventually(lambda: layers(folder) == used(service, id), what="others' layers to go")
        assert made
        assert max(step.copied for step in service.steps.list(id)) < 200, "none has all files"
