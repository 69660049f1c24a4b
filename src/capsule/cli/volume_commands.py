"""`capsule volume …`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli import options as o
from capsule.cli import show

if TYPE_CHECKING:
    from capsule_sdk import VolumeInfo

volume = typer.Typer(no_args_is_help=True, help="Folders that outlive sandboxes.")


def parse(values: list[str] | None) -> list[dict[str, object]] | None:
    """["data:/workspace/data:ro"] as the API has it."""
    found: list[dict[str, object]] = []
    for value in values or []:
        name, _, rest = value.partition(":")
        path, _, mode = rest.partition(":")
        if not name or not path or mode not in ("", "ro", "rw"):
            text = f"--volume {value!r}: write it like data:/workspace/data or data:/workspace/d:ro"
            raise typer.BadParameter(text)
        found.append({"name": name, "path": path, "read_only": mode == "ro"})
    return found or None


def _fields(info: VolumeInfo) -> dict[str, object]:
    return {**dataclasses.asdict(info), "created_at": info.created_at.isoformat()}


@volume.command("create")
def volume_create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    size: o.VolumeSize = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Make an empty volume."""
    from capsule.cli.remote import Server

    with Server(url, api_key).client() as client:
        made = client.volumes.create(name, size=size)
    if json:
        show.as_json(_fields(made))
    else:
        print(made.name)
    return 0


@volume.command("ls")
def volume_ls(url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False) -> int:
    """List the volumes."""
    from capsule.cli.remote import Server

    with Server(url, api_key).client() as client:
        found = client.volumes.list()
    if json:
        show.as_json({"volumes": [_fields(each) for each in found]})
    else:
        rows_of = [
            (
                each.name,
                each.provider,
                show.size(each.size),
                show.size(each.used),
                each.created_at.isoformat(sep=" ", timespec="seconds"),
            )
            for each in found
        ]
        show.table(("name", "provider", "size", "used", "created"), rows_of, empty="no volumes")
    return 0


@volume.command("rm")
def volume_rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Remove volumes, with all that is in them."""
    from capsule.cli.remote import Server

    with Server(url, api_key).client() as client:
        for name in names:
            client.volumes.delete(name)
            if not json:
                print(name)
    if json:
        show.as_json({"deleted": list(names)})
    return 0
