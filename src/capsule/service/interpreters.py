"""The interpreters of contexts: how one is started, found again, and given up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import structlog

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from capsule.link.link import AgentLink
from capsule.model import MIB, ROOT, ExecId, ExecRequest, Exit, Reason, Template
from capsule.service import kernel_wire as wire
from capsule.service.context import RESTARTED, Context, ContextRecord
from capsule.service.context_calls import fresh
from capsule.service.entry import Entry, as_root
from capsule.service.kernels import is_threaded, start_of
from capsule.service.permits import Permits
from capsule.service.store import Store
from capsule.service.talk import Talk, describe
from capsule.settings import brief

log = structlog.get_logger(__name__)

KEPT = 16 * MIB  # output the agent keeps for a server that is behind; above the usual output_limit
START_BUDGET = 60.0
STARTS_WITH = 16  # processes and threads that one may need to start: Node has 11
LOOK_AFTER = 3.0  # seconds between looks at one that is not ready


class Interpreters:
    def __init__(self, store: Store, permits: Permits) -> None:
        self._store = store
        self._permits = permits

    async def launch(
        self, entry: Entry, link: AgentLink, context: Context, record: ContextRecord
    ) -> None:
        """Recorded before its exec is started, as not greeted: after a kill of the server `renew`
        replaces it. No run is recorded before the record says that it is ready."""
        record = replace(record, greeted=False)
        request = await _request(entry.template, record, entry.environ)
        await self._store.save_context(entry.id, record)
        context.record, context.over, context.lost_run, context.syncing = record, "", None, 0
        try:
            with self._permits.take(entry):
                context.talk = Talk(await link.exec(request), record.kernel, record.nonce)
                await _started(entry, link, record, context.talk)
            await self.save(entry, context, replace(record, greeted=True))
        except BaseException as error:
            reason = error.message if isinstance(error, CapsuleError) else "it was not started"
            await hang_up(context)
            await self._stillborn(entry, link, context, reason)
            raise

    async def _stillborn(
        self, entry: Entry, link: AgentLink, context: Context, reason: str
    ) -> None:
        """No interpreter is left; and no record, unless the context had lived before."""
        try:
            await link.kill(context.exec_id)
        except CapsuleError as error:
            log.debug("no interpreter to end", context=context.id, reason=error.message)
        if context.record.run:
            await self.bury(entry, context, reason)
        else:
            await self._store.remove_context(entry.id, context.id)

    async def give_up(self, entry: Entry, link: AgentLink, context: Context) -> None:
        """It is to be renewed. Recorded before the kill, or the next server would find it dead."""
        context.record = replace(context.record, greeted=False)
        await self._store.save_context(entry.id, context.record)
        await kill(link, context, RESTARTED)

    async def renew(self, entry: Entry, link: AgentLink, context: Context) -> None:
        """A new interpreter under the same id; the old one is killed."""
        await kill(link, context, RESTARTED)
        await hang_up(context)
        exec_id, nonce = fresh()
        record = replace(context.record, exec_id=exec_id, nonce=nonce, busy=False, dead="")
        await self.launch(entry, link, context, record)

    async def talk(self, entry: Entry, link: AgentLink, context: Context) -> Talk:
        """The one there is, if it is still good for anything: a pause may end it, or a network."""
        if context.talk is not None and context.talk.stream.broken:
            await hang_up(context)
        return context.talk or await self.attach(entry, link, context)

    async def attach(self, entry: Entry, link: AgentLink, context: Context) -> Talk:
        """To an interpreter that an earlier server started, or whose connection broke."""
        known = next((each for each in await link.execs() if each.id == context.exec_id), None)
        if known is None or not known.running:
            await self.bury(entry, context, describe(known.exit if known else None))
            context.check_alive()
        assert known is not None
        stream = await link.attach(
            known.id, stdout=known.stdout_bytes, stderr=known.stderr_bytes, input=True
        )
        talk = Talk(stream, context.record.kernel, context.record.nonce)
        try:
            record = replace(context.record, run=context.record.run + 1)
            await stream.send(wire.sync(record.kernel, record.run))
        except BaseException:
            await stream.aclose()
            raise
        context.record, context.talk, context.syncing = record, talk, record.run
        return talk

    async def sync(self, entry: Entry, context: Context, talk: Talk, timeout: float) -> None:
        """Until what was under way before is over; its output is nobody's."""
        try:
            async with asyncio.timeout(timeout):
                lives = await talk.synced(context.syncing)
        except TimeoutError:
            raise ConflictError(
                f"context {context.id} is busy with run {context.lost_run or context.record.run},"
                " which was begun before the server's restart",
                hint="interrupt it, or restart the context",
                context=context.id,
            ) from None
        if not lives:
            await self.bury(entry, context, describe(talk.stream.exit))
            context.check_alive()
        context.syncing = 0
        context.record = replace(context.record, busy=False)

    async def bury(self, entry: Entry, context: Context, reason: str) -> None:
        await hang_up(context)
        if context.record.dead:
            return
        record = replace(context.record, dead=reason, busy=False)
        if reason == RESTARTED:
            context.record = record  # and not in the store: there it waits for another
        else:
            await self.save(entry, context, record)

    async def save(self, entry: Entry, context: Context, record: ContextRecord) -> None:
        """What a restarted server would find out by itself: worth trying, not worth failing."""
        context.record = record
        if context.gone:
            return
        try:
            await self._store.save_context(entry.id, record)
        except (UnavailableError, NoSpaceError) as error:
            log.warning("context not recorded", sandbox=entry.id, reason=error.message)


async def start_ahead(
    link: AgentLink, template: Template, record: ContextRecord, environ: Mapping[str, str]
) -> None:
    """Start an interpreter in a box that has no sandbox yet, and leave it to whoever takes the box:
    `Contexts.take_over` makes the record a context of theirs, which is found at its first run.

    Raises InvalidError (the imports), NotSupportedError, UnavailableError; then nothing runs.
    """
    request = await _request(template, record, environ)
    async with await link.exec(request) as stream:
        try:
            if not await _greet(record, Talk(stream, record.kernel, record.nonce)):
                raise _unusable(record, stream.exit)
        except BaseException:
            await link.kill(request.id)
            raise


async def _request(
    template: Template, record: ContextRecord, environ: Mapping[str, str]
) -> ExecRequest:
    start = start_of(template, record.language)
    return ExecRequest(
        argv=await start.argv(),
        id=ExecId(record.exec_id),
        env={**(as_root(environ) if record.user == ROOT else environ), **record.env},
        cwd=record.cwd,
        user=record.user,
        timeout=0.0,
        stdin=True,
        output_limit=KEPT,
        keep="tail",
    )


async def _greet(record: ContextRecord, talk: Talk) -> bool:
    """False: it has ended before it was ready."""
    await talk.stream.send(wire.hello(record.kernel, record.nonce, record.imports))
    try:
        async with asyncio.timeout(START_BUDGET):
            ready = await talk.ready()
    except TimeoutError:
        raise UnavailableError(
            f"the {record.language} interpreter was not ready within {START_BUDGET:g} seconds",
            hint="import less in advance, or give the sandbox more of a core",
        ) from None
    if ready is None:
        return False
    for name, problem in wire.words(ready.failed).items():
        raise InvalidError(f"imports: {brief(name)} failed: {problem}", field="imports")
    return True


async def _started(entry: Entry, link: AgentLink, record: ContextRecord, talk: Talk) -> None:
    """Returns when it is ready. Without the threads that it needs one aborts, or hangs."""
    greeting = asyncio.create_task(_greet(record, talk))
    try:
        while not (await asyncio.wait({greeting}, timeout=LOOK_AFTER))[0]:
            if is_threaded(record.kernel):
                await _check_room(entry, link, record, "it does not get ready", needed=1)
        if not greeting.result():
            exit = talk.stream.exit
            if exit is not None and exit.reason is Reason.SIGNALED:
                await _check_room(entry, link, record, describe(exit), needed=STARTS_WITH)
            raise _unusable(record, exit)
    finally:
        greeting.cancel()
        await asyncio.gather(greeting, return_exceptions=True)


async def _check_room(
    entry: Entry, link: AgentLink, record: ContextRecord, why: str, *, needed: int
) -> None:
    """Raises CapacityError when the sandbox has not so many processes left."""
    try:
        used = (await link.usage()).processes
    except CapsuleError:
        return
    limit = entry.limits.processes
    if used is not None and used + needed > limit:
        raise CapacityError(
            f"sandbox {entry.id} has {used} of {limit} processes and threads, which leaves too few"
            f" for another {record.language} interpreter: {why}",
            hint="delete a context, or create the sandbox with more `limits.processes`",
            sandbox_id=entry.id,
            limit=limit,
        )


def _unusable(record: ContextRecord, exit: Exit | None) -> InvalidError:
    return InvalidError(
        f"the {record.language} interpreter of this sandbox cannot be used: {describe(exit)}",
        hint="a context needs Python 3.8, Node 18 or bash 4.4, or newer",
        field="language",
    )


async def kill(link: AgentLink, context: Context, reason: str) -> None:
    """No process of its interpreter is left, nor of what that started."""
    context.over = reason
    try:
        await link.kill(context.exec_id)
    except NotFoundError:
        log.debug("interpreter already forgotten", context=context.id)


async def hang_up(context: Context) -> None:
    talk, context.talk = context.talk, None
    if talk is not None:
        await talk.stream.aclose()
