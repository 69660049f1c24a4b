"""Steps: with `checkpoint: "each"` every exec and every run in a context leaves a restore point.

A step is a stack of layers: on those of the step before lies one with what changed since. When that
stack is deep, or what changed cannot be told so (a folder was moved, the server is another one),
its top layer is all that was written since the sandbox's box began; of what has not changed since
the step before it has the same files, under a further name, if it can. An exec that changed nothing
has the layers of the step before. Going back gives the sandbox another box, which begins from the
step's layers.

A step that cannot be kept (no space, too large) costs nobody the result of the exec: it is logged,
and missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from capsule.errors import CapsuleError, InvalidError, NotFoundError
from capsule.model import ExecId, Layer, Step
from capsule.providers.contract import FileChange, Mark
from capsule.service.entry import Entry
from capsule.service.reset import Resets, Target
from capsule.service.sandboxes import Parts, Sandboxes
from capsule.service.snapshots import Snapshots
from capsule.service.values import Sandbox

log = structlog.get_logger(__name__)

MAX_STEPS = 200  # kept; the oldest but the first is forgotten
MAX_CHANGES = 10_000
MAX_DEPTH = 16  # of a stack on which a step lies; over a deeper one it has all files of its box
_SHOWN = 200  # characters of a command


class Steps:
    def __init__(
        self, parts: Parts, sandboxes: Sandboxes, snapshots: Snapshots, resets: Resets
    ) -> None:
        self._clock = parts.clock
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._resets = resets

    def list(self, id: str) -> Sequence[Step]:
        """Raises InvalidError (it keeps none)."""
        return _steps(self._sandboxes.find(id))

    def find(self, entry: Entry, number: int) -> Step:
        found = [step for step in _steps(entry) if step.number == number]
        if not found:
            numbers = [step.number for step in entry.steps]
            raise NotFoundError(
                f"sandbox {entry.id} has no step {number}",
                hint=f"there are {len(numbers)}, from {numbers[0]} to {numbers[-1]}",
                sandbox_id=entry.id,
            )
        return found[0]

    async def mark(self, entry: Entry, exec_id: ExecId, argv: Sequence[str]) -> None:
        """After an exec, or a run in a context. Never raises what concerns the step alone."""
        if not entry.steps or entry.ending is not None:
            return
        try:
            async with entry.stepping:
                await self._mark(entry, exec_id, " ".join(argv)[:_SHOWN])
        except CapsuleError as error:
            log.warning("step not kept", sandbox=entry.id, exec=exec_id, reason=error.message)

    async def _mark(self, entry: Entry, exec_id: ExecId, cmd: str) -> None:
        last = entry.steps[-1]
        # Only of this box: another one's files have nothing to do with that layer.
        own = last.box_id == entry.box_id and last.at > 0
        most = min(MAX_DEPTH, self._snapshots.layered(entry.provider).max_layers - 2)
        since = _mark_of(last, entry.layers, most) if own else Mark()
        async with self._snapshots.saved(entry, since=since, on=last.layers) as (layers, saved):
            if entry.steps[-1] is not last:
                return  # it was undone meanwhile
            if own and not saved.changed:
                layers = last.layers
            size = last.size if layers is last.layers else saved.size + saved.below
            step = Step(
                number=last.number + 1,
                layers=layers,
                created=self._clock.now(),
                exec_id=exec_id,
                cmd=cmd,
                size=size,
                copied=saved.copied if layers is not last.layers else 0,
                box_id=entry.box_id,
                at=saved.at,
            )
            entry.steps = _bounded((*entry.steps, step))
            await self._sandboxes.note(entry)

    async def diff(self, id: str, old: int, new: int | None) -> Sequence[FileChange]:
        """What changed from one step to another (None: the last), by path."""
        entry = self._sandboxes.find(id)
        first = self.find(entry, old)
        second = self.find(entry, _steps(entry)[-1].number if new is None else new)
        provider = self._snapshots.layered(entry.provider)
        with self._snapshots.held(first.layers, second.layers):
            return await provider.diff(
                [layer.id for layer in first.layers],
                [layer.id for layer in second.layers],
                most=MAX_CHANGES,
            )

    async def undo(self, id: str, number: int) -> Sandbox:
        """Back to the files of a step; processes are gone, and so are later steps."""
        entry = self._sandboxes.find(id)
        step = self.find(entry, number)
        kept = tuple(each for each in entry.steps if each.number < number)
        fresh = replace(step, box_id="", at=0.0)
        with self._snapshots.held(step.layers):
            made = await self._resets.reset(id, Target(step.layers, (*kept, fresh)))
        await self._snapshots.sweep()
        return made


def _mark_of(step: Step, begun_from: tuple[Layer, ...], most: int) -> Mark:
    """What of its layers the box itself has told."""
    layers = step.layers
    over = bool(begun_from) and layers[-len(begun_from) :] == begun_from
    told = layers[: -len(begun_from)] if over else layers
    ids = tuple(layer.id for layer in told)
    size = step.size if step.size is not None else sum(layer.size for layer in layers[:1])
    return Mark(ids, step.at, size=size, over=over, delta=len(layers) <= most)


def _steps(entry: Entry) -> Sequence[Step]:
    if not entry.steps:
        raise InvalidError(
            f"sandbox {entry.id} keeps no steps",
            hint='create it with checkpoint: "each"',
            sandbox_id=entry.id,
        )
    return entry.steps


def _bounded(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return steps if len(steps) <= MAX_STEPS else (steps[0], *steps[1 - MAX_STEPS :])
