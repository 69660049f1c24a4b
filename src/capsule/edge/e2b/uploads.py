"""Files for builds of templates: a tar each, by the hash that the SDK has made of what is in it.

They are a tenant's own, in data_dir/uploads. The last ones are kept, so that what has not changed
need not be sent again. Whoever is told where to send one needs no key for that: the place is signed
and good for an hour.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capsule.config import Config
from capsule.edge.body import chunks, lift
from capsule.edge.e2b.access import Access, same
from capsule.edge.e2b.doors import Place
from capsule.edge.e2b.script import HASH
from capsule.edge.errors import understand, wrong_method
from capsule.edge.identity import CALLER
from capsule.edge.routing import failure
from capsule.errors import UnauthenticatedError
from capsule.host_errors import host_errors
from capsule.service.caller import Caller

PREFIX = "/templatefiles/"
ROUTE = Place("templatefiles")
GOOD_FOR = 3600  # seconds
KEPT = 64  # of a tenant


class Uploads:
    """An app beside the site: what it asks for is no key."""

    def __init__(self, config: Config, access: Access) -> None:
        self._folder = config.data_dir / "uploads"
        self._most = config.max_context
        self._access = access

    def folder(self, tenant: str) -> Path:
        return self._folder / hashlib.sha256(tenant.encode()).hexdigest()[:16]

    def has(self, tenant: str, hash: str) -> bool:
        """Blocks."""
        path = self.folder(tenant) / hash
        if not path.is_file():
            return False
        os.utime(path)  # it is used
        return True

    def place(self, tenant: str, hash: str, base: str) -> str:
        query = {"tenant": tenant, "expires": str(int(time.time()) + GOOD_FOR)}
        query["signature"] = self._signature(hash, query)
        return f"{base}{PREFIX}{hash}?{urlencode(query)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = ROUTE
        try:
            answer = await self._receive(Request(scope, receive))
        except Exception as error:  # the edge: whatever it is becomes an answer
            answer = failure(understand(error), e2b=True)
        await answer(scope, receive, send)

    async def _receive(self, request: Request) -> Response:
        if request.method != "PUT":
            raise wrong_method(request.method, ["PUT"])
        hash = request.scope["path"].removeprefix(PREFIX)
        query = dict(request.query_params)
        given = query.pop("signature", "")
        if not HASH.fullmatch(hash) or not same(given, self._signature(hash, query)):
            raise UnauthenticatedError("the signature of this place is not ours")
        if int(query["expires"]) < time.time():
            raise UnauthenticatedError("this place was for an hour", hint="build again")
        request.scope[CALLER] = Caller(query["tenant"], frozenset(), "upload")
        lift(request, self._most)
        await self._keep(request, self.folder(query["tenant"]), hash)
        return Response(status_code=200)

    async def _keep(self, request: Request, folder: Path, hash: str) -> None:
        draft = folder / f".{secrets.token_hex(8)}"
        try:
            with host_errors("the upload cannot be kept"):
                file = await asyncio.to_thread(_begin, draft)
                with file:
                    async for chunk in chunks(request.receive):
                        await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(os.replace, draft, folder / hash)
                await asyncio.to_thread(_tidy, folder)
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)

    def _signature(self, hash: str, query: dict[str, str]) -> str:
        return self._access.upload_token(f"{query.get('tenant')}:{hash}:{query.get('expires')}")


def _begin(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _tidy(folder: Path) -> None:
    """The oldest go, and what a killed server has left."""
    known = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    old = time.time() - GOOD_FOR
    for path in known:
        if path.name.startswith(".") and path.stat().st_mtime < old:
            path.unlink(missing_ok=True)
    whole = [path for path in known if not path.name.startswith(".")]
    for path in whole[: max(len(whole) - KEPT, 0)]:
        path.unlink(missing_ok=True)
