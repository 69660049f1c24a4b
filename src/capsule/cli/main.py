"""`capsule`: the entry point, and the one place where an error becomes words and an exit code.

Exit codes: 0 fine, 1 the platform failed, 2 wrong usage, 130 interrupted, 141 our reader has left.
`run` and `exec` exit with the program's own code; 124 when it ran into its timeout, 125 when the
platform failed.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Any, NoReturn

from capsule.cli import show
from capsule.cli.codes import BROKEN_PIPE, FAILED, INTERRUPTED, NOT_RUN, USAGE
from capsule.errors import CapsuleError

_RUNNERS = ("run", "exec")


def main() -> NoReturn:
    if sys.argv[1:2] != ["serve"]:
        # What is loaded at the start is no garbage; to look for some takes 15 ms of `capsule run`.
        gc.set_threshold(50_000)
    _mend_streams()
    sys.exit(execute(sys.argv[1:]))


def _mend_streams() -> None:
    """A standard stream that is closed is as good as /dev/null; and text of a sandbox that this
    terminal's encoding lacks is escaped, not a reason to stop."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def execute(args: list[str]) -> int:
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the root: whatever it is becomes words and an exit code
        if isinstance(error, OSError):
            _drop_output()  # it may be what could not be written
        return _explain(error, args)


def _drop_output() -> None:
    """What cannot be written must not be tried once more at exit, where it becomes a code of
    Python's own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception, args: list[str]) -> int:
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    failed = NOT_RUN if args[:1] and args[0] in _RUNNERS else FAILED
    if _is_usage(error):
        return _explain_usage(error, as_json)
    if is_ours(error):
        show.failure(error, as_json=as_json)
    elif isinstance(error, OSError) and error.strerror:  # of a local file, mostly
        where = f"{error.filename}: " if error.filename else ""
        show.problem(f"{where}{error.strerror}", hint=None, code="local", as_json=as_json)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return failed


def _dispatch(args: list[str]) -> int:
    if _is_plain_run(args):
        return _run(args[1])
    import typer.main

    from capsule.cli import completion
    from capsule.cli.app import app

    if completion.VARIABLE in os.environ:
        completion.prepare()
    command: Any = typer.main.get_command(app)
    try:
        result = command.main(args, prog_name="capsule", standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None  # typer makes it an exit with 1
        raise
    return result if isinstance(result, int) else 0


def _is_plain_run(args: list[str]) -> bool:
    return len(args) == 2 and args[0] == "run" and (args[1] == "-" or args[1][:1] != "-")


def _run(source: str) -> int:
    """`capsule run CODE` has no options to parse: it need not wait 60 ms for a parser to load."""
    show.quiet_logs()
    from capsule.cli.run import Job, run_job

    return run_job(Job(source))


def is_ours(error: Exception) -> bool:
    """The server's errors and the SDK's have the same shape; the SDK is loaded only when used."""
    sdk = sys.modules.get("capsule_sdk.errors")
    return isinstance(error, CapsuleError) or (
        sdk is not None and isinstance(error, sdk.CapsuleError)
    )


def _is_usage(error: Exception) -> bool:
    # typer has brought its own copy of click since 0.20, so the class cannot be named here.
    return hasattr(error, "format_message") or type(error).__name__ == "Abort"


def _explain_usage(error: Any, as_json: bool) -> int:
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        return USAGE
    where = f"{context.command_path} --help" if context else "capsule --help"
    message = error.format_message().rstrip(".").removeprefix("Invalid value: ")
    show.problem(
        message[:1].lower() + message[1:], hint=f"see `{where}`", code="usage", as_json=as_json
    )
    return USAGE
