"""Who a request is inside its sandbox, and what a path means to them."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request

from capsule.edge.e2b.connect import RpcError
from capsule.errors import GoneError, NotFoundError
from capsule.model import ROOT, State
from capsule.service import Service
from capsule.service.values import Sandbox

USER = "user"  # what SDKs call the sandbox's user, whatever its name there
HOME = "/root"


class Guest(NamedTuple):
    sandbox: Sandbox
    user: str | None = None  # None: the sandbox's own
    home: str = "/"
    lives: Callable[[], bool] = lambda: True  # the sandbox, still

    @property
    def id(self) -> str:
        return self.sandbox.id

    def path(self, given: str) -> str:
        """Absolute; relative ones begin at home. `..` is taken out as Go does it: by the letters,
        whatever is a link there."""
        if given == "~" or given.startswith("~/"):
            given = "." + given[1:]
        return "/" + posixpath.normpath(posixpath.join(self.home, given)).lstrip("/")


def running(service: Service, id: str) -> Sandbox | None:
    """Or about to be, for whoever needs it."""
    try:
        found = service.get(id)
    except (NotFoundError, GoneError):
        return None
    awake = found.state is State.RUNNING or (found.state is State.PAUSED and found.auto_resume)
    return found if awake else None


def guest_of(service: Service, sandbox: Sandbox, name: str | None) -> Guest:
    """Raises RpcError: there is nobody of that name."""
    environ = service.environ(sandbox.id)

    def lives() -> bool:
        return running(service, sandbox.id) is not None

    if name in (None, USER, environ.get("USER")):
        return Guest(sandbox, None, environ.get("HOME", "/"), lives)
    if name == ROOT:
        return Guest(sandbox, ROOT, HOME, lives)
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
