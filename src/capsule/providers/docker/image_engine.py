"""The part of the Engine API that deals with images: streams in and out, beside short calls."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, BinaryIO

import aiohttp

from capsule.errors import ConflictError, NotFoundError
from capsule.providers.docker.engine import QUICK, SLOW, Engine, engine_errors, split_tag

CHUNK = 256 * 1024
TAR = {"Content-Type": "application/x-tar"}
# The Engine's own numbers for what a path is (Go's os.FileMode).
_GO_DIR, _GO_LINK = 1 << 31, 1 << 27
_GO_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19  # devices, pipes, sockets and such


class ImageEngine(Engine):
    def build(self, context: BinaryIO, params: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """What the builder says, in pieces. Closing it early cancels the build."""
        return self._stream("build", "POST", "build", params=params, data=context)

    def load_image(self, archive: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        return self._stream("load", "POST", "images/load", data=archive)

    def import_root(self, root: AsyncIterator[bytes], name: str) -> AsyncGenerator[bytes, None]:
        """A plain root file system becomes an image of one layer."""
        repository, tag = split_tag(name)
        params = {"fromSrc": "-", "repo": repository, "tag": tag}
        return self._stream("import", "POST", "images/create", params=params, data=root)

    def save_image(self, name: str) -> AsyncGenerator[bytes, None]:
        """As `docker save`. Raises NotFoundError."""
        return self._stream("save", "GET", f"images/{name}/get")

    async def tag(self, id: str, name: str) -> None:
        repository, tag = split_tag(name)
        params = {"repo": repository, "tag": tag}
        await self._json("tag", "POST", f"images/{id}/tag", params=params)

    async def image_ids(self) -> set[str]:
        """Of all images, those without a name too."""
        found = await self._json("list", "GET", "images/json", params={"all": "true"}, within=SLOW)
        return {str(each["Id"]).removeprefix("sha256:") for each in found}

    async def history(self, name: str) -> list[str]:
        """What made each of its layers, the last one first."""
        found = await self._json("history", "GET", f"images/{name}/history")
        return [str(each.get("CreatedBy", "")) for each in found] or [""]

    async def everything(self) -> list[dict[str, Any]]:
        """Every container, ours or not, in whatever state."""
        params = {"all": "true"}
        return list(await self._json("list", "GET", "containers/json", params=params, within=SLOW))

    async def remove_image(self, name: str, *, parents: bool = False) -> None:
        """Raises NotFoundError, ConflictError (something needs it)."""
        params = {"noprune": "false" if parents else "true"}
        await self._json("remove", "DELETE", f"images/{name}", params=params, within=SLOW)

    async def is_program(self, container: str, path: str) -> bool:
        """Whether there is one at `path` in a container that was never started. Links are followed
        by the Engine, inside of it."""
        for _ in range(2):  # what a link leads to is its end: the Engine has followed all of it
            mode, target = await self._stat(container, path)
            if not mode & _GO_LINK:
                return mode > 0 and not mode & (_GO_DIR | _GO_SPECIAL) and bool(mode & 0o111)
            path = target
        return False

    async def _stat(self, container: str, path: str) -> tuple[int, str]:
        """The mode in Go's bits, 0 where there is nothing, and where a link leads."""
        docker = await self._ready()
        url = docker._canonicalize_url(f"containers/{container}/archive")
        async with self._deadlines.of("look", QUICK):
            with engine_errors("look", self.address):
                # Not by aiodocker: it expects JSON with every error, and HEAD has no body.
                async with docker.session.head(url, params={"path": path}) as response:
                    told = response.headers.get("X-Docker-Container-Path-Stat", "")
                    found = json.loads(base64.b64decode(told)) if told else {}
        return int(found.get("mode", 0)), str(found.get("linkTarget", ""))

    async def _stream(
        self, what: str, method: str, path: str, **request: Any
    ) -> AsyncGenerator[bytes, None]:
        docker = await self._ready()
        with engine_errors(what, self.address):
            response = await docker._do_query(
                path,
                method,
                headers=TAR,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=QUICK),
                **request,
            )
            with contextlib.closing(response):  # not back into the pool: it may be half read
                async for piece in response.content.iter_chunked(CHUNK):
                    yield piece


async def discard_image(engine: ImageEngine, id: str, *, parents: bool = False) -> bool:
    """Remove an image that nobody has a name for. False: something runs from it."""
    found = await engine.image(id)
    if found is None or found.get("RepoTags") or found.get("RepoDigests"):
        return True
    try:
        await engine.remove_image(id, parents=parents)
    except NotFoundError:
        return True
    except ConflictError as error:
        return "child" in error.message  # then it is a part of another image, and goes with that
    return True
