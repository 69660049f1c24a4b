"""Where the Engine is: told, or found as the docker command finds it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError

from capsule.errors import InvalidError, UnavailableError

# Beside what DOCKER_HOST and the docker command's context name. Podman speaks the same API.
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")
OWN_SOCKETS = ("docker.sock", "podman/podman.sock")  # below XDG_RUNTIME_DIR: a rootless Engine


@dataclass(frozen=True, slots=True)
class Address:
    """`url` is unix://, http://, https:// or ssh://."""

    url: str
    tls: ssl.SSLContext | None = None

    @property
    def socket(self) -> Path | None:
        """The Engine's Unix socket: it may share a filesystem with us. None: it is elsewhere."""
        return Path(self.url.removeprefix("unix://")) if self.url.startswith("unix://") else None


def find(host: str | None, env: Mapping[str, str] = os.environ) -> Address:
    """Reads files. Raises UnavailableError when there is none, InvalidError for a wrong one."""
    try:
        return _find(host, env)
    except (DockerError, OSError, ValueError, ssl.SSLError) as exc:
        raise UnavailableError(
            f"the way to the Docker Engine is not usable: {exc}",
            hint="see `docker context ls`, DOCKER_HOST and DOCKER_CERT_PATH",
        ) from exc


def _find(host: str | None, env: Mapping[str, str]) -> Address:
    if host or env.get("DOCKER_HOST"):
        return _of(host or env["DOCKER_HOST"], None)
    context = Docker._get_docker_context_endpoint()
    if context is not None:
        return _of(context.host, Docker._create_context_ssl_context(context))
    for path in _usual(env):
        if path.is_socket():
            return Address(f"unix://{path}")
    raise UnavailableError(
        "no Docker Engine found: neither DOCKER_HOST nor a socket in the usual places",
        hint="install and start Docker, or set CAPSULE_DOCKER_HOST to where it is",
    )


def _usual(env: Mapping[str, str]) -> list[Path]:
    own = env.get("XDG_RUNTIME_DIR")
    places = [Path(path) for path in SOCKETS]
    return places + [Path(own, name) for name in OWN_SOCKETS] if own else places


def _of(url: str, tls: ssl.SSLContext | None) -> Address:
    scheme, _, rest = url.partition("://")
    if scheme == "unix" and rest.startswith("/"):
        return Address(url)
    if scheme == "ssh" and rest:
        if find_spec("asyncssh") is None:
            raise UnavailableError(
                f"an Engine by ssh ({url}) takes the package asyncssh, which is not installed",
                hint="install it, or Capsule with its extra `docker-ssh`; or forward the socket: "
                "ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock …",
            )
        return Address(url)
    if scheme in ("tcp", "http", "https") and rest:
        if tls is None and (
            scheme == "https" or os.environ.get("DOCKER_TLS_VERIFY", "") not in ("", "0")
        ):
            tls = Docker._docker_machine_ssl_context()
        return Address(f"{'https' if tls else 'http'}://{rest.rstrip('/')}", tls)
    raise InvalidError(
        f"not the address of a Docker Engine: {url!r}",
        hint="such as unix:///run/docker.sock, tcp://host:2376 or ssh://user@host",
        field="docker_host",
    )
