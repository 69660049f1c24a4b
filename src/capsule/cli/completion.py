"""Shell completion scripts, as typer itself would install them."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

_VARIABLE = "_CAPSULE_COMPLETE"


def shells() -> tuple[str, ...]:
    return ("bash", "zsh", "fish")


def script(shell: str) -> str:
    import typer.completion
    import typer.main

    from capsule.cli.app import app

    typer.completion.completion_init()
    command: Any = typer.main.get_command(app)
    text = io.StringIO()
    os.environ[_VARIABLE] = f"source_{shell}"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            command.main([], prog_name="capsule", complete_var=_VARIABLE)
    finally:
        del os.environ[_VARIABLE]
    return text.getvalue().strip()
