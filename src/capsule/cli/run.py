"""`capsule run`: code in a sandbox of its own, as if it ran here.

main task ── ephemeral service ── sandbox ── exec
  ├─ output: our stdout and stderr, as it comes
  ├─ input task: our stdin, if it is piped (or -i)
  └─ signals: Ctrl-C goes to the program, a second one kills it; SIGTERM and SIGHUP end everything
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from capsule.catalog import load_catalog
from capsule.cli import pipes, show
from capsule.cli.codes import BROKEN_PIPE, SIGNALED, TIMED_OUT
from capsule.cli.local import ephemeral_service
from capsule.cli.source import Choice, Copy, Source, choose, find_copies, find_source
from capsule.config import load_config
from capsule.errors import CapsuleError, InvalidError
from capsule.link import Output
from capsule.model import WORKSPACE, Exit, Reason, Stream
from capsule.service import CreateRequest, ExecCall, RunCall, Sandbox, Service
from capsule.service.live import LiveExec

_LOOK_EVERY = 0.2
_MARGIN = 60.0  # what the sandbox lives beyond its program's timeout


@dataclass(frozen=True, slots=True)
class Job:
    source: str
    args: tuple[str, ...] = ()
    template: str | None = None
    language: str | None = None
    timeout: float | None = None
    limits: Mapping[str, int | float] = field(default_factory=dict)
    provider: str | None = None
    runtime: str | None = None
    files: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    interactive: bool = False
    json: bool = False


def run_job(job: Job) -> int:
    source = find_source(job.source)
    copies = [copy for path in job.files for copy in find_copies(path)]
    return asyncio.run(_main(job, source, copies))


async def _main(job: Job, source: Source, copies: Sequence[Copy]) -> int:
    """Until it ends, or SIGTERM or SIGHUP comes: a cancellation then, so that all is cleaned up."""
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_run(job, source, copies))
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # once: a second one would cancel the cleaning up
            work.cancel()
        ended_by.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGINT, end, signal.SIGINT)  # until there is a program to get it
    try:
        return await work
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return SIGNALED + ended_by[0]


async def _run(job: Job, source: Source, copies: Sequence[Copy]) -> int:
    config = load_config(provider=job.provider)
    catalog = load_catalog(config.templates_dir, data_dir=config.data_dir)
    choice = choose(catalog, source, job.template, job.language)
    timeout = config.exec_timeout if job.timeout is None else job.timeout
    request = CreateRequest(
        template=choice.template.name,
        ttl=min(timeout + _MARGIN, config.max_ttl),
        limits=job.limits or None,
        runtime=job.runtime,
    )
    async with ephemeral_service(config, catalog) as service:
        sandbox = await _create(service, request)
        try:
            for copy in copies:
                await _copy_in(service, sandbox.id, copy)
            options = {"env": job.env, "timeout": timeout, "output_limit": config.max_output_limit}
            call = await _prepare(service, sandbox.id, job, source, choice, options)
            return await _perform(service, sandbox.id, job, source, call)
        finally:
            await service.delete(sandbox.id)


async def _create(service: Service, request: CreateRequest) -> Sandbox:
    """What takes its time (an image is pulled) is told on a terminal meanwhile."""
    creating = asyncio.ensure_future(service.create(request))
    told = ""
    try:
        while not (await asyncio.wait({creating}, timeout=_LOOK_EVERY))[0]:
            for sandbox in service.list():
                if sandbox.progress != told and sys.stderr.isatty():
                    told = sandbox.progress
                    print(f"\r\033[K{told}", end="", file=sys.stderr, flush=True)
    finally:
        if told:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        creating.cancel()
        await asyncio.wait({creating})
    return creating.result()


async def _copy_in(service: Service, id: str, copy: Copy) -> None:
    with copy.source.open("rb") as file:
        await service.files(id).write(copy.target, _chunks(file), mode=copy.mode)


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, 256 * 1024):
        yield chunk


async def _prepare(
    service: Service,
    id: str,
    job: Job,
    source: Source,
    choice: Choice,
    options: dict[str, Any],
) -> ExecCall | RunCall:
    """A script keeps its name, so that its messages name it; bare code goes where `run` puts it."""
    if source.name is None and not job.args:
        try:
            code = source.code.decode()
        except UnicodeDecodeError as error:
            raise InvalidError(f"the code is not UTF-8: {error}") from None
        return RunCall(code, choice.language.name, **options)
    name = source.name or choice.language.filename.format(id="main")
    path = f"{WORKSPACE}/{name}"
    await service.files(id).write(path, source.code)
    command = (part.replace("{file}", path) for part in choice.language.command)
    return ExecCall((*command, *job.args), **options)


async def _perform(
    service: Service, id: str, job: Job, source: Source, call: ExecCall | RunCall
) -> int:
    feeds = not source.from_stdin and (job.interactive or not sys.stdin.isatty())
    stream = await service.start(id, call, stdin_open=feeds)
    async with stream, contextlib.aclosing(Interrupts(service, id, stream)):
        feeder = asyncio.ensure_future(_feed(stream)) if feeds else None
        try:
            kept = await _pass_on(stream, keep=job.json)
        except BrokenPipeError:
            return BROKEN_PIPE
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.wait({feeder})
    assert stream.exit is not None  # the iteration ends with it, or raises
    if job.json:
        show.as_json({**show.exit_fields(stream.exit), **kept})
    return _conclude(stream.exit, job)


class Interrupts:
    """Ctrl-C goes to the program, as it would at a terminal; the second one kills it."""

    def __init__(self, service: Service, id: str, stream: LiveExec) -> None:
        self._service, self._id, self._stream = service, id, stream
        self._tasks: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._pass_on()))

    async def _pass_on(self) -> None:
        with contextlib.suppress(CapsuleError):  # it has just ended
            if len(self._tasks) > 1:
                await self._service.kill(self._id, self._stream.exec_id)
            else:
                await self._stream.signal("INT")

    async def aclose(self) -> None:
        # The program has ended. What is left is to clean up after it, and that is not interrupted.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _feed(stream: LiveExec) -> None:
    with contextlib.suppress(CapsuleError):  # the program does not read, or has ended
        async for data in pipes.read(sys.stdin.fileno()):
            await stream.send(data)
        await stream.send_eof()


async def _pass_on(stream: LiveExec, *, keep: bool) -> dict[str, str]:
    kept = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
    fds = {Stream.STDOUT: sys.stdout.fileno(), Stream.STDERR: sys.stderr.fileno()}
    async for item in stream:
        if not isinstance(item, Output):
            continue
        if keep:
            kept[item.stream] += item.data
        else:
            await pipes.write(fds[item.stream], item.data)
    return {str(name): data.decode("utf-8", "replace") for name, data in kept.items()}


def _conclude(exit: Exit, job: Job) -> int:
    """The program's own exit code; and a word where the platform ended it."""
    match exit.reason:
        case Reason.TIMED_OUT:
            show.problem(
                f"timed out after {exit.duration_ms / 1000:.1f} s",
                hint="give it more with --timeout 10m",
                code="timed_out",
            )
            return TIMED_OUT
        case Reason.OOM_KILLED:
            show.problem(
                "killed: out of memory", hint="give it more with --memory 1GiB", code="oom_killed"
            )
    if exit.stdout_truncated or exit.stderr_truncated:
        show.problem(
            "output was cut off at the limit",
            hint="raise CAPSULE_OUTPUT_LIMIT",
            code="output_limit",
        )
    return exit.exit_code
