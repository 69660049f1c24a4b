"""Whose a template is, by its name in the catalog."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from capsule.errors import NotFoundError
from capsule.model import Template
from capsule.service.caller import DEFAULT_TENANT
from capsule.settings import brief

RESERVED = "tenant-"
_INNER = re.compile(r"tenant-[0-9a-f]{12}-")


def inner(tenant: str, name: str) -> str:
    """What the catalog calls a template that a tenant has built."""
    if tenant == DEFAULT_TENANT:
        return name
    return f"{RESERVED}{hashlib.sha256(tenant.encode()).hexdigest()[:12]}-{name}"


def shown(name: str) -> str:
    """What its tenant calls it."""
    return _INNER.sub("", name, count=1) if name.startswith(RESERVED) else name


def resolve(catalog: Mapping[str, Template], name: str, tenant: str) -> Template | None:
    """The tenant's own, or everybody's."""
    if not isinstance(name, str) or name.startswith(RESERVED):
        return None
    return catalog.get(inner(tenant, name)) or catalog.get(name)


def visible(catalog: Mapping[str, Template], tenant: str) -> list[Template]:
    own = inner(tenant, "")
    return [
        template
        for name, template in catalog.items()
        if not name.startswith(RESERVED) or (own and name.startswith(own))
    ]


def no_template(
    catalog: Mapping[str, Template], name: str, tenant: str, field: str
) -> NotFoundError:
    known = ", ".join(sorted({shown(each.name) for each in visible(catalog, tenant)}))
    return NotFoundError(
        f"template {brief(name)} does not exist", hint=f"take one of: {known}", field=field
    )
