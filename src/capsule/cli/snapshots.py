"""Commands about snapshots and forks: snapshot create, ls, rm, export, import; fork."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capsule.cli import show
from capsule.cli.remote import Server, info_fields
from capsule_sdk import SnapshotInfo


def _fields(info: SnapshotInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(info), "created_at": info.created_at.isoformat()}


def create(
    server: Server, id: str, name: str, metadata: Mapping[str, str], *, as_json: bool
) -> int:
    with server.client() as client:
        made = client.get(id).snapshot(name, metadata=metadata)
    if as_json:
        show.as_json(_fields(made))
        return 0
    print(made.name)
    show.note(f"{show.size(made.size)}; start from it with: capsule create --snapshot {made.name}")
    return 0


def list_snapshots(server: Server, *, as_json: bool) -> int:
    with server.client() as client:
        found = client.snapshots.list()
    if as_json:
        show.as_json({"snapshots": [_fields(info) for info in found]})
        return 0
    columns = ("name", "template", "provider", "size", "files", "created")
    show.table(columns, [_row(info) for info in found], empty="no snapshots")
    return 0


def _row(info: SnapshotInfo) -> Sequence[str]:
    created = info.created_at.isoformat(sep=" ", timespec="seconds")
    size = show.size(info.size)
    return (info.name, info.template, info.provider, size, str(info.files), created)


def remove(server: Server, names: Sequence[str], *, as_json: bool) -> int:
    with server.client() as client:
        for name in names:
            client.snapshots.delete(name)
            if not as_json:
                print(name)
    if as_json:
        show.as_json({"deleted": list(names)})
    return 0


def export(server: Server, name: str, file: str, *, as_json: bool) -> int:
    target = sys.stdout.buffer if file == "-" else file
    with server.client() as client:
        size = client.snapshots.export(name, target)
    if file == "-":
        return 0
    if as_json:
        show.as_json({"name": name, "file": file, "size": size})
    else:
        print(file)
        show.note(show.size(size))
    return 0


def import_(
    server: Server,
    name: str,
    file: str,
    template: str | None,
    provider: str | None,
    *,
    as_json: bool,
) -> int:
    archive = sys.stdin.buffer if file == "-" else Path(file)
    with server.client() as client:
        made = client.snapshots.import_(name, archive, template=template, provider=provider)
    if as_json:
        show.as_json(_fields(made))
    else:
        print(made.name)
    return 0


def steps(server: Server, id: str, *, as_json: bool) -> int:
    with server.client() as client:
        found = client.get(id).steps()
    if as_json:
        rows = [dataclasses.asdict(step) for step in found]
        show.as_json(
            {"steps": [{**row, "created_at": row["created_at"].isoformat()} for row in rows]}
        )
        return 0
    columns = ("step", "copied", "size", "command")
    rows_of = [
        (str(step.step), show.size(step.copied), show.size(step.size), step.cmd or "-")
        for step in found
    ]
    show.table(columns, rows_of, empty="no steps")
    return 0


def diff(server: Server, id: str, old: int, new: int | None, *, as_json: bool) -> int:
    with server.client() as client:
        found = client.get(id).diff(old, new)
    if as_json:
        fields = ("path", "change", "type", "size")
        rows = [{name: getattr(each, name) for name in fields} for each in found]
        show.as_json({"changes": rows})
        return 0
    letters = {"added": "A", "modified": "M", "removed": "D"}
    for each in found:
        print(f"{letters.get(each.change, '?')} {each.path}{'/' if each.type == 'dir' else ''}")
    return 0


def undo(server: Server, id: str, to: int, *, as_json: bool) -> int:
    with server.client() as client:
        info = client.get(id).undo(to)
    if as_json:
        show.as_json(info_fields(info))
    else:
        print(id)
    return 0


def fork(server: Server, id: str, count: int, at: int | None, *, as_json: bool) -> int:
    with server.client() as client:
        made = client.get(id).fork(count, at=at)
    if as_json:
        show.as_json({"sandboxes": [info_fields(capsule.info) for capsule in made]})
        return 0
    for capsule in made:
        print(capsule.id)
    show.note("files are copied; processes, contexts and terminals are not")
    return 0
