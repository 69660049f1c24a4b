"""The Engine API, as much of it as a box needs: every call has a deadline, and only CapsuleErrors
come out.

`aiodocker` carries the requests over kept connections; its container objects are not used, as they
ask more often than we have to.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
from aiodocker import Docker
from aiodocker.exceptions import DockerError

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    UnavailableError,
)
from capsule.providers.contract import OutOfReachError
from capsule.providers.docker.address import Address
from capsule.providers.docker.deadlines import Deadlines
from capsule.providers.docker.hijack import HijackedStream, hijack

OLDEST = (1, 41)
NEWEST = (1, 51)  # what this was written against; a newer Engine is spoken to in this version

QUICK = 5.0  # seconds, for what only reads
SLOW = 30.0  # for what starts or ends processes
PODMAN_TAKEN = "is already in use by"  # a name; its status says only that something went wrong
PODMAN_BUSY = "container state improper"  # its answer to one of two who remove the same
PULL_SILENCE = 120.0  # seconds without a line of progress
_KEPT = 3.0  # seconds for which a connection is kept for the next call
_NO_ANSWER = 900  # aiodocker's own number for "cannot connect"
_LOG = "the Engine's own log says more (journalctl -u docker)"


class Engine:
    def __init__(self, address: Address, *, patience: float = 1.0) -> None:
        """`patience`: how many times the usual seconds an answer may take."""
        self.address = address
        self._deadlines = Deadlines(address.url, self.ping, patience=patience)
        self._docker: Docker | None = None
        self._connector: aiohttp.BaseConnector | None = None
        self._agreeing = asyncio.Lock()  # one question for the version, however many begin at once

    async def aclose(self) -> None:
        docker, self._docker = self._docker, None
        connector, self._connector = self._connector, None
        if docker is not None:
            await docker.close()
        if connector is not None:
            await connector.close()  # aiodocker leaves open what it did not make

    async def ping(self) -> None:
        """Returns when it answers, whatever that is. Its caller owns the deadline."""
        docker = await self._ready(agree=False)
        where = docker._canonicalize_url("_ping", versioned_api=False)
        with engine_errors("ping", self.address):
            async with docker.session.get(where):
                pass

    async def version(self) -> dict[str, Any]:
        return dict(await self._json("version", "GET", "version", versioned=False))

    async def info(self) -> dict[str, Any]:
        return dict(await self._json("its facts", "GET", "info"))

    async def create(self, name: str, body: Mapping[str, Any]) -> str:
        """The container's id. Raises ConflictError (the name), NotFoundError (the image)."""
        made = await self._json(
            "create", "POST", "containers/create", params={"name": name}, data=body, within=SLOW
        )
        return str(made["Id"])

    async def start(self, name: str) -> None:
        try:
            await self._json("start", "POST", f"containers/{name}/start", within=SLOW)
        except InvalidError as exc:  # what the Engine makes of a runtime that failed
            raise UnavailableError(exc.message, hint=_LOG) from exc

    async def remove(self, name: str) -> None:
        """Kills and removes it, with its own volumes. Returns when it is gone."""
        async with self._deadlines.of("remove", SLOW):
            while True:
                try:
                    await self._ask(
                        "remove",
                        "DELETE",
                        f"containers/{name}",
                        params={"force": "true", "v": "true"},
                    )
                except NotFoundError:
                    return
                except (ConflictError, UnavailableError) as exc:
                    if isinstance(exc, UnavailableError) and PODMAN_BUSY not in exc.message:
                        raise
                    await asyncio.sleep(0.02)  # somebody else removes it already: wait for that
                else:
                    return

    async def wait(self, name: str, within: float) -> None:
        """Returns when it has ended. Raises NotFoundError, UnavailableError."""
        await self._json("wait", "POST", f"containers/{name}/wait", within=within)

    async def inspect(self, name: str) -> dict[str, Any] | None:
        try:
            found = await self._json("inspect", "GET", f"containers/{name}/json")
        except NotFoundError:
            return None
        return dict(found)

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """All with this label, in whatever state."""
        params = {"all": "true", "filters": json.dumps({"label": [label]})}
        found = await self._json("list", "GET", "containers/json", params=params, within=SLOW)
        return list(found)

    async def pause(self, name: str) -> None:
        await self._json("pause", "POST", f"containers/{name}/pause", within=SLOW)

    async def resume(self, name: str) -> None:
        await self._json("resume", "POST", f"containers/{name}/unpause", within=SLOW)

    async def update(self, name: str, body: Mapping[str, Any]) -> None:
        await self._json("update", "POST", f"containers/{name}/update", data=body, within=SLOW)

    async def image(self, name: str) -> dict[str, Any] | None:
        try:
            found = await self._json("its image", "GET", f"images/{name}/json")
        except NotFoundError:
            return None
        return dict(found)

    async def pull(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Progress, as the Engine says it. Raises NotFoundError and UnavailableError."""
        repository, tag = split_tag(name)
        docker = await self._ready()
        where = docker._canonicalize_url("images/create")
        timeout = aiohttp.ClientTimeout(sock_connect=QUICK, sock_read=PULL_SILENCE)
        with engine_errors("pull", self.address):
            async with docker.session.post(
                where, params={"fromImage": repository, "tag": tag}, timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise DockerError(response.status, _message(await response.read()))
                async for line in response.content:
                    yield _progress(line, name)

    async def put(self, name: str, folder: str, tar: bytes) -> None:
        """Unpacks `tar` in a container that does not run."""
        await self._json(
            "copy",
            "PUT",
            f"containers/{name}/archive",
            params={"path": folder},
            data=tar,
            headers={"Content-Type": "application/x-tar"},
            within=SLOW,
        )

    async def size(self, name: str, path: str) -> int | None:
        """Of a file in a container that does not run. None: there is no such file."""
        found = await self._stat_in(name, path)
        return int(found["size"]) if found else None

    async def mode(self, name: str, path: str) -> int:
        """The permissions of something that is there, likewise."""
        return int((await self._stat_in(name, path))["mode"]) & 0o777

    async def _stat_in(self, name: str, path: str) -> dict[str, Any]:
        what = "look into a container"
        docker = await self._ready()
        # Not by aiodocker, which expects a body that the answer to a HEAD cannot have.
        where = docker._canonicalize_url(f"containers/{name}/archive")
        async with self._deadlines.of(what, QUICK):
            with engine_errors(what, self.address):
                async with docker.session.head(where, params={"path": path}) as response:
                    told = response.headers.get("X-Docker-Container-Path-Stat")
                    return dict(json.loads(base64.b64decode(told))) if told else {}

    async def volumes(self, label: str) -> list[dict[str, Any]]:
        params = {"filters": json.dumps({"label": [label]})}
        found = await self._json("volumes", "GET", "volumes", params=params)
        return list(found.get("Volumes") or ())

    async def volume(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(await self._json("its volume", "GET", f"volumes/{name}"))
        except NotFoundError:
            return None

    async def make_volume(
        self, name: str, labels: Mapping[str, str], options: Mapping[str, str] | None = None
    ) -> None:
        """Fine if it is there. `options`: of the Engine's own kind of volumes."""
        body = {"Name": name, "Labels": dict(labels), "DriverOpts": dict(options or {})}
        await self._json("make a volume", "POST", "volumes/create", data=body, within=SLOW)

    async def remove_volume(self, name: str) -> None:
        """Raises ConflictError while a container uses it."""
        with contextlib.suppress(NotFoundError):
            await self._json("remove a volume", "DELETE", f"volumes/{name}", within=SLOW)

    async def stats(self, name: str) -> dict[str, Any]:
        params = {"stream": "false", "one-shot": "true"}
        return dict(await self._json("stats", "GET", f"containers/{name}/stats", params=params))

    async def exec(self, name: str, argv: list[str]) -> HijackedStream:
        """A program beside the agent, as root of the container. The caller owns the deadline."""
        body = {
            "Cmd": argv,
            "User": "0:0",
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
        }
        made = await self._json("exec", "POST", f"containers/{name}/exec", data=body)
        docker = await self._ready()
        with engine_errors("exec", self.address):
            return await hijack(docker, str(made["Id"]))

    async def _json(
        self, what: str, method: str, path: str, *, within: float = QUICK, **request: Any
    ) -> Any:
        async with self._deadlines.of(what, within):
            return await self._ask(what, method, path, **request)

    async def _ask(
        self,
        what: str,
        method: str,
        path: str,
        *,
        versioned: bool = True,
        data: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Not by aiodocker's own query, which leaves a connection open when we are cancelled."""
        docker = await self._ready(agree=versioned)
        if isinstance(data, bytes):
            data = io.BytesIO(data)  # sent in pieces: a megabyte at once holds up the loop
        elif data is not None:
            data = json.dumps(data)
        where = docker._canonicalize_url(path, versioned_api=versioned)
        headers = headers or {"Content-Type": "application/json"}
        with engine_errors(what, self.address):
            async with docker.session.request(
                method, where, data=data, params=params, headers=headers
            ) as response:
                body = await response.read()
                if response.status >= 400:
                    raise DockerError(response.status, _message(body))
                return json.loads(body) if body else None

    async def _ready(self, *, agree: bool = True) -> Docker:
        if self._docker is None:
            # No deadline of aiodocker's: ours are those of whole calls.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=QUICK)
            with engine_errors("connect", self.address):
                self._connector = _connector(self.address)
                local = self.address.socket is not None
                self._docker = Docker(
                    url="http://localhost" if local else self.address.url,
                    connector=self._connector,
                    timeout=timeout,
                )
        docker = self._docker
        if agree and docker.api_version == "auto":
            async with self._agreeing:
                if docker.api_version == "auto":
                    docker.api_version = agreed(await self.version())
        return docker


def _connector(address: Address) -> aiohttp.BaseConnector | None:
    """None: aiodocker's own. As many connections as it takes: every relay holds one."""
    if address.socket is not None:
        return aiohttp.UnixConnector(str(address.socket), limit=0, keepalive_timeout=_KEPT)
    if address.tls is not None:
        return aiohttp.TCPConnector(ssl=address.tls, limit=0)
    return None if address.url.startswith("ssh://") else aiohttp.TCPConnector(limit=0)


def agreed(version: Mapping[str, Any]) -> str:
    """The API version that both sides know. Raises NotSupportedError."""
    newest = _number(version.get("ApiVersion"))
    oldest = _number(version.get("MinAPIVersion"))
    if newest < OLDEST or oldest > NEWEST:
        raise NotSupportedError(
            f"the Docker Engine speaks API {_text(oldest)} to {_text(newest)}, "
            f"Capsule {_text(OLDEST)} to {_text(NEWEST)}",
            hint="install a newer Docker Engine" if newest < OLDEST else "install a newer Capsule",
        )
    return f"v{_text(min(newest, NEWEST))}"


def _number(text: object) -> tuple[int, int]:
    major, _, minor = str(text or "0.0").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def split_tag(name: str) -> tuple[str, str]:
    """`repository`, and its tag or digest: without one the Engine would pull every tag."""
    repository, at, digest = name.partition("@")
    if at:
        return repository, digest
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")


def _message(body: bytes) -> str:
    """What the Engine says is wrong; others in its place may not say it in JSON."""
    with contextlib.suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict) and told.get("message"):
            return str(told["message"])
    return body.decode("utf-8", "replace")


def _progress(line: bytes, name: str) -> dict[str, Any]:
    step = json.loads(line)
    if "error" in step:
        text = str(step["error"])
        hint = "see whether its name is right, and `docker login` for a private one"
        raise UnavailableError(f"image {name} cannot be pulled: {text}", hint=hint)
    return dict(step)


@contextlib.contextmanager
def engine_errors(what: str, address: Address) -> Iterator[None]:
    """The only place where the Engine's errors, and those of the way to it, become ours."""
    try:
        yield
    except DockerError as exc:
        text = _why(exc) if exc.status == _NO_ANSWER else exc.message
        raise _translated(what, address, exc.status, text) from exc
    except (aiohttp.ClientError, OSError, EOFError) as exc:
        raise _translated(what, address, _NO_ANSWER, _why(exc)) from exc
    except (ValueError, LookupError, TypeError, AssertionError) as exc:
        raise UnavailableError(
            f"the Docker Engine at {address.url} gave no proper answer ({what}): {exc!r}"
        ) from exc


def _why(exc: BaseException) -> str:
    """The kernel's own words, which aiodocker and aiohttp wrap twice."""
    cause: BaseException | None = exc
    while cause is not None:
        inner = getattr(cause, "os_error", cause)
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        cause = cause.__cause__ or cause.__context__
    if isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "it hung up before it had answered"  # aiohttp shows the half that came
    return str(exc) or type(exc).__name__


def _refused(address: Address) -> str:
    """What opens a socket that is there, and is not ours to use; "" for any other."""
    path = address.socket
    if path is None or not path.is_socket() or os.access(path, os.R_OK | os.W_OK):
        return ""
    gid = path.stat().st_gid
    return (
        f"let uid {os.geteuid()} use the socket: usermod -aG docker USER and log in again; for a "
        f"container, docker run --group-add {gid}"
    )


def _translated(what: str, address: Address, status: int, message: str) -> CapsuleError:
    message = " ".join(message.split())[:500]
    text = f"the Docker Engine refused ({what}): {message}"
    if status == _NO_ANSWER:
        return OutOfReachError(
            f"the Docker Engine does not answer at {address.url}: {message}",
            hint=_refused(address)
            or "start it (systemctl start docker), or set CAPSULE_DOCKER_HOST to where it is",
        )
    if "no space left on device" in message.lower():
        return NoSpaceError(text, hint="free some space below the Engine's root (docker info)")
    if PODMAN_TAKEN in message:
        return ConflictError(text)
    match status:
        case 404:
            return NotFoundError(text)
        case 409:
            return ConflictError(text)
        case 400:
            return InvalidError(text)
        case 401 | 403:
            return UnavailableError(text, hint="let the server's user talk to the Engine")
    return UnavailableError(text, hint=_LOG)
