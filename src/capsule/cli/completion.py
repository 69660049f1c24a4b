"""Shell completion: the scripts, and the answers when a shell asks for candidates."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

VARIABLE = "_CAPSULE_COMPLETE"  # set by the scripts when they ask


def shells() -> tuple[str, ...]:
    return ("bash", "zsh", "fish")


def prepare() -> None:
    """Teach typer its own shells: it does so by itself only with its two extra options."""
    from typer.completion import get_completion_inspect_parameters

    get_completion_inspect_parameters()


def script(shell: str) -> str:
    import typer.main

    from capsule.cli.app import app

    prepare()
    command: Any = typer.main.get_command(app)
    text = io.StringIO()
    os.environ[VARIABLE] = f"source_{shell}"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            command.main([], prog_name="capsule", complete_var=VARIABLE)
    finally:
        del os.environ[VARIABLE]
    return text.getvalue().strip()
