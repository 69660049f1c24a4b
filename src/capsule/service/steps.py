"""Steps: with `checkpoint: "each"` every exec and every run in a context leaves a restore point.

A step is a stack of layers: on those of the step before lies one with what changed since. When that
stack is deep, its upper layers are merged into one first, which has the same files under further
names; the steps before keep theirs. When what changed cannot be told so (a folder was moved, the
server is another one), or they cannot be merged, the top layer is all that was written since the
sandbox's box began. An exec that changed nothing has the layers of the step before. Going back
gives the sandbox another box, which begins from the step's layers.

A step that cannot be kept (no space, too large) costs nobody the result of the exec: it is logged,
and missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import structlog

from capsule.errors import CapsuleError, InvalidError, NotFoundError
from capsule.model import ExecId, Layer, Step
from capsule.providers.cleanup import to_the_end
from capsule.providers.contract import FileChange, Mark
from capsule.service.entry import Entry
from capsule.service.reset import Resets, Target
from capsule.service.sandboxes import Parts, Sandboxes
from capsule.service.snapshots import Snapshots
from capsule.service.values import Sandbox

log = structlog.get_logger(__name__)

MAX_STEPS = 200  # kept; the oldest but the first is forgotten
MAX_CHANGES = 10_000
MAX_DEPTH = 16  # of a stack on which a step lies; of a deeper one the upper layers are merged
LEAST_OWN = 4  # of these are the box's own, however deep the stack is that it began from
_SHOWN = 200  # characters of a command


class _Ground(NamedTuple):
    """What a step may lie on."""

    layers: tuple[Layer, ...] = ()
    since: Mark = Mark()


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
        async with self._ground(entry, last) if own else nullcontext(_Ground()) as (on, since):
            if entry.steps[-1] is not last:
                return  # it was undone meanwhile
            async with self._snapshots.saved(entry, since=since, on=on) as (layers, saved):
                if entry.steps[-1] is not last:
                    return
                same = own and not saved.changed
                step = Step(
                    number=last.number + 1,
                    layers=on if same else layers,
                    created=self._clock.now(),
                    exec_id=exec_id,
                    cmd=cmd,
                    size=last.size if same else saved.size + saved.below,
                    copied=0 if same else saved.copied,
                    box_id=entry.box_id,
                    at=saved.at,
                )
                entry.steps = _bounded((*entry.steps, step))
                await self._sandboxes.note(entry)

    @asynccontextmanager
    async def _ground(self, entry: Entry, last: Step) -> AsyncIterator[_Ground]:
        """The layers of the step before, or fewer with the same files, and what to tell of them."""
        begun = _begun(entry, last)
        room = self._snapshots.layered(entry.provider).max_layers - 2
        most = min(max(MAX_DEPTH, begun + LEAST_OWN), room)
        async with self._merged(entry, last.layers, most, begun=begun) as layers:
            yield _Ground(layers, _mark_of(last, layers, begun, most))

    @asynccontextmanager
    async def start(self, entry: Entry, step: Step) -> AsyncIterator[tuple[Layer, ...]]:
        """The layers for another box to begin from, held until it has them: few enough that it has
        room for steps of its own."""
        async with self._merged(entry, step.layers, MAX_DEPTH) as layers:
            with self._snapshots.held(layers):
                yield layers

    @asynccontextmanager
    async def _merged(
        self, entry: Entry, layers: tuple[Layer, ...], most: int, *, begun: int = 0
    ) -> AsyncIterator[tuple[Layer, ...]]:
        """The same files of no more than so many layers, if that can be. The lowest that a box
        began from stay."""
        async with AsyncExitStack() as held:
            if count := to_merge(layers[: len(layers) - begun], len(layers) - most):
                merged = self._snapshots.merged(entry, layers, count)
                try:
                    layers = await held.enter_async_context(merged)
                except CapsuleError as error:
                    log.info("layers not merged", sandbox=entry.id, reason=error.message)
            yield layers

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
        async with self.start(entry, step) as layers:
            kept = tuple(each for each in entry.steps if each.number < number)
            fresh = replace(step, layers=layers, box_id="", at=0.0)
            # It goes on if we leave, and so must the layers be held.
            made = await to_the_end(self._resets.reset(id, Target(layers, (*kept, fresh))))
        await self._snapshots.sweep()
        return made


def _mark_of(step: Step, layers: tuple[Layer, ...], begun: int, most: int) -> Mark:
    ids = tuple(layer.id for layer in layers[: len(layers) - begun])
    size = step.size if step.size is not None else sum(layer.size for layer in step.layers[:1])
    return Mark(ids, step.at, size=size, over=begun > 0, delta=len(layers) <= most)


def to_merge(own: Sequence[Layer], over: int) -> int:
    """How many of these layers, from the top, become one, so that there are `over` fewer or less.

    At least half of them, and then each that has no more files than all above it: so what is large
    stays as it is, and a file is merged again when there are twice as many.
    """
    least = max((len(own) + 1) // 2, over + 1)
    if over <= 0 or least > len(own) or len(own) < 2:
        return 0
    count = files = 0
    for layer in own:
        if count >= least and layer.files > files:
            break
        count, files = count + 1, files + layer.files
    return count


def _begun(entry: Entry, step: Step) -> int:
    """How many of its layers are those that the box began from; the others it has told itself."""
    begun = entry.layers
    return len(begun) if begun and step.layers[-len(begun) :] == begun else 0


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
