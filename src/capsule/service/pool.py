"""Boxes for sandboxes: from a shelf of ready ones, or launched, a few at a time.

    Pool ─┬─ rounds        one task: looks after what is ready, lets go of what nobody needs
          ├─ stock KIND    one per box being launched for a shelf
          ├─ part ID       one per box that a sandbox had before a reset
          └─ discard ID    one per box being removed
                           all ended by aclose, which leaves no box behind

A box in the pool is nobody's sandbox. It is launched as any other, under an id of its own, has
never run a program, and leaves only once: what was handed out is never put back. A server that is
killed leaves its pool without records, and the next one removes it with the other orphans.

To launch for whoever waits goes before filling shelves, and whoever came first goes first. A
launch that waits for something itself (an image that is pulled) gives up its place meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from capsule import surroundings
from capsule.config import Config
from capsule.errors import CapacityError, CapsuleError, UnavailableError
from capsule.model import Limits, SandboxId, SandboxSpec, Started, Template
from capsule.providers.contract import Adjustable, Box, Provider
from capsule.service import validate
from capsule.service.admission import new_id
from capsule.service.budget import Budget
from capsule.service.clock import Clock
from capsule.service.context import ContextRecord
from capsule.service.former import Former, Formers
from capsule.service.line import Line, Place
from capsule.service.shelf import Kind, Shelf, ShelfStatus, Stocked
from capsule.service.tasks import Tasks
from capsule.service.templates import shares
from capsule.service.warm import Warm
from capsule.tracing import span

log = structlog.get_logger(__name__)

LAUNCH_BUDGET = 60.0
# Fewer leave cores idle while a launch waits for the kernel; with more of them all are late.
PER_CORE = 8
DISCARD_BUDGET = 30.0
PATIENCE = 0.5  # a box that does not answer within this is not handed out
TRIES = 3  # ready boxes that a create looks at: with all of them silent it would wait for each
CHECK_EVERY = 5.0
CHECKS_AT_ONCE = 16
STOCKING = 2  # launches for shelves at the same time
FILL_AFTER = 0.01
MAX_SHELVES = 64
RETRY_AFTER = 5.0


class Wish(NamedTuple):
    provider: str
    spec: SandboxSpec


class Obtained(NamedTuple):
    box: Box
    started: Started
    context: ContextRecord | None = None  # of an interpreter that runs in it already


@dataclass(frozen=True, slots=True)
class PoolStatus:
    shelves: tuple[ShelfStatus, ...]
    waiting: int  # creates in line
    launching: int  # boxes being launched, for creates and for shelves
    max_launches: int
    memory_bytes: int  # what all ready boxes cost the machine
    max_memory_bytes: int


class Pool:
    def __init__(
        self,
        config: Config,
        providers: Mapping[str, Provider],
        catalog: Mapping[str, Template],
        clock: Clock,
    ) -> None:
        self.tidy_soon: Callable[[], None] = lambda: None  # something was left behind
        self.obtained = dict.fromkeys(Started, 0)  # boxes given to sandboxes, and how
        self._config = config
        self._providers = providers
        self._catalog = catalog
        self._clock = clock
        self._named = tuple(_named(text, config) for text in config.pool_templates)
        self._shelves: dict[Kind, Shelf] = {}
        self._lines: dict[str, Line[Wish, Box]] = {}
        self._width = config.max_launches or PER_CORE * surroundings.usable_cpus()
        self._budget = Budget(config.pool_memory, self._shelves)
        self.held: set[SandboxId] = set()  # boxes that are ours, and no sandbox's
        self._warm = Warm()  # interpreters that run in them
        self._stocking = 0
        self._filling: asyncio.TimerHandle | None = None
        self._open = False
        self._tasks = Tasks()
        self._discards = Tasks()
        self._formers = Formers(self._discards, self.remove)

    def start(self) -> None:
        if max(self._config.pool_min, self._config.pool_max) > 0:
            self._open = True
            self._warn_of_names()
            self._keep_named()
            self._fill()
            self._tasks.spawn(self._rounds(), "pool")

    def close(self) -> None:
        """From now on nothing is launched ahead."""
        self._open = False

    async def aclose(self) -> None:
        """Idempotent. No box of the pool is left, as far as its provider lets go of them."""
        self._open = False
        self._fill()  # which begins nothing any more
        await self._tasks.aclose()
        for kind in list(self._shelves):
            self._drop(kind)
        await self._discards.settle(DISCARD_BUDGET)
        await self._discards.aclose()

    def hand_over(self, box: Box) -> None:
        """It is a sandbox's now, or the reaper's."""
        self.held.discard(box.handle.sandbox_id)

    def part(self, box: Box, layers: frozenset[str]) -> Former:
        """It is no sandbox's any more: it is ended, and removed."""
        self.held.add(box.handle.sandbox_id)
        return self._formers.part(box, layers)

    def status(self) -> PoolStatus:
        waiting = [wish for line in self._lines.values() for wish in line.waiting()]
        return PoolStatus(
            shelves=tuple(
                shelf.status(sum(kind_of(wish) == shelf.kind for wish in waiting))
                for shelf in self._shelves.values()
            ),
            waiting=len(waiting),
            launching=sum(line.taken for line in self._lines.values()),
            max_launches=self._width,
            memory_bytes=self._budget.used(),
            max_memory_bytes=self._budget.limit,
        )

    def expect(self, provider: str, spec: SandboxSpec) -> None:
        """Somebody will obtain such a box in a moment: if it must be launched, let that begin."""
        shelf = self._shelf(Wish(provider, spec))
        if shelf is None or not shelf.ready:
            self._providers[provider].expect()

    async def obtain(self, provider: str, spec: SandboxSpec, box_id: SandboxId) -> Obtained:
        """A box that answers, with these limits; launched as `box_id` unless one was ready. It is
        held until `hand_over`.

        Raises CapacityError (its turn did not come), and what `launch` raises.
        """
        wish = Wish(provider, spec)
        deadline = asyncio.get_running_loop().time() + LAUNCH_BUDGET
        box = await self._ready(wish)
        while box is None:
            turn = await self._turn(wish, deadline)
            if isinstance(turn, Place):
                try:
                    box = await self._launch(wish, box_id, turn, deadline)
                finally:
                    turn.leave()
                self._missed(wish)
                self.obtained[Started.COLD] += 1
                return Obtained(box, Started.COLD)
            box = turn if await self._fits(wish, turn) else None
        if (shelf := self._shelf(wish)) is not None:
            shelf.hits += 1
        self.obtained[Started.WARM] += 1
        self._fill_soon()
        return Obtained(box, Started.WARM, self._warm.take(box))

    async def _ready(self, wish: Wish) -> Box | None:
        shelf = self._shelf(wish)
        if shelf is None:
            return None
        for _ in range(TRIES):
            box = shelf.take()
            if box is None:
                break
            if await self._fits(wish, box):
                return box
        shelf.want()
        return None

    def _shelf(self, wish: Wish) -> Shelf | None:
        shelf = self._shelves.get(kind_of(wish))
        return shelf if shelf is not None and shelf.suits(wish.spec) else None

    async def _fits(self, wish: Wish, box: Box) -> bool:
        """It lives, and has the limits that are asked for. If not, it is gone."""
        shelf = self._shelves.get(kind_of(wish))
        try:
            await self._alive(box)
            if shelf is None or not shelf.suits(wish.spec):
                self._discard(box)
                return False
            await self._adjust(box, shelf.spec.limits, wish.spec.limits)
        except (CapsuleError, OSError, TimeoutError) as error:
            log.warning("ready box not used", box=box.handle.sandbox_id, reason=str(error))
            self._discard(box, shelf)
            return False
        except BaseException:
            self._discard(box)
            raise
        return True

    async def _alive(self, box: Box) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._warm.ping(box)
        except TimeoutError as error:
            raise UnavailableError(f"it did not answer within {PATIENCE} s") from error

    async def _adjust(self, box: Box, own: Limits, wanted: Limits) -> None:
        if wanted == own or not isinstance(box, Adjustable):
            return
        if wanted.open_files != own.open_files:
            await self._warm.end(box)  # it has the limit that it began with
        elif wanted.memory < own.memory:
            await self._warm.make_room(box, wanted.memory)
        await box.adjust(wanted)

    async def _turn(self, wish: Wish, deadline: float) -> Place | Box:
        line = self._line(wish.provider)
        try:
            async with asyncio.timeout_at(deadline):
                return await line.wait(wish)
        except TimeoutError:
            raise CapacityError(
                f"no box within {LAUNCH_BUDGET:g} seconds: {line.taken} are being launched, "
                f"limit {line.width}, and {len(line.waiting())} wait",
                retry_after=RETRY_AFTER,
                hint="try again when fewer are created at once",
                limit=line.width,
            ) from None

    def _line(self, provider: str) -> Line[Wish, Box]:
        line = self._lines.get(provider)
        if line is None:
            line = Line(self._width, idle=self._fill, returned=self._discard)
            self._lines[provider] = line
        return line

    async def _launch(self, wish: Wish, box_id: SandboxId, place: Place, deadline: float) -> Box:
        """On return the box is held."""
        self.held.add(box_id)
        try:
            spec, budget = _extended(wish.spec, deadline, place)
            async with budget:
                with span("launch", provider=wish.provider, template=spec.template.name):
                    return await self._providers[wish.provider].launch(box_id, spec)
        except BaseException as error:
            self.held.discard(box_id)
            if isinstance(error, TimeoutError):
                text = f"the box was not up within {LAUNCH_BUDGET:g} seconds"
                raise UnavailableError(text) from None
            raise

    def _missed(self, wish: Wish) -> None:
        """Somebody wanted such a box, and this host can make it: have one ready the next time."""
        if (shelf := self._shelf(wish) or self._learn(wish)) is not None:
            shelf.misses += 1
            self._fill()
        elif (shelf := self._shelves.get(kind_of(wish))) is not None:
            shelf.misses += 1  # of a kind that no box from there can become

    def _learn(self, wish: Wish) -> Shelf | None:
        kind = kind_of(wish)
        spec = self._plain(wish.spec.template, kind.runtime) if self._open else None
        if spec is None or replace(wish.spec, limits=spec.limits) != spec:
            return None
        known = self._shelves.get(kind)
        if known is not None:
            if known.spec == spec:
                return None  # only its limits are others than a ready box can be given
            self._drop(kind)  # the template has changed
        if len(self._shelves) >= MAX_SHELVES or self._config.pool_max < 1:
            return None
        shelf = self._add(kind, spec)
        shelf.want()
        return shelf

    def _plain(self, template: Template, runtime: str) -> SandboxSpec:
        """As a create asks for it that asks for nothing special."""
        limits = validate.limits(None, template.limits, self._config)
        return SandboxSpec(template=template, limits=limits, runtime=runtime)

    def _add(self, kind: Kind, spec: SandboxSpec) -> Shelf:
        least = self._config.pool_min if kind in self._named else 0
        most = max(least, self._config.pool_max)
        shelf = Shelf(kind, spec, least, most, self._clock.monotonic())
        self._shelves[kind] = shelf
        return shelf

    def _warn_of_names(self) -> None:
        """A template may still come, when somebody builds it; a provider does not."""
        for kind in self._named if self._config.pool_min > 0 else ():
            if kind.template not in self._catalog or kind.provider not in self._providers:
                name = f"{kind.template}@{kind.provider}"
                log.warning("pool_templates names what there is not, or not yet", name=name)

    def _keep_named(self) -> None:
        for kind in self._named:
            template = self._catalog.get(kind.template)
            known = kind.provider in self._providers
            if self._config.pool_min > 0 and template and known and kind not in self._shelves:
                self._add(kind, self._plain(template, kind.runtime))

    def _fill_soon(self) -> None:
        """Whoever was just served gets on first: a launch takes a core from its answer."""
        if self._filling is None:
            loop = asyncio.get_running_loop()
            self._filling = loop.call_later(FILL_AFTER, self._fill)

    def _fill(self) -> None:
        """Begin what is due. Called whenever something was taken, or room was made."""
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None
        for shelf in sorted(self._shelves.values(), key=_filled):
            while self._open and self._may_stock(shelf):
                place = self._line(shelf.kind.provider).try_take()
                if place is None:
                    break
                shelf.launching += 1
                self._stocking += 1
                self._tasks.spawn(self._stock(shelf, place), f"stock {shelf.kind.template}")

    def _may_stock(self, shelf: Shelf) -> bool:
        return (
            shelf.short()
            and self._stocking < STOCKING
            and shelf.retry_at <= self._clock.monotonic()
            and self._budget.affords(shelf)
        )

    async def _stock(self, shelf: Shelf, place: Place) -> None:
        wish = Wish(shelf.kind.provider, replace(shelf.spec, adjustable=True))
        deadline = asyncio.get_running_loop().time() + LAUNCH_BUDGET
        try:
            box, interpreter = await self._launch(wish, new_id(), place, deadline), 0
            if shelf.spec.template.warm_context:
                place.leave()  # an interpreter starts in a box that is up: nobody waits for that
                interpreter = await self._warm_up(shelf.spec.template, box)
        except CapsuleError as error:
            shelf.failed(self._clock.monotonic())
            log.warning("pool not filled", template=shelf.kind.template, reason=error.message)
        else:
            # Mostly before the place is free: who waits longest gets the box.
            self._put(shelf, box, interpreter)
        finally:
            shelf.launching -= 1
            self._stocking -= 1
            place.leave()
        self._fill()

    async def _warm_up(self, template: Template, box: Box) -> int:
        try:
            return await self._warm.start(template, box, self._clock.now())
        except BaseException:
            self._discard(box)
            raise

    def _put(self, shelf: Shelf, box: Box, interpreter: int) -> None:
        if not self._open or self._shelves.get(shelf.kind) is not shelf:
            self._discard(box)
        else:
            shelf.learn(box, interpreter)
            line = self._line(shelf.kind.provider)
            if line.offer(box, lambda wish: self._shelf(wish) is shelf):
                return
            if self._budget.used() > self._budget.limit:  # it was the first one, and costs more
                self._discard(box)
            else:
                shelf.put(box, self._clock.monotonic())

    async def let_go(self, template: Template) -> None:
        """Remove what is ready of a template whose image is replaced or removed."""
        over = [k for k, shelf in self._shelves.items() if shares(shelf.spec.template, template)]
        if removals := [removal for kind in over for removal in self._drop(kind)]:
            await asyncio.wait(removals)

    def _drop(self, kind: Kind) -> list[asyncio.Task[bool]]:
        return [self._discard(stocked.box) for stocked in self._shelves.pop(kind).ready]

    def _discard(self, box: Box, shelf: Shelf | None = None) -> asyncio.Task[bool]:
        if shelf is not None:
            shelf.discarded += 1
        return self._discards.spawn(self.remove(box), f"discard {box.handle.sandbox_id}")

    async def remove(self, box: Box) -> bool:
        """A box that no sandbox has any more. False: something is left, and the reaper looks."""
        self.held.add(box.handle.sandbox_id)
        self._warm.take(box)
        try:
            async with asyncio.timeout(DISCARD_BUDGET):
                await box.destroy()
            return True
        except Exception as error:  # whatever it is: what is left must be found again
            odd = not isinstance(error, CapsuleError | TimeoutError)
            id = box.handle.sandbox_id
            log.warning("box not removed yet", box=id, reason=str(error), exc_info=odd)
            self.tidy_soon()
            return False
        finally:
            self.hand_over(box)  # what is left is the reaper's

    async def _rounds(self) -> None:
        """A task root: whatever goes wrong in one round is logged, and the next round comes."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.round()
            except Exception:
                log.exception("round of the pool failed")

    async def round(self) -> None:
        now = self._clock.monotonic()
        self._keep_named()
        for kind, shelf in list(self._shelves.items()):
            if self._catalog.get(kind.template) != shelf.spec.template:
                self._drop(kind)
                continue
            for box in shelf.settle(now):
                self._discard(box)
        await self._check(now)
        self._fill()

    async def _check(self, now: float) -> None:
        """Replace what died."""
        due = [
            (shelf, stocked)
            for shelf in self._shelves.values()
            for stocked in shelf.ready
            if stocked.checked + CHECK_EVERY <= now
        ]
        waiting = iter(due)

        async def work() -> None:
            for shelf, stocked in waiting:
                await self._check_one(shelf, stocked)

        async with asyncio.TaskGroup() as group:
            for _ in due[:CHECKS_AT_ONCE]:
                group.create_task(work())

    async def _check_one(self, shelf: Shelf, stocked: Stocked) -> None:
        stocked.checked = self._clock.monotonic()
        try:
            await self._alive(stocked.box)
        except (CapsuleError, OSError, TimeoutError) as error:
            if stocked in shelf.ready:  # nobody has taken it meanwhile
                shelf.ready.remove(stocked)
                log.warning("ready box died", box=stocked.box.handle.sandbox_id, reason=str(error))
                self._discard(stocked.box, shelf)


def kind_of(wish: Wish) -> Kind:
    return Kind(wish.provider, wish.spec.template.name, wish.spec.runtime)


def _named(text: str, config: Config) -> Kind:
    """`python`, `python@docker` or `python@docker:runsc`."""
    template, _, where = text.partition("@")
    provider, _, runtime = where.partition(":")
    return Kind(provider or config.provider, template, runtime)


def _filled(shelf: Shelf) -> float:
    return (len(shelf.ready) + shelf.launching) / max(shelf.target, 1)


def _extended(
    spec: SandboxSpec, deadline: float, place: Place
) -> tuple[SandboxSpec, asyncio.Timeout]:
    """Something that is still coming (an image) is not something that hangs, and needs no place."""
    budget = asyncio.timeout_at(deadline)

    def told(progress: str) -> None:
        place.leave()
        budget.reschedule(asyncio.get_running_loop().time() + LAUNCH_BUDGET)
        if spec.progress is not None:
            spec.progress(progress)

    return replace(spec, progress=told), budget
