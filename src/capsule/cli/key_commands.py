"""`capsule key …`: at a server that is named, or else in the data directory of this machine's, be
it running or not."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli import options as o
from capsule.cli import show

if TYPE_CHECKING:
    from capsule.service.accounts import AccountFile, Key

key = typer.Typer(no_args_is_help=True, help="API keys.")

Tenant = Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Whose.")]


@key.command("create")
def key_create(
    tenant: Tenant = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help="read, run or admin; repeatable."),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What it is for, to tell it by.")] = "",
    expires: Annotated[
        float | None,
        typer.Option("--expires", parser=o.seconds, metavar="TIME", help="Its life: 12h, 90d."),
    ] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Make a key and print it. It is not stored, and cannot be shown again.

    Without --scope it may run, and so also read. With --url or CAPSULE_URL the server makes it,
    for an admin; otherwise it is written into the data directory, and a server there takes it
    within seconds.
    """
    scopes = tuple(scope or ("run",))
    if server := _server(url, api_key):
        with server.client() as client:
            info = client.keys.create(tenant=tenant, scopes=scopes, name=name, ttl=expires)
        token, fields = info.key, _remote(info)
    else:
        now = time.time()
        made = _file().create_key(
            tenant=tenant or "default",
            scopes=scopes,
            name=name,
            expires=None if expires is None else now + expires,
            now=now,
        )
        token, fields = made.token, _local(made.key)
    if json:
        show.as_json({**fields, "key": token})
        return 0
    print(token)
    show.note(f"key {fields['id']} of tenant {fields['tenant']}; keep it, it is not shown again")
    return 0


@key.command("list")
def key_list(
    tenant: Tenant = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """List the keys, also those that are over."""
    if server := _server(url, api_key):
        with server.client() as client:
            rows = [_remote(info) for info in client.keys.list(tenant=tenant)]
    else:
        rows = [_local(each) for each in _file().keys(tenant)]
    if json:
        show.as_json({"keys": rows})
        return 0
    columns = ("id", "tenant", "scopes", "state", "used_at", "expires_at", "name")
    shown = [tuple(_cell(row[column]) for column in columns) for row in rows]
    titles = ("id", "tenant", "scopes", "state", "used", "expires", "name")
    show.table(titles, shown, empty="no keys")
    return 0


@key.command("revoke")
def key_revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID...")],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Revoke keys: by a server at once, in the data directory within seconds."""
    server = _server(url, api_key)
    for id in ids:
        if server:
            with server.client() as client:
                client.keys.revoke(id)
        else:
            _file().revoke_key(id, time.time())
        if not json:
            print(id)
    if json:
        show.as_json({"revoked": ids})
    return 0


def _server(url: str | None, api_key: str | None) -> Any:
    if not (url or os.environ.get("CAPSULE_URL")):
        return None
    from capsule.cli.remote import Server

    return Server(url, api_key)


def _file() -> AccountFile:
    from capsule.config import load_config
    from capsule.service.accounts import AccountFile

    return AccountFile(load_config().data_dir)


def _local(key: Key) -> dict[str, Any]:
    from capsule.service.accounts import moment

    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": [str(scope) for scope in key.scopes],
        "state": key.state(time.time()),
        "created_at": moment(key.created),
        "expires_at": moment(key.expires),
        "revoked_at": moment(key.revoked),
        "used_at": moment(key.used),
    }


def _remote(info: Any) -> dict[str, Any]:
    names = ("id", "tenant", "name", "scopes", "state", "created_at")
    return {name: getattr(info, name) for name in (*names, "expires_at", "revoked_at", "used_at")}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(value)
    return value if isinstance(value, str) else value.isoformat(sep=" ", timespec="minutes")
