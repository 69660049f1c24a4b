"""Running programs in a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    UnavailableError,
)
from capsule.link.collect import Collected
from capsule.link.exec_stream import ExecStream
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecInfo, ExecRequest, Exit
from capsule.service import validate
from capsule.service.access import Access
from capsule.service.context_calls import is_kernel
from capsule.service.entry import Entry
from capsule.service.happenings import Ended, Happening, Kind
from capsule.service.jobs import Call, Job, Jobs, check_stdin
from capsule.service.live import LiveExec
from capsule.service.once import NOT_STARTED, Once, gather
from capsule.service.permits import Permit, Permits
from capsule.service.room import holding
from capsule.service.sandboxes import Parts
from capsule.service.sessions import Sessions
from capsule.service.tasks import Tasks
from capsule.service.values import ExecResult

log = structlog.get_logger(__name__)

MAX_BATCH = 100
MAX_OFFSET = 2**62
MAX_BEGAN = 1024  # moments of one sandbox; its agent knows fewer execs


class Begun(NamedTuple):
    at: float  # wall clock
    info: ExecInfo


class Execs:
    def __init__(self, parts: Parts, access: Access) -> None:
        self._access = access
        self._clock = parts.clock
        self._happenings = parts.happenings
        self._sessions = Sessions(parts.store)
        self._jobs = Jobs(parts.config, self._sessions)
        self._once = Once(parts.store, parts.clock)
        self._room = parts.room
        self.permits = Permits(parts.config)
        # Told of every exec that has ended: what is due then.
        self.mark: Callable[[Entry, ExecId, Sequence[str]], Awaitable[None]] = nothing
        self._left = Tasks()  # one per followed exec whose caller left before its end

    async def aclose(self) -> None:
        await self._left.aclose()

    async def exec(self, id: str, call: Call) -> ExecResult:
        visit = self._access.visit(id)
        entry = visit.entry
        job = await self._jobs.make(entry, call)
        with self.permits.take(entry), holding():
            async with visit as link:
                if call.idempotency_key is None:
                    done = await self._collect(entry, link, job)
                else:
                    done = await self._collect_once(entry, link, job, call)
        if job.session is not None and entry.link is link:  # not reset meanwhile
            await self._sessions.learn(entry, job.session, job.request, done.carry)
        await self._conclude(entry, job.request, done.exit, call)
        return ExecResult(job.request.id, done.exit, done.stdout, done.stderr)

    async def _conclude(
        self, entry: Entry, request: ExecRequest, exit: Exit | None, call: Call
    ) -> None:
        """Once, however many calls with one key see the exec's end."""
        if exit is not None and await self._once.publishes(entry, call, request.id):
            self._tell(entry, request, exit)
            await self.mark(entry, request.id, request.argv)

    def _tell(self, entry: Entry, request: ExecRequest, exit: Exit) -> None:
        self._happenings.tell(
            Happening(
                Kind.FINISHED,
                self._clock.now(),
                sandbox=entry.id,
                template=entry.template.name,
                provider=entry.provider,
                tenant=entry.tenant,
                exec=Ended(request.id, tuple(request.argv), exit),
            )
        )

    async def _collect(self, entry: Entry, link: AgentLink, job: Job) -> Collected:
        await _write_code(link, job)
        try:
            done = await self._run(entry, link, job)
        except NOT_STARTED:  # after any other error it may run, if only for whoever was faster
            await _remove_code(link, job)
            raise
        await _remove_code(link, job)
        return done

    async def _run(self, entry: Entry, link: AgentLink, job: Job) -> Collected:
        room = self._room.take
        try:
            return await link.collect(job.request, input=job.stdin, room=room)
        except CapsuleError as error:
            if not await self._directory_lost(entry, job, error):
                raise
            return await link.collect(job.request, input=job.stdin, room=room)

    async def _collect_once(self, entry: Entry, link: AgentLink, job: Job, call: Call) -> Collected:
        exec_id = job.request.id
        if not await self._once.claim(entry, call, exec_id):
            stream = await self._once.rejoin(link, exec_id)
            if stream is not None:
                done = await gather(stream, self._room, job.request.output_limit)
                await _remove_code(link, job)
                return done
        try:
            return await self._collect(entry, link, job)
        except ConflictError:  # the same call came twice at once, and the other was faster
            stream = await link.attach(exec_id)
            return await gather(stream, self._room, job.request.output_limit)
        except NOT_STARTED:
            await self._once.release(entry, call)
            raise

    async def _directory_lost(self, entry: Entry, job: Job, error: CapsuleError) -> bool:
        """The session's directory cannot be entered any more: go on in the home."""
        if not job.cwd_is_carried or error.details.get("stage") != "chdir" or job.session is None:
            return False
        await self._sessions.forget_cwd(entry, job.session)
        job.request = replace(job.request, cwd=entry.template.user.home)
        job.cwd_is_carried = False
        return True

    async def start(
        self,
        id: str,
        call: Call,
        *,
        stdin_open: bool = False,
        tty: tuple[int, int] | None = None,
        flow: bool = False,
    ) -> LiveExec:
        visit = self._access.visit(id)
        entry = visit.entry
        job = await self._jobs.make(entry, call, stdin_open=stdin_open, tty=tty, flow=flow)
        permit = self.permits.take(entry)
        try:
            async with visit as link:
                stream, is_new = await self._begin(entry, link, job, call)
        except BaseException:
            permit.release()
            raise

        async def ended(stream: ExecStream) -> None:
            if job.session is not None and entry.link is link:
                await self._sessions.learn(entry, job.session, job.request, stream.carry)
            await _remove_code(link, job)
            await self._conclude(entry, job.request, stream.exit, call)

        live = self._live(entry, link, stream, permit=permit)
        due = bool(job.session or job.program.path or job.stdin or entry.steps)
        live.on_end(ended, self._left.spawn, holds=due)
        if is_new and job.stdin and not stdin_open:
            live.feed(job.stdin)
        return live

    async def _begin(
        self, entry: Entry, link: AgentLink, job: Job, call: Call
    ) -> tuple[ExecStream, bool]:
        exec_id, input = job.request.id, job.request.stdin or job.request.tty
        if call.idempotency_key is not None and not await self._once.claim(entry, call, exec_id):
            stream = await self._once.rejoin(link, exec_id, input=input)
            if stream is not None:
                return stream, False
        await _write_code(link, job)
        try:
            return await self._exec(entry, link, job), True
        except ConflictError:
            return await link.attach(exec_id, input=input), False
        except NOT_STARTED:
            await _remove_code(link, job)
            await self._once.release(entry, call)
            raise

    async def _exec(self, entry: Entry, link: AgentLink, job: Job) -> ExecStream:
        try:
            return await link.exec(job.request)
        except CapsuleError as error:
            if not await self._directory_lost(entry, job, error):
                raise
            return await link.exec(job.request)

    def _live(
        self,
        entry: Entry,
        link: AgentLink,
        stream: ExecStream,
        *,
        permit: Permit | None = None,
        listens: bool = False,
    ) -> LiveExec:
        async def explain(error: UnavailableError) -> CapsuleError:
            return await self._access.pulse.explain(entry, error, link)

        return LiveExec(
            stream,
            explain=explain,
            touch=lambda: self._access.touch(entry),
            permit=permit,
            listens=listens,
        )

    async def attach(
        self, id: str, exec_id: str, *, stdout: int = 0, stderr: int = 0, input: bool = False
    ) -> LiveExec:
        known = validate.exec_id(exec_id)
        validate.count("stdout", stdout, 0, MAX_OFFSET)
        validate.count("stderr", stderr, 0, MAX_OFFSET)
        visit = self._access.visit(id)
        async with visit as link:
            stream = await link.attach(known, stdout=stdout, stderr=stderr, input=input)
        return self._live(visit.entry, link, stream, listens=not input)

    async def list(self, id: str) -> Sequence[ExecInfo]:
        async with self._access.visit(id) as link:
            return [_without_source(info) for info in await link.execs()]

    async def look(self, id: str) -> Sequence[Begun]:
        """The same with the moments at which they began, which stay as they are when somebody looks
        again. It is no activity, and wakes nobody.
        """
        entry = self._access.sandboxes.find(id)
        link = entry.running()
        try:
            known = await link.execs()
        except UnavailableError as error:
            raise await self._access.pulse.explain(entry, error, link) from error
        now, began = self._clock.now(), entry.began
        for info in known:
            began.setdefault(info.id, now - info.started_ms_ago / 1000)
        if len(began) > MAX_BEGAN:
            entry.began = {info.id: began[info.id] for info in known}
        return [Begun(began[info.id], _without_source(info)) for info in known]

    async def kill(self, id: str, exec_id: str, *, signal: str, grace: float) -> bool:
        name = validate.signal(signal)
        validate.seconds("grace", grace, 0.0, 60.0)
        async with self._access.visit(id) as link:
            return await link.kill(validate.exec_id(exec_id), signal=name, grace=grace)

    async def send_input(self, id: str, exec_id: str, data: bytes, *, eof: bool) -> None:
        check_stdin(data)
        async with self._access.visit(id) as link:
            await link.send_input(validate.exec_id(exec_id), data, eof=eof)

    async def resize(self, id: str, exec_id: str, rows: int, cols: int) -> None:
        validate.screen(rows, cols)
        async with self._access.visit(id) as link:
            await link.resize(validate.exec_id(exec_id), rows, cols)

    async def batch(
        self, id: str, calls: Sequence[Call], *, stop_on_error: bool
    ) -> Sequence[ExecResult]:
        if not 1 <= len(calls) <= MAX_BATCH:
            raise InvalidError(
                f"commands: {len(calls)} of them, allowed: 1 to {MAX_BATCH}", field="commands"
            )
        for call in calls:  # all of them, before the first has done anything
            await self._jobs.make(self._access.sandboxes.find(id), call)
        results: list[ExecResult] = []
        for call in calls:
            results.append(await self.exec(id, call))
            if stop_on_error and results[-1].exit.exit_code != 0:
                break
        return results


def _without_source(info: ExecInfo) -> ExecInfo:
    """A context's interpreter, which has a whole kernel as its last argument."""
    if not is_kernel(info.id):
        return info
    return replace(info, argv=(*info.argv[:-1], "<kernel>"))


async def _write_code(link: AgentLink, job: Job) -> None:
    if job.program.path is not None:
        await link.write(job.program.path, job.program.content, mode=0o600)


async def _remove_code(link: AgentLink, job: Job) -> None:
    if job.program.path is None:
        return
    try:
        await link.remove(job.program.path)
    except CapsuleError as error:
        log.debug("code not removed", path=job.program.path, reason=error.message)


async def nothing(entry: Entry, exec_id: ExecId, argv: Sequence[str]) -> None:
    pass
