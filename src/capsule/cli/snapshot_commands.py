"""`capsule snapshot …`, `fork`, `steps`, `diff` and `undo`, with their options."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.cli import options as o

snapshot = typer.Typer(no_args_is_help=True, help="Files of sandboxes, kept under a name.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The snapshot.")]


@snapshot.command("create")
def snapshot_create(
    id: o.SandboxId,
    name: Name,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="K=V", help="A label; repeatable.")
    ] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Keep a sandbox's files, as they are at one moment, under a name."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    labels = o.pairs(metadata, option="--metadata")
    return snapshots.create(Server(url, api_key), id, name, labels, as_json=json)


@snapshot.command("ls")
def snapshot_ls(url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False) -> int:
    """List the snapshots."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.list_snapshots(Server(url, api_key), as_json=json)


@snapshot.command("rm")
def snapshot_rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Snapshots.")],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Remove snapshots. Sandboxes that started from them go on."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.remove(Server(url, api_key), names, as_json=json)


@snapshot.command("export")
def snapshot_export(
    name: Name,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A tar to write; - is stdout.")],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Write a snapshot into a file, to keep it elsewhere or to import it into another server."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.export(Server(url, api_key), name, file, as_json=json)


@snapshot.command("import")
def snapshot_import(
    name: Name,
    file: Annotated[str, typer.Argument(metavar="FILE", help="An exported one; - is stdin.")],
    template: Annotated[
        str | None, typer.Option(help="Instead of the template that it was made with.")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="Instead of its own.")] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Make a snapshot from an exported one, with gzip around it or without."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    server = Server(url, api_key)
    return snapshots.import_(server, name, file, template, provider, as_json=json)


def fork(
    id: o.SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", help="How many, up to 20.")] = 1,
    at: Annotated[int | None, typer.Option(help="From the files of this step.")] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Make copies of a sandbox's files, each in a sandbox of its own, and print their ids."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.fork(Server(url, api_key), id, count, at, as_json=json)


def steps(
    id: o.SandboxId, url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False
) -> int:
    """List the restore points of a sandbox that was created with --checkpoint."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.steps(Server(url, api_key), id, as_json=json)


def diff(
    id: o.SandboxId,
    old: Annotated[int, typer.Argument(metavar="FROM", help="A step.")],
    new: Annotated[int | None, typer.Argument(metavar="[TO]", help="Default: the last.")] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """What changed between two steps: A added, M modified, D removed."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.diff(Server(url, api_key), id, old, new, as_json=json)


def undo(
    id: o.SandboxId,
    to: Annotated[int, typer.Argument(metavar="STEP", help="Where to go back to.")],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Go back to the files of a step. Programs are ended, later steps forgotten."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.undo(Server(url, api_key), id, to, as_json=json)
