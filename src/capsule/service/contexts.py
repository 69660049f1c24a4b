"""The contexts of sandboxes: live interpreters, each an exec that a kernel keeps.

Tasks, all owned by `Contexts` and ended by `aclose`:
  run N in ID    one per run under way: talks to the kernel, feeds whoever follows, watches the
                 time. It goes on when its caller leaves
  interrupt ID   tells an interpreter again that may have missed it
  close ID       lets go of a connection whose sandbox has ended

Between runs nobody reads a connection: what a thread prints meanwhile waits in the agent, and comes
with the next run. A connection is held from the first use on, so that a run costs one message each
way; a restarted server attaches again when it is first asked.
"""

from __future__ import annotations

import asyncio
import builtins
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import structlog

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecInfo, SandboxId
from capsule.service import kernel_wire as wire
from capsule.service import validate
from capsule.service.access import Access
from capsule.service.context import Context, ContextInfo, ContextRecord
from capsule.service.context_calls import (
    ContextCall,
    ContextRun,
    code_of,
    new_record,
    run_env,
)
from capsule.service.entry import Entry
from capsule.service.execs import nothing
from capsule.service.interpreters import Interpreters, hang_up, kill
from capsule.service.kernels import able, start_of
from capsule.service.live_run import LiveRun, RunEnd, RunResult, collect
from capsule.service.permits import Permit, Permits
from capsule.service.room import holding
from capsule.service.sandboxes import Parts
from capsule.service.talk import Conversation, Outcome, Talk, describe, why
from capsule.service.tasks import Tasks
from capsule.settings import brief

log = structlog.get_logger(__name__)

MAX_CONTEXTS = 32  # per sandbox
_GLANCE = 0.2
_PRESSES = 10


@dataclass(slots=True)
class _Shelf:
    """A sandbox's contexts."""

    contexts: dict[str, Context]
    making: asyncio.Lock = field(default_factory=asyncio.Lock)  # two must not make one default


class Request(NamedTuple):
    """A run, checked."""

    code: str
    env: Mapping[str, str]
    timeout: float


class UnderWay(NamedTuple):
    """A run, and all that it holds until its end."""

    entry: Entry
    link: AgentLink
    context: Context
    talk: Talk
    live: LiveRun
    request: Request
    permit: Permit


class Contexts:
    def __init__(self, parts: Parts, access: Access, permits: Permits) -> None:
        self._config = parts.config
        self._store = parts.store
        self._clock = parts.clock
        self._room = parts.room
        self._access = access
        self._permits = permits
        self._interpreters = Interpreters(parts.store, permits)
        self._shelves: dict[SandboxId, _Shelf] = {}
        self._tasks = Tasks()
        # What is done when a run has ended, before its caller hears of it; told by whoever steps.
        self.mark: Callable[[Entry, ExecId, Sequence[str]], Awaitable[None]] = nothing

    async def aclose(self) -> None:
        """Interpreters go on running; the next server attaches to them."""
        await self._tasks.aclose()
        for shelf in self._shelves.values():
            for context in shelf.contexts.values():
                await hang_up(context)

    async def create(self, id: str, call: ContextCall) -> ContextInfo:
        visit = self._access.visit(id)
        shelf = await self._shelf(visit.entry)
        async with visit as link:
            name = "c" + secrets.token_hex(6)
            return (await self._make(visit.entry, shelf, link, name, call)).info()

    async def warm(
        self, id: str, language: str | None = None, *, imports: Sequence[str] = ()
    ) -> ContextInfo:
        """The default context of a language, started now and with these modules loaded, so that
        the first run in it has to wait for neither."""
        visit = self._access.visit(id)
        call = ContextCall(language, imports=imports)
        async with visit as link:
            return (await self._default(visit.entry, link, call)).info()

    async def inherit(self, entry: Entry, record: ContextRecord) -> None:
        """An interpreter that the pool started in a sandbox's box. It does not have variables that
        the sandbox was given: then it goes, and the first run starts another."""
        try:
            if entry.env and entry.link is not None:
                await entry.link.kill(ExecId(record.exec_id))
            else:
                await self.take_over(entry.id, record)
        except CapsuleError as error:
            log.warning("warm context not used", sandbox=entry.id, reason=error.message)

    async def take_over(self, id: str, record: ContextRecord) -> None:
        """Make an interpreter that runs in the sandbox's box already a context of the sandbox."""
        entry = self._access.sandboxes.find(id)
        await self._store.save_context(entry.id, record)
        if (shelf := self._shelves.get(entry.id)) is not None:
            shelf.contexts.setdefault(record.id, Context(record))

    async def run(self, id: str, call: ContextRun) -> RunResult:
        with holding():
            live = await self.start(id, call)
            return await collect(live, self._room, self._config.output_limit)

    async def start(self, id: str, call: ContextRun) -> LiveRun:
        """Returns when the code runs; before, it may wait in line."""
        timeout = self._timeout(call.timeout)
        visit = self._access.visit(id)
        entry = visit.entry
        async with visit as link:
            context = await self._find_for(entry, link, call)
            code = code_of(call.code, context.record.kernel)
            env = run_env(call.env, context.record.kernel)
            await context.enter()
            try:
                return await self._begin(entry, link, context, Request(code, env, timeout))
            except BaseException:
                context.turn.release()
                raise

    async def interrupt(self, id: str, name: str) -> bool:
        """Whether a run was under way. It ends as if somebody had pressed Ctrl-C."""
        visit = self._access.visit(id)
        context = _found(await self._shelf(visit.entry), name)
        if context.state != "running":
            return False
        async with visit as link:
            if context.talk is None and not context.turn.locked():  # begun before a restart
                async with context.turn:
                    with suppress(WrongStateError):  # dead since
                        await self._interpreters.talk(visit.entry, link, context)
            if context.talk is None:
                return await link.kill(context.exec_id, signal="INT")
            run = context.under_way
            context.talk.again()
            await context.talk.press(run)
            self._tasks.spawn(_press(context, run), f"interrupt {name}")
            return True

    async def restart(self, id: str, name: str) -> ContextInfo:
        """A fresh interpreter under the same id; a run under way ends with the old one."""
        visit = self._access.visit(id)
        context = _found(await self._shelf(visit.entry), name)
        async with visit as link:
            await self._interpreters.give_up(visit.entry, link, context)
            async with context.turn:
                await self._interpreters.renew(visit.entry, link, context)
                return context.info()

    async def delete(self, id: str, name: str) -> None:
        visit = self._access.visit(id)
        shelf = await self._shelf(visit.entry)
        context = _found(shelf, name)
        async with visit as link:
            shelf.contexts.pop(name, None)
            context.gone = True
            await kill(link, context, "it was deleted")
            async with context.turn:  # its run has seen the end
                await hang_up(context)
            await self._store.remove_context(visit.entry.id, name)

    def languages(self, id: str) -> Sequence[str]:
        """Those of the sandbox that contexts can be had for."""
        return able(self._access.sandboxes.find(id).template)

    async def language(self, id: str, name: str) -> str:
        """Of a context. Raises NotFoundError."""
        entry = self._access.sandboxes.find(id)
        return _found(await self._shelf(entry), name).record.language

    async def list(self, id: str) -> builtins.list[ContextInfo]:
        visit = self._access.visit(id)
        shelf = await self._shelf(visit.entry)
        if not shelf.contexts:
            return []
        async with visit as link:
            known = {info.id: info for info in await link.execs()}
            for context in [each for each in shelf.contexts.values() if not each.turn.locked()]:
                async with context.turn:
                    await self._look(visit.entry, link, context, known.get(context.exec_id))
        return [context.info() for context in shelf.contexts.values()]

    async def _look(
        self, entry: Entry, link: AgentLink, context: Context, known: ExecInfo | None
    ) -> None:
        """Whether it still lives; and whether a run that was lost is over."""
        if not context.record.greeted:
            return  # its next run starts another interpreter
        if known is None or not known.running:
            await self._interpreters.bury(entry, context, describe(known.exit if known else None))
        elif context.record.busy or context.syncing:
            with suppress(ConflictError, WrongStateError):
                talk = await self._interpreters.talk(entry, link, context)
                await self._interpreters.sync(entry, context, talk, _GLANCE)

    async def _shelf(self, entry: Entry) -> _Shelf:
        shelf = self._shelves.get(entry.id)
        if shelf is None:
            records = await self._store.contexts(entry.id)
            shelf = self._shelves.get(entry.id)  # somebody may have been faster
            if shelf is None:
                shelf = _Shelf({record.id: _recalled(record) for record in records})
                self._shelves[entry.id] = shelf
                entry.at_end.append(lambda: self._forget(entry))
        return shelf

    def _forget(self, entry: Entry) -> None:
        shelf = self._shelves.pop(entry.id, None)
        for context in shelf.contexts.values() if shelf else ():
            context.gone = True
            if context.talk is not None and not context.running:
                self._tasks.spawn(hang_up(context), f"close {entry.id}")

    async def _find_for(self, entry: Entry, link: AgentLink, call: ContextRun) -> Context:
        if call.context is None:
            return await self._default(entry, link, ContextCall(call.language))
        context = _found(await self._shelf(entry), call.context)
        if call.language is not None:
            language = start_of(entry.template, call.language).language
            if language != context.record.language:
                raise InvalidError(
                    f"language: {brief(call.language)}, but context {context.id} speaks"
                    f" {context.record.language}",
                    field="language",
                )
        return context

    async def _default(self, entry: Entry, link: AgentLink, call: ContextCall) -> Context:
        shelf = await self._shelf(entry)
        name = f"default-{start_of(entry.template, call.language).language}"
        async with shelf.making:
            context = shelf.contexts.get(name)
            return context or await self._make(entry, shelf, link, name, call)

    async def _make(
        self, entry: Entry, shelf: _Shelf, link: AgentLink, name: str, call: ContextCall
    ) -> Context:
        start = start_of(entry.template, call.language)
        if len(shelf.contexts) >= MAX_CONTEXTS:
            raise CapacityError(
                f"sandbox {entry.id} has {len(shelf.contexts)} contexts, limit {MAX_CONTEXTS}",
                hint="delete one",
                limit=MAX_CONTEXTS,
            )
        own = entry.template.user
        record = new_record(name, start, call, self._clock.now(), own=own)
        context = Context(record)
        shelf.contexts[name] = context
        try:
            async with context.turn:
                if call.make_cwd:
                    await link.mkdir(record.cwd)
                await self._interpreters.launch(entry, link, context, record)
        except BaseException:
            shelf.contexts.pop(name, None)
            raise
        return context

    async def _begin(
        self, entry: Entry, link: AgentLink, context: Context, request: Request
    ) -> LiveRun:
        context.check_alive()
        if not context.record.greeted:  # the server was killed while its interpreter started
            await self._interpreters.renew(entry, link, context)
        permit = self._permits.take(entry)
        try:
            talk = await self._interpreters.talk(entry, link, context)
            if context.syncing:
                await self._interpreters.sync(entry, context, talk, request.timeout)
            record = replace(context.record, run=context.record.run + 1, busy=True)
            await self._store.save_context(entry.id, record)
        except BaseException:
            permit.release()
            raise
        context.record, context.running = record, True
        live = LiveRun(context.id, record.run)
        work = self._drive(UnderWay(entry, link, context, talk, live, request, permit))
        self._tasks.spawn(work, f"run {record.run} in {context.id}")
        return live

    async def _drive(self, run: UnderWay) -> None:
        entry, link, context, talk, live, request, permit = run
        began = time.monotonic()
        try:
            talking = Conversation(
                talk, live, timeout=request.timeout, kill=lambda: link.kill(context.exec_id)
            )
            outcome = await talking.hold(request.code, request.env)
            spent = (time.monotonic() - began) * 1000
            end = await self._ended(run, outcome)
            await self.mark(entry, context.exec_id, (context.record.language, request.code))
            dropped, lost = talking.tally.dropped, talk.lost_bytes
            live.put(replace(end, duration_ms=spent, dropped=dropped, lost_bytes=lost))
        except UnavailableError as error:
            context.lost_run = live.run
            await hang_up(context)
            live.fail(await self._access.pulse.explain(entry, error, link))
        except CapsuleError as error:
            await hang_up(context)
            live.fail(error)
        finally:
            context.running = False
            permit.release()
            context.turn.release()
            self._access.touch(entry)

    async def _ended(self, run: UnderWay, outcome: Outcome) -> RunEnd:
        entry, context, live = run.entry, run.context, run.live
        if outcome.exit is not None:
            reason = context.over or why(outcome, run.request.timeout)
            live.put(wire.Raised("InterpreterDied", reason))
            await self._interpreters.bury(entry, context, reason)
        else:
            await self._interpreters.save(entry, context, replace(context.record, busy=False))
        context.running = False
        status = "died" if outcome.exit is not None else outcome.status or "lost"
        return RunEnd(
            run=live.run,
            context=context.id,
            status="timed_out" if outcome.timed_out else status,
            state=context.state,
            exit_code=outcome.exit_code,
            reason=context.record.dead,
        )

    def _timeout(self, asked: float | None) -> float:
        if asked is None:
            return self._config.exec_timeout
        return validate.seconds("timeout", asked, 0.001, self._config.max_exec_timeout)


async def _press(context: Context, run: int) -> None:
    """Interrupt it again, while it goes on and was not hit."""
    for _ in range(_PRESSES):
        await asyncio.sleep(wire.PRESS)
        talk = context.talk
        if talk is None or not context.running or context.record.run != run or talk.hit == run:
            return
        await talk.press(run)


def _recalled(record: ContextRecord) -> Context:
    """From the store: a run that was under way then is lost."""
    return Context(record, lost_run=record.run if record.busy else None)


def _found(shelf: _Shelf, name: str) -> Context:
    context = shelf.contexts.get(name)
    if context is None:
        raise NotFoundError(
            f"no such context: {brief(name)}", hint="list the contexts of this sandbox"
        )
    return context
