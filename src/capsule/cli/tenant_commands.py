"""`capsule tenant …`: at a server that is named, or else in the data directory of this machine's,
be it running or not."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from capsule.cli import options as o
from capsule.cli import show

tenant = typer.Typer(no_args_is_help=True, help="What tenants may use.")

Number = Annotated[int | None, typer.Option(min=0, help="At the same time; 0: no limit.")]
_HELP = "All together, such as 4GiB; 0: no limit."


@tenant.command("set")
def tenant_set(
    name: Annotated[str, typer.Argument(metavar="TENANT")],
    sandboxes: Number = None,
    execs: Number = None,
    memory: Annotated[
        int | None, typer.Option("--memory", parser=o.size, metavar="SIZE", help=_HELP)
    ] = None,
    cpu_seconds: Annotated[
        float | None, typer.Option(min=0, help="In each day or month; 0: no limit.")
    ] = None,
    storage: Annotated[
        int | None, typer.Option("--storage", parser=o.size, metavar="SIZE", help=_HELP)
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="First forget what was set: the configuration's again.")
    ] = False,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Give a tenant quotas of its own. A running server takes them within seconds."""
    given = {
        "sandboxes": sandboxes,
        "execs": execs,
        "memory": memory,
        "cpu_seconds": cpu_seconds,
        "storage": storage,
    }
    changes: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if url or os.environ.get("CAPSULE_URL"):
        from capsule.cli.remote import Server

        with Server(url, api_key).client() as client:
            quota = dict(client.tenants.set(name, reset=reset, **changes).quota)
    else:
        from capsule.config import load_config
        from capsule.service.accounts import AccountFile
        from capsule.service.caller import check_tenant
        from capsule.service.tenants import check_quota

        file = AccountFile(load_config().data_dir)
        file.set_quota(check_tenant(name), check_quota(changes), reset)
        quota = file.quotas()[name]
    if json:
        show.as_json({"tenant": name, "quota": quota})
    else:
        told = ", ".join(f"{key} {_shown(value, key)}" for key, value in quota.items())
        print(told or "the configuration's")
    return 0


@tenant.command("list")
def tenant_list(url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False) -> int:
    """List the tenants of a server, what they use and what they may."""
    from capsule.cli.remote import Server

    with Server(url, api_key).client() as client:
        found = client.tenants.list()
    if json:
        rows = [{"tenant": t.tenant, "quota": t.quota, "used": t.used} for t in found]
        show.as_json({"tenants": rows})
        return 0
    names = ("sandboxes", "execs", "memory", "cpu_seconds", "storage")
    table = [(t.tenant, *(_of(t.used[name], t.quota[name], name) for name in names)) for t in found]
    show.table(("tenant", "sandboxes", "execs", "memory", "cpu", "storage"), table, empty="none")
    return 0


def _of(used: Any, limit: Any, name: str) -> str:
    return f"{'-' if used is None else _text(used, name)} of {_shown(limit, name)}"


def _shown(limit: Any, name: str) -> str:
    return _text(limit, name) if limit else "any"


def _text(value: Any, name: str) -> str:
    return show.size(value) if name in ("memory", "storage") else str(value)
