"""How the host talks to the agent in a container.

`socket`: the box's folder on the host is mounted into the container at /.capsule, and the agent
binds its socket there. A connect costs what it costs locally. It takes an Engine on this host whose
containers' root is our own uid: the folder's mode is what keeps everybody else out.

`engine`: the agent's folder is a small tmpfs in the container, the agent comes from a volume, and a
relay that the Engine starts beside it carries the connections (providers/relay/).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from pathlib import Path

from capsule.errors import ConflictError
from capsule.host_errors import host_error
from capsule.link.unix import connect_unix
from capsule.providers.contract import ByteStream
from capsule.providers.docker import agent_volume
from capsule.providers.docker.plan import Mounted, bind
from capsule.providers.docker.probe import Facts, Runtime

INSIDE = "/.capsule"
AGENT_INSIDE = f"{agent_volume.FOLDER}/{agent_volume.FILE}"
RELAY = [AGENT_INSIDE, "relay", f"{INSIDE}/agent.sock"]
SUDO = "/usr/local/bin/sudo"  # in every path, and before one of the image's own
SUDO_MODE = 0o755
SOCKET = "agent.sock"
ERROR = "error"

NAMES = {"socket": "the agent's own socket", "engine": "a stream through the Engine"}


def choose(setting: str, found: Facts, runtime: Runtime) -> str:
    """`socket` where it can work, as far as one can tell from here."""
    if setting != "auto":
        return setting
    return "socket" if found.shares_root and runtime.lets_sockets_out else "engine"


class Folders:
    """The boxes' folders on the host: one for each box that is reached by its socket."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def prepare(self) -> None:
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._parent.chmod(0o700)

    def path(self, sandbox_id: str) -> Path:
        return self._parent / sandbox_id

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self._parent))
        return []

    async def make(self, sandbox_id: str) -> None:
        """Raises ConflictError when the id is taken."""
        await asyncio.to_thread(_make, self.path(sandbox_id))

    async def remove(self, sandbox_id: str) -> None:
        """It holds a socket, a mount point and perhaps a reason; nothing of a program's."""
        await asyncio.to_thread(_remove, self.path(sandbox_id))

    def reason(self, sandbox_id: str) -> str:
        """Why the agent could not start, in its own words; "" when it left none."""
        with contextlib.suppress(OSError):
            return (self.path(sandbox_id) / ERROR).read_text(errors="replace").strip()[:500]
        return ""

    async def connect(self, sandbox_id: str) -> ByteStream:
        return await connect_unix(str(self.path(sandbox_id) / SOCKET))


def _make(path: Path) -> None:
    try:
        path.mkdir(0o700)
    except FileExistsError:
        raise ConflictError(f"a box with this id exists already: {path.name}") from None
    except OSError as exc:
        raise host_error("no folder for the box", exc) from exc


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise host_error("the box's folder cannot be removed", exc) from exc


def copy_agent(agent: Path, copy: Path, mode: int = agent_volume.MODE) -> None:
    """A copy that its owner alone, root of the containers, may read and start. Blocks.

    To the file API and to a new exec, `/proc/self/exe` is the agent: programs have no use for it.
    The one that is their `sudo` is another file.
    """
    binary = agent.read_bytes()
    with contextlib.suppress(FileNotFoundError):
        if copy.stat().st_mode & 0o777 == mode and copy.read_bytes() == binary:
            return
    draft = copy.with_name(f".{copy.name}-{secrets.token_hex(4)}")
    draft.touch(mode=0o700)
    draft.write_bytes(binary)
    draft.chmod(mode)
    draft.replace(copy)  # boxes that run the old one keep it


def by_socket(folder: Path, agent: Path, sudo: Path | None = None) -> Mounted:
    return Mounted(
        mounts=[
            bind(str(folder), INSIDE),
            bind(str(agent), f"{INSIDE}/agent", read_only=True),
            *([bind(str(sudo), SUDO, read_only=True)] if sudo else []),
        ]
    )


def by_engine(volume: str) -> Mounted:
    return Mounted(
        mounts=[agent_volume.mount(volume)],
        tmpfs={INSIDE: "rw,nosuid,nodev,noexec,size=1m,nr_inodes=16,mode=700,uid=0,gid=0"},
        entrypoint=AGENT_INSIDE,
    )
