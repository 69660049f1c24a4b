"""How an exec is asked for, and what its refusal means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capsule.errors import CapsuleError, ForbiddenError, InvalidError, NotFoundError
from capsule.link.conversation import Explain
from capsule.link.errors_map import printable, to_error
from capsule.model import ExecRequest


def exec_body(request: ExecRequest) -> dict[str, Any]:
    return {
        **({"user": request.user} if request.user else {}),
        "op": "exec",
        "id": request.id,
        "argv": request.argv,
        "env": dict(request.env),
        "cwd": request.cwd,
        "timeout": request.timeout,
        "stdin": request.stdin,
        "tty": request.tty,
        "rows": request.rows,
        "cols": request.cols,
        "limit": request.output_limit,
        "keep": request.keep,
        "on_limit": request.on_limit,
        "carry": request.carry,
    }


def explain_exec(request: ExecRequest) -> Explain:
    """An ERROR for this request, said in its own words: which program, which directory."""

    def explain(body: Mapping[str, Any]) -> CapsuleError:
        error = to_error(body, exec_id=request.id)
        stage = error.details.get("stage")
        if stage == "chdir":
            return _named(error, _CWD_PROBLEMS, "working directory", request.cwd)
        if stage == "exec":
            program = request.argv[0] if request.argv else ""
            return _named(error, _PROGRAM_PROBLEMS, "program", program)
        return error

    return explain


_CWD_PROBLEMS = {
    NotFoundError: ("not found", "create it first, or pass another cwd"),
    ForbiddenError: ("not accessible", "it must be accessible to the sandbox's user"),
    InvalidError: ("not a directory", "pass another cwd"),
}
_PROGRAM_PROBLEMS = {
    NotFoundError: ("not found", "check the name, and PATH in env"),
    ForbiddenError: ("not executable", "make it executable (mode 755), or run its interpreter"),
    InvalidError: ("not a program this machine can run", "name its interpreter"),
}


def _named(
    error: CapsuleError,
    problems: Mapping[type[CapsuleError], tuple[str, str]],
    what: str,
    value: str,
) -> CapsuleError:
    if type(error) not in problems:
        return error
    problem, hint = problems[type(error)]
    return type(error)(f"{what} {problem}: {printable(value)}", hint=hint, **error.details)
