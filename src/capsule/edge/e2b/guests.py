"""Who a request is inside its sandbox, and what a path means to them."""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import NamedTuple

from starlette.requests import Request

from capsule.edge.e2b.connect import RpcError
from capsule.service import Service
from capsule.service.values import Sandbox

USER = "user"
ROOT = "root"


class Guest(NamedTuple):
    sandbox: Sandbox
    user: str = USER
    home: str = "/"

    @property
    def id(self) -> str:
        return self.sandbox.id

    def path(self, given: str) -> str:
        """Absolute; relative ones begin at home. `..` is taken out as Go does it: by the letters,
        whatever is a link there."""
        if given == "~" or given.startswith("~/"):
            given = "." + given[1:]
        return "/" + posixpath.normpath(posixpath.join(self.home, given)).lstrip("/")


def guest_of(service: Service, sandbox: Sandbox, name: str | None) -> Guest:
    """Raises RpcError: there is nobody of that name."""
    if name is None or name == USER:
        return Guest(sandbox, USER, service.environ(sandbox.id).get("HOME", "/"))
    if name == ROOT:
        raise RpcError("unimplemented", "programs cannot be root in this sandbox")
    raise RpcError("unauthenticated", f"invalid username: '{name[:100]}'")


def name_in(request: Request) -> str | None:
    """Of `Authorization: Basic base64("NAME:")`. None: nobody in particular."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "the user's name is not readable") from None
