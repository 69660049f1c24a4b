"""`capsule snapshot …` and `capsule fork`, with their options."""

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


def fork(
    id: o.SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", help="How many, up to 20.")] = 1,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Make copies of a sandbox's files, each in a sandbox of its own, and print their ids."""
    from capsule.cli import snapshots
    from capsule.cli.remote import Server

    return snapshots.fork(Server(url, api_key), id, count, as_json=json)
