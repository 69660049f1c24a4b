"""One piece of code, or one program, in a session's sandbox."""

from __future__ import annotations

from capsule.errors import NotSupportedError
from capsule.model import Exit, Reason
from capsule.service import ContextRun, ExecCall, ExecResult, RunCall, RunResult, Service
from capsule.sessions.records import Outcome, Session

OK = "ok"
_STATUS = {
    Reason.TIMED_OUT: "timed_out",
    Reason.CANCELLED: "interrupted",
}


async def run_code(
    service: Service, session: Session, code: str, language: str | None, timeout: float | None
) -> Outcome:
    """In the session's live interpreter, as in a notebook; in a language that has none, as a
    program of its own."""
    language = language or session.language
    try:
        result = await service.contexts.run(
            session.sandbox_id, ContextRun(code, None, language, timeout)
        )
    except NotSupportedError:
        call = RunCall(code, language, timeout=timeout, session="session")
        return of_exec(await service.run(session.sandbox_id, call))
    return _of_run(result)


async def run_program(
    service: Service,
    session: Session,
    argv: tuple[str, ...],
    *,
    stdin: bytes = b"",
    timeout: float | None = None,
) -> Outcome:
    call = ExecCall(argv, stdin=stdin, timeout=timeout)
    return of_exec(await service.exec(session.sandbox_id, call))


def of_exec(result: ExecResult) -> Outcome:
    exit: Exit = result.exit
    return Outcome(
        status=_STATUS.get(exit.reason, OK if exit.exit_code == 0 else "error"),
        stdout=result.stdout,
        stderr=result.stderr,
        exit_code=exit.exit_code,
        reason=str(exit.reason),
        duration_ms=exit.duration_ms,
        stdout_truncated=exit.stdout_truncated,
        stderr_truncated=exit.stderr_truncated,
    )


def _of_run(result: RunResult) -> Outcome:
    end = result.end
    return Outcome(
        status=end.status,
        stdout=result.stdout,
        stderr=result.stderr + _told(result),
        results=tuple(result.results),
        error=result.error,
        exit_code=end.exit_code,
        reason=end.reason,
        duration_ms=end.duration_ms,
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
    )


def _told(result: RunResult) -> bytes:
    """What a terminal would show of an exception: a client that reads nothing but the two streams
    learns of it too."""
    if result.error is None:
        return b""
    error = result.error
    text = error.traceback or f"{error.name}: {error.value}"
    start = "\n" if result.stderr and not result.stderr.endswith(b"\n") else ""
    return f"{start}{text.rstrip()}\n".encode("utf-8", "replace")
