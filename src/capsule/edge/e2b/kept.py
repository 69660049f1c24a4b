"""Snapshots under E2B's names. There a snapshot is a template with a tag, `name:tag`; here it has
one name, in which the tag stands behind two dots. The tag `default` is left out.
"""

from __future__ import annotations

import re

from capsule.edge.errors import invalid_field
from capsule.errors import ConflictError, NotFoundError
from capsule.service import Service, Snapshot
from capsule.service.caller import Caller
from capsule.service.template_names import resolve

_BETWEEN = ".."
_NAME = re.compile(r"([A-Za-z0-9_.-]{1,48})(?::([A-Za-z0-9_.-]{1,13}))?")
_MADE_UP = re.compile(r"[a-z2-7]{16}")  # as ids are


def kept_as(id: str) -> str | None:
    """The snapshot's own name; None: no snapshot has such an id."""
    found = _NAME.fullmatch(id.rpartition("/")[2])
    if found is None or _BETWEEN in found[0]:
        return None
    tag = found[2] or "default"
    return found[1] if tag == "default" else f"{found[1]}{_BETWEEN}{tag}"


def id_of(kept: str) -> str:
    name, _, tag = kept.partition(_BETWEEN)
    return f"{name}:{tag or 'default'}"


def names_of(snapshot: Snapshot) -> list[str]:
    """None of one whose name nobody has chosen."""
    return [] if _MADE_UP.fullmatch(snapshot.name) else [id_of(snapshot.name)]


def is_kept(service: Service, name: str, caller: Caller) -> bool:
    try:
        service.snapshots.find(name, caller.tenant)
    except NotFoundError:
        return False
    return True


def chosen(service: Service, name: str, tenant: str) -> str:
    """A name for a new snapshot. Raises InvalidError, ConflictError."""
    found = kept_as(name)
    if found is None:
        raise invalid_field(
            "name", f"{name[:60]!r} is none, allowed: letters, digits, '.', '_', '-', and a :tag"
        )
    if resolve(service.catalog, found, tenant) is not None:
        raise ConflictError(f"{found} is a template already", hint="choose another name")
    return found


def wanted(snapshot: Snapshot, name: str) -> bool:
    """`name`, `name:tag`, or an id."""
    bare = name.rpartition("/")[2]
    if ":" in bare:
        return snapshot.name == kept_as(bare)
    return snapshot.name.partition(_BETWEEN)[0] == bare
