"""`capsule audit …`: the log of executions and the trail, on the server's own machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli import options as o
from capsule.cli import show
from capsule.cli.codes import FAILED

if TYPE_CHECKING:
    from capsule.chain import Verdict

    Verify = Callable[[Path, str | None], Verdict]

audit = typer.Typer(no_args_is_help=True, help="Prove that nothing in the logs was changed.")
SHOWN = 20


@audit.command("verify")
def audit_verify(
    storage: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The server's storage_dir; by default its configuration's."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The server's data_dir; by default its configuration's."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A head that was printed before: it must be in the log."),
    ] = None,
    json: o.Json = False,
) -> int:
    """Check the hash chains of the execution log and of the trail, of a server that runs or not.
    Prints how many entries there are and the last one's hash, the head; exits with 1 if anything
    was changed."""
    from capsule.audit import trail
    from capsule.config import load_config
    from capsule.errors import NotFoundError
    from capsule.sessions import ledger

    config = load_config()
    folder = storage or config.storage_dir or config.data_dir / "storage"
    logs = {
        "executions": ((folder / "sessions.db").absolute(), ledger.verify_file),
        "trail": ((data or config.data_dir).absolute() / trail.FILE, trail.verify_file),
    }
    found = {name: each for name, each in logs.items() if each[0].exists()}
    if not found:
        places = " nor ".join(str(path) for path, _ in logs.values())
        hint = "name the folders with --storage and --data"
        raise NotFoundError(f"there is no log: neither {places}", hint=hint)
    verdicts = {name: verify(path, None) for name, (path, verify) in found.items()}
    if head is not None:
        verdicts = _with_head(found, verdicts, head)
    if json:
        show.as_json({name: _as_json(verdict) for name, verdict in verdicts.items()})
    else:
        for name, verdict in verdicts.items():
            _tell(name, verdict)
    return FAILED if any(verdict.broken for verdict in verdicts.values()) else 0


def _with_head(
    found: Mapping[str, tuple[Path, Verify]], verdicts: Mapping[str, Verdict], head: str
) -> dict[str, Verdict]:
    """The head must be in one of them; if it is in none, all are told to lack it."""
    again = {name: verify(path, head) for name, (path, verify) in found.items()}
    if any(again[name] == verdicts[name] for name in found):
        return dict(verdicts)
    return again


def _as_json(verdict: Verdict) -> dict[str, object]:
    broken = [each._asdict() for each in verdict.broken]
    return {"entries": verdict.entries, "head": verdict.head, "broken": broken}


def _tell(name: str, verdict: Verdict) -> None:
    for each in verdict.broken[:SHOWN]:
        print(f"{name}, entry {each.seq}: {each.problem}")
    if len(verdict.broken) > SHOWN:
        print(f"… and {len(verdict.broken) - SHOWN} more")
    judged = "it was changed" if verdict.broken else "nothing was changed"
    print(f"{name}: {verdict.entries} entries, head {verdict.head}: {judged}")
