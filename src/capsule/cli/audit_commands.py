"""`capsule audit …`: the log of executions, on the server's own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli import options as o
from capsule.cli import show
from capsule.cli.codes import FAILED

audit = typer.Typer(no_args_is_help=True, help="Prove that the log of executions was not changed.")
SHOWN = 20


@audit.command("verify")
def audit_verify(
    storage: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The server's storage_dir; by default its configuration's."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A head that was printed before: it must be in the log."),
    ] = None,
    json: o.Json = False,
) -> int:
    """Check the hash chain of the execution log, of a server that runs or does not. Prints how many
    entries there are and the last one's hash, the head; exits with 1 if anything was changed."""
    from capsule.config import load_config
    from capsule.errors import NotFoundError
    from capsule.sessions.ledger import verify_file

    config = load_config()
    folder = storage or config.storage_dir or config.data_dir / "storage"
    path = (folder / "sessions.db").absolute()
    if not path.exists():
        raise NotFoundError(f"there is no log: {path}", hint="name the folder with --storage")
    verdict = verify_file(path, head)
    if json:
        show.as_json(
            {
                "entries": verdict.entries,
                "head": verdict.head,
                "broken": [each._asdict() for each in verdict.broken],
            }
        )
    else:
        for each in verdict.broken[:SHOWN]:
            print(f"entry {each.seq}: {each.problem}")
        if len(verdict.broken) > SHOWN:
            print(f"… and {len(verdict.broken) - SHOWN} more")
        print(f"{verdict.entries} entries, head {verdict.head}")
        print("the log was changed" if verdict.broken else "nothing was changed")
    return FAILED if verdict.broken else 0
