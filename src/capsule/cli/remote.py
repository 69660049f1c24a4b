"""Commands that talk to a server: create, ls, exec, pause, resume, reset, rm, pool."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from capsule.cli import show
from capsule.cli.codes import FAILED, TIMED_OUT
from capsule_sdk import (
    Capsule,
    CapsuleClient,
    CapsuleError,
    ExecStream,
    Exit,
    GoneError,
    NotFoundError,
    Output,
    SandboxInfo,
    ShelfInfo,
    UnauthenticatedError,
    UnavailableError,
)

_CHUNK = 64 * 1024


class Server(NamedTuple):
    url: str | None
    api_key: str | None

    def client(self) -> CapsuleClient:
        return CapsuleClient(self.url, api_key=self.api_key)


class Program(NamedTuple):
    cmd: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    timeout: float | None
    session: str | None
    tty: bool
    interactive: bool


def info_fields(info: SandboxInfo) -> dict[str, Any]:
    body = dataclasses.asdict(info)
    for name in ("created_at", "expires_at"):
        body[name] = body[name].isoformat() if body[name] else None
    return body


def create(server: Server, template: str, options: Mapping[str, Any], *, as_json: bool) -> int:
    given: Any = {name: value for name, value in options.items() if value is not None}
    with server.client() as client:
        capsule = client.create(template, **given)
    if as_json:
        show.as_json(info_fields(capsule.info))
        return 0
    print(capsule.id)
    left = _left(capsule.info)
    show.note(f"lives for {left}; open a shell with: capsule shell {capsule.id}")
    return 0


def list_sandboxes(server: Server, *, quiet: bool, as_json: bool) -> int:
    with server.client() as client:
        found = [capsule.info for capsule in client.list()]
    if as_json:
        show.as_json({"sandboxes": [info_fields(info) for info in found]})
    elif quiet:
        for info in found:
            print(info.id)
    else:
        columns = ("id", "template", "state", "age", "ends in", "isolation", "memory", "cpus")
        show.table(columns, [_row(info) for info in found], empty="no sandboxes")
    return 0


def _row(info: SandboxInfo) -> Sequence[str]:
    age = datetime.datetime.now(datetime.UTC) - info.created_at
    limits = info.limits
    return (
        info.id,
        info.template,
        info.state,
        show.duration(age.total_seconds()),
        _left(info),
        info.isolation or "-",
        show.size(limits.memory) if limits else "-",
        f"{limits.cpus:g}" if limits else "-",
    )


def _left(info: SandboxInfo) -> str:
    if info.expires_at is None:
        return "-"
    left = info.expires_at - datetime.datetime.now(datetime.UTC)
    return show.duration(left.total_seconds())


def remove(server: Server, ids: Sequence[str], *, all: bool, as_json: bool) -> int:
    """Every one is tried, and each failure told."""
    deleted: list[str] = []
    failed: list[dict[str, str]] = []
    with server.client() as client:
        for id in [capsule.id for capsule in client.list()] if all else ids:
            try:
                client.get(id).delete()
            except (UnavailableError, UnauthenticatedError):
                raise  # it is the same for all
            except CapsuleError as error:
                if all and isinstance(error, NotFoundError | GoneError):
                    continue  # it ended meanwhile
                failed.append({"id": id, "code": error.code, "message": error.message})
                show.failure(error)
            else:
                deleted.append(id)
                if not as_json:
                    print(id)
    if as_json:
        show.as_json({"deleted": deleted, "failed": failed})
    return FAILED if failed else 0


def shift(server: Server, ids: Sequence[str], verb: str, *, as_json: bool) -> int:
    """Pause or resume each of them; the first that cannot be ends it."""
    with server.client() as client:
        infos = []
        for id in ids:
            capsule = client.get(id)
            infos.append(capsule.pause() if verb == "pause" else capsule.resume())
            if not as_json:
                print(id)
    if as_json:
        show.as_json({"sandboxes": [info_fields(info) for info in infos]})
    return 0


def reset(server: Server, id: str, *, as_json: bool) -> int:
    with server.client() as client:
        info = client.get(id).reset()
    if as_json:
        show.as_json(info_fields(info))
    else:
        print(id)
    return 0


def pool(server: Server, *, as_json: bool) -> int:
    with server.client() as client:
        found = client.pool()
    if as_json:
        show.as_json(dataclasses.asdict(found))
        return 0
    columns = ("template", "provider", "ready", "target", "max", "hits", "misses", "memory")
    show.table(columns, [_shelf_row(shelf) for shelf in found.shelves], empty="no pools")
    used, most = show.size(found.memory_bytes), show.size(found.max_memory_bytes)
    show.note(f"{found.waiting} wait, {found.launching} being launched, {used} of {most} used")
    return 0


def _shelf_row(shelf: ShelfInfo) -> Sequence[str]:
    where = f"{shelf.provider}:{shelf.runtime}" if shelf.runtime else shelf.provider
    numbers = (shelf.ready, shelf.target, shelf.max, shelf.hits, shelf.misses)
    return (shelf.template, where, *map(str, numbers), show.size(shelf.memory_bytes))


def exec_program(server: Server, id: str, program: Program, *, as_json: bool) -> int:
    if program.tty:
        from capsule.cli.shell import exec_on_terminal

        return exec_on_terminal(server, id, program)
    with server.client() as client:
        stream = _start(client.get(id), program)
        with _interrupts(stream):
            if not as_json:
                return conclude(_pass_on(stream))
            result = stream.wait()
    show.as_json(dataclasses.asdict(result))
    return TIMED_OUT if result.timed_out else result.exit_code


def _start(capsule: Capsule, program: Program) -> ExecStream:
    fields = ("env", "cwd", "timeout", "session")
    options: Any = {name: x for name in fields if (x := getattr(program, name)) is not None}
    feeds = program.interactive or not sys.stdin.isatty()
    if program.session is not None:
        # What a session learns comes at the end, on the connection that started the program.
        data = sys.stdin.buffer.read() if feeds else b""
        return capsule.stream(program.cmd, stdin=data, **options)
    stream = capsule.start(program.cmd, stdin_open=feeds, **options)
    if feeds:
        threading.Thread(target=_feed, args=(stream,), daemon=True).start()
    return stream


def _feed(stream: ExecStream) -> None:
    with contextlib.suppress(CapsuleError, OSError):  # it does not read, or we have nothing to say
        while data := os.read(0, _CHUNK):
            stream.send_input(data)
        stream.close_input()


def _pass_on(stream: ExecStream) -> Exit:
    try:
        for event in stream:
            if isinstance(event, Output):
                _write(2 if event.stream == "stderr" else 1, event.data)
    except BrokenPipeError:
        _kill(stream, "KILL")  # as SIGPIPE would, did it run here: nobody reads on
        raise
    assert stream.exit is not None  # the iteration ends with it, or raises
    return stream.exit


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _interrupts(stream: ExecStream) -> Any:
    """Ctrl-C goes to the program; the second one kills it; SIGTERM leaves it running."""
    count = 0

    def interrupt(*_: object) -> None:
        nonlocal count
        count += 1
        name = "INT" if count == 1 else "KILL"
        # In a thread: the connection in use here may be in the middle of a call.
        threading.Thread(target=_kill, args=(stream, name), daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(stream: ExecStream, name: str) -> None:
    with contextlib.suppress(CapsuleError):
        stream.kill(name)


def conclude(exit: Exit) -> int:
    """The program's own exit code; and a word where the platform ended it."""
    match exit.reason:
        case "timed_out":
            seconds = exit.duration_ms / 1000
            hint = "give it more with --timeout 10m"
            show.problem(f"timed out after {seconds:.1f} s", hint=hint, code="timed_out")
            return TIMED_OUT
        case "oom_killed":
            hint = "create the sandbox with more --memory"
            show.problem("killed: out of memory", hint=hint, code="oom_killed")
    if exit.stdout_truncated or exit.stderr_truncated:
        show.problem("output was cut off at the limit", hint=None, code="output_limit")
    return exit.exit_code
