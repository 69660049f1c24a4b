"""From a call to what the agent is asked, with everything checked."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from capsule.config import Config
from capsule.errors import TooLargeError
from capsule.model import MIB, ROOT, ExecId, ExecRequest
from capsule.service import validate
from capsule.service.code import Program, command, program
from capsule.service.entry import ROOT_HOME, Entry, as_root
from capsule.service.sessions import Sessions
from capsule.service.values import ExecCall, RunCall

Call = ExecCall | RunCall

MAX_STDIN = 64 * 1024 * 1024
MAX_SECONDS = 10 * 365 * 86400.0
FLOW = 2 * MIB  # kept of each stream of an exec that flows; twice what a pipe holds at most


@dataclass(slots=True)
class Job:
    request: ExecRequest
    stdin: bytes
    program: Program
    session: str | None = None
    cwd_is_carried: bool = False  # it comes from the session, not from the caller


class _Place(NamedTuple):
    """Where a program runs and with what."""

    env: dict[str, str]
    cwd: str
    cwd_is_carried: bool
    user: str


class Jobs:
    def __init__(self, config: Config, sessions: Sessions) -> None:
        self._config = config
        self._sessions = sessions

    async def make(
        self,
        entry: Entry,
        call: Call,
        *,
        stdin_open: bool = False,
        tty: tuple[int, int] | None = None,
        flow: bool = False,
    ) -> Job:
        """Raises InvalidError, NotFoundError (the language), TooLargeError. `flow`: see
        `Service.start`."""
        exec_id = _exec_id(entry, call.idempotency_key)
        code = _program(entry, call, exec_id, session=call.session is not None and tty is None)
        rows, cols = tty or (24, 80)
        validate.screen(rows, cols)
        env, cwd, carried, user = await self._place(entry, call)
        request = ExecRequest(
            argv=code.argv,
            id=exec_id,
            env=env,
            cwd=cwd,
            user=user,
            timeout=_unbounded(call.timeout) if flow else self._timeout(call.timeout),
            stdin=stdin_open or bool(call.stdin),
            tty=tty is not None,
            rows=rows,
            cols=cols,
            output_limit=FLOW if flow else self._output_limit(call.output_limit),
            keep="flow" if flow else "head",
            on_limit=validate.choice("on_limit", call.on_limit, ("truncate", "kill")),
            carry=code.reports,
        )
        return Job(request, check_stdin(call.stdin), code, call.session, carried)

    async def _place(self, entry: Entry, call: Call) -> _Place:
        env, cwd, carried = entry.environ, call.cwd, False
        user = validate.user(call.user, entry.template.user.name)
        if call.session is not None:
            session = await self._sessions.get(entry, call.session)
            env = session.apply(env)
            if cwd is None and session.cwd is not None:
                cwd, carried = session.cwd, True
        if user == ROOT:
            env = as_root(env)
        if call.env:
            validate.env(call.env)
            env = {**env, **call.env}
        if cwd is None:
            cwd = ROOT_HOME if user == ROOT else entry.template.user.home
        return _Place(env, validate.path(cwd, "cwd"), carried, user)

    def _timeout(self, asked: float | None) -> float:
        if asked is None:
            return self._config.exec_timeout
        return validate.seconds("timeout", asked, 0.001, self._config.max_exec_timeout)

    def _output_limit(self, asked: int | None) -> int:
        if asked is None:
            return self._config.output_limit
        return validate.count("output_limit", asked, 1, self._config.max_output_limit)


def _unbounded(asked: float | None) -> float:
    return 0.0 if asked is None else validate.seconds("timeout", asked, 0.001, MAX_SECONDS)


def _exec_id(entry: Entry, key: str | None) -> ExecId:
    if key is None:
        return ExecId("e" + secrets.token_hex(8))
    validate.key(key)
    mark = hashlib.blake2b(f"{entry.id}\0{key}".encode(), digest_size=16)
    return ExecId("k" + mark.hexdigest())


def _program(entry: Entry, call: Call, exec_id: ExecId, *, session: bool) -> Program:
    if isinstance(call, ExecCall):
        return command(validate.argv(call.cmd), session=session)
    return program(entry.template, call.language, call.code, exec_id, session=session)


def check_stdin(data: bytes) -> bytes:
    if len(data) > MAX_STDIN:
        raise TooLargeError(
            f"stdin: {len(data)} bytes, limit {MAX_STDIN}",
            hint="write it to a file, or send it piece by piece to an exec that runs",
            field="stdin",
            limit=MAX_STDIN,
        )
    return data
