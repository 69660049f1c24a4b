"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.settings import parse_bytes, parse_seconds


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise typer.BadParameter(f"not a size: {text!r}; write it like 256MiB") from None


def seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError:
        raise typer.BadParameter(f"not a time: {text!r}; write it like 30, 90s or 10m") from None


def pairs(values: list[str] | None, *, option: str = "--env") -> dict[str, str]:
    """["A=1", "B=x=y"] → {"A": "1", "B": "x=y"}."""
    result = {}
    for value in values or []:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{option} {value!r}: write it like NAME=value")
        result[name] = text
    return result


def complete_template(incomplete: str) -> list[str]:
    from capsule.catalog import load_catalog
    from capsule.config import load_config
    from capsule.errors import CapsuleError

    try:
        config = load_config()
        names = load_catalog(config.templates_dir, data_dir=config.data_dir)
    except CapsuleError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_sandbox(incomplete: str) -> list[str]:
    """Ids of the running server's sandboxes. Completion must never hang or complain."""
    import signal

    from capsule_sdk import CapsuleClient, CapsuleError

    signal.alarm(2)  # nobody waits longer for a proposal: let it end this process
    try:
        with CapsuleClient(retries=0) as client:
            return [s.id for s in client.list() if s.id.startswith(incomplete)]
    except CapsuleError:
        return []


Sandboxes = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Sandboxes.", autocompletion=complete_sandbox),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="The server. Default: CAPSULE_URL, or http://localhost:8080.", metavar="URL"
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", help="A key, where it wants one. Default: CAPSULE_API_KEY.", metavar="KEY"
    ),
]
SandboxId = Annotated[
    str, typer.Argument(metavar="ID", help="The sandbox.", autocompletion=complete_sandbox)
]
Template = Annotated[
    str | None,
    typer.Option("--template", "-t", help="What to start from.", autocompletion=complete_template),
]
ImageProvider = Annotated[
    str | None,
    typer.Option(
        "--provider", help="Whose image: docker or local.", show_default="the configured one"
    ),
]
Provider = Annotated[
    str | None,
    typer.Option("--provider", help="Who makes it: local or docker.", metavar="NAME"),
]
Runtime = Annotated[
    str | None,
    typer.Option("--runtime", help="Of the Docker Engine, e.g. runsc.", metavar="NAME"),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", parser=seconds, metavar="TIME", help="End it after this time."),
]
Ttl = Annotated[
    float | None,
    typer.Option("--ttl", parser=seconds, metavar="TIME", help="How long it lives: 600, 90s, 2h."),
]
IdleTimeout = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout", parser=seconds, metavar="TIME", help="End it after this time unused."
    ),
]
Memory = Annotated[
    int | None, typer.Option("--memory", "-m", parser=size, metavar="SIZE", help="E.g. 256MiB.")
]
Disk = Annotated[int | None, typer.Option("--disk", parser=size, metavar="SIZE", help="E.g. 1GiB.")]
VolumeSize = Annotated[
    int | None,
    typer.Option("--size", parser=size, metavar="SIZE", help="The most it holds, e.g. 1GiB."),
]
Cpus = Annotated[float | None, typer.Option("--cpus", help="Cores, e.g. 0.5.")]
Processes = Annotated[int | None, typer.Option("--processes", help="At most this many.")]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable; repeatable.")
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", help="Working directory inside.")]
Program = Annotated[
    list[str], typer.Argument(metavar="CMD...", help="The program and its arguments.")
]
