"""Who asks: a small value that comes with every request, from the edge down to the service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from capsule.errors import ForbiddenError, InvalidError
from capsule.service import validate
from capsule.settings import brief

DEFAULT_TENANT = "default"  # whose everything is that was made without a tenant
# Whose the server's own sandboxes are: no name of a tenant. They are listed, told and counted for
# nobody.
ASIDE = "~"


def named(tenant: str, name: str) -> str:
    """How what a tenant has named is told from what others have: names have no slash."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


class KeyScope(StrEnum):
    """What a key is good for. Each includes those before it."""

    READ = "read"  # look at what there is
    RUN = "run"  # make, use and end it
    ADMIN = "admin"  # the server itself: keys, tenants, metrics; other tenants by name


ALL_SCOPES = frozenset(KeyScope)


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[KeyScope] = ALL_SCOPES  # all it may, not only what its key names
    key_id: str = "local"  # a stored key's id, `static`, `jwt:SUBJECT`; `local`: nobody asked

    def require(self, scope: KeyScope, what: str) -> None:
        """Raises ForbiddenError."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes)) or "none"
            raise ForbiddenError(
                f"{what} needs a key with the scope {scope}, this one has: {has}",
                hint="ask whoever gave you the key for another one",
                scope=str(scope),
            )


OPERATOR = Caller()  # where no keys are asked for, and whoever uses the service without a server


def widened(scopes: Iterable[KeyScope]) -> frozenset[KeyScope]:
    """With those that each of them includes."""
    order = list(KeyScope)
    return frozenset(x for scope in scopes for x in order[: order.index(scope) + 1])


def check_scopes(names: Iterable[str]) -> tuple[KeyScope, ...]:
    """In their own order. Raises InvalidError."""
    given = set(names)
    known = {scope.value for scope in KeyScope}
    if not given or not given <= known:
        what = brief(min(given - known)) if given else "none"
        raise InvalidError(
            f"scopes: {what} is no scope, allowed: {', '.join(KeyScope)}", field="scopes"
        )
    return tuple(scope for scope in KeyScope if scope in given)


def check_tenant(name: str) -> str:
    return validate.name("tenant", name)
