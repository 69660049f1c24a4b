"""The one child of the server: `capsule-agent launcher`, which forks a keeper per box.

    server ── lifeline (a pipe nothing is written to) ──▶ launcher ──▶ keeper ──▶ pid 1, programs
           ── one Unix connection per launch, sweep or probe ──▶

The launcher has a session of its own and ends when the lifeline closes, which the kernel does
however the server ends. Keepers are not the server's children and go on. A launcher that died is
started again by the next request.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from capsule import surroundings
from capsule.errors import (
    CapacityError,
    CapsuleError,
    InvalidError,
    NoSpaceError,
    UnavailableError,
)
from capsule.link.ahead import Ahead
from capsule.link.conversation import Connect, Conversation, request_bytes, silence
from capsule.link.protocol import FrameType, pack
from capsule.link.stream import ByteStream
from capsule.link.unix import NobodyListensError
from capsule.providers.cleanup import to_the_end

MOUNT_POINT = "mount point of a volume"  # the agent's word for the stage


class Launcher:
    def __init__(
        self, agent: Path, directory: Path, on_spawn: Callable[[int], None] = lambda pid: None
    ) -> None:
        """`on_spawn` is called in a thread with each launcher's pid, before it is asked anything:
        what the launcher forks is where the launcher is."""
        self._agent = agent
        self._directory = directory
        self._on_spawn = on_spawn
        self._socket: Path | None = None
        self._way: Ahead | None = None  # to that socket
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        # Two requests that find the launcher dead must not start two.
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises UnavailableError when the agent's binary cannot be run."""
        async with self._starting:
            if not self._is_there():
                self._hang_up()
                await to_the_end(asyncio.to_thread(self._spawn))

    def _is_there(self) -> bool:
        alive = self._process is not None and self._process.poll() is None
        return alive and self._socket is not None and _listens(self._socket)

    async def aclose(self) -> None:
        process, self._process = self._process, None
        self._hang_up()
        await asyncio.to_thread(self._end, process)

    def expect(self) -> None:
        """A launch is being prepared. Whoever is to carry it out is forked meanwhile: by the time
        that there is something to say to them, they listen.
        """
        if self._way is not None:
            self._way.expect()

    async def launch(
        self, request: Mapping[str, Any], seccomp: bytes, *, timeout: float = 15.0
    ) -> dict[str, Any]:
        """Returns when the box's agent answers. Failures: see `launch_failure`.

        Raises NobodyListensError when there was no launcher and there is a new one: a request that
        names what came with the old one, its cgroups, must be made anew.
        """
        body = pack(FrameType.DATA, seccomp) + pack(FrameType.EOF)
        try:
            return await ask(self._connect, {"op": "launch", **request}, body, timeout=timeout)
        except NobodyListensError:
            await self.start()
            raise

    async def sweep(self, request: Mapping[str, Any], *, timeout: float = 15.0) -> None:
        await self.request({"op": "sweep", **request}, timeout=timeout)

    async def probe(self, what: str, path: Path | None = None) -> dict[str, Any]:
        where = {} if path is None else {"path": str(path)}
        return await self.request({"op": "probe", "what": what, **where}, timeout=5.0)

    async def request(
        self, request: Mapping[str, Any], body: bytes = b"", *, timeout: float
    ) -> dict[str, Any]:
        if self._way is None:
            await self.start()
        try:
            return await ask(self._connect, request, body, timeout=timeout)
        except NobodyListensError:
            await self.start()
        return await ask(self._connect, request, body, timeout=timeout)

    def _connect(self) -> Awaitable[ByteStream]:
        if self._way is None:  # it is being started again, or ended
            raise NobodyListensError("the launcher is not there")
        return self._way.connect_last()

    def _hang_up(self) -> None:
        """On the loop, whose timer a way has; the rest of an end is in a thread."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def _spawn(self) -> None:
        self._end(self._process)
        path = self._directory / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(self._directory)
            # Only the launcher holds these two: when it dies, connecting fails at once.
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
                self._new_lifeline() as lifeline,
            ):
                listener.bind(str(path))
                listener.listen(1024)
                self._process = self._popen(listener.fileno(), lifeline.fileno())
        except OSError as exc:
            raise UnavailableError(
                f"the agent cannot be started: {self._agent}: {exc}",
                hint="build it with `make agent`, and check that run_dir is writable and short",
            ) from exc
        self._on_spawn(self._process.pid)
        self._socket, self._way = path, Ahead(str(path))

    def _new_lifeline(self) -> BinaryIO:
        """The end that the launcher watches; ours stays open for as long as we live."""
        theirs, self._lifeline = os.pipe()
        return os.fdopen(theirs, "rb")

    def _popen(self, listener: int, lifeline: int) -> subprocess.Popen[bytes]:
        with open(self._directory / "log", "ab") as stderr:
            return subprocess.Popen(
                [str(self._agent), "launcher", str(listener), str(lifeline)],
                pass_fds=(listener, lifeline),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd="/",
                env={},  # boxes inherit nothing of the server's environment, secrets least of all
            )

    def _release(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
            self._socket = None

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        """With its lifeline closed it ends by itself; a launcher that hangs is ended."""
        self._release()
        if process is None:
            return
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(
    connect: Connect, request: Mapping[str, Any], body: bytes = b"", *, timeout: float
) -> dict[str, Any]:
    """One request with one answer, to a launcher or a keeper.

    Raises NobodyListensError when nothing was begun, so that it can be asked again, and
    UnavailableError when no answer came.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _converse(connect, request_bytes(request) + body)
    except TimeoutError:
        raise silence(request["op"], timeout) from None


async def _converse(connect: Connect, wire: bytes) -> dict[str, Any]:
    async with await Conversation.begin(connect, wire) as talk:
        try:
            return await talk.reply()
        except UnavailableError as exc:
            if talk.greeted:
                raise
            # Its HELLO comes before it looks at the request: it died first, and began nothing.
            raise NobodyListensError(exc.message) from exc


def _listens(path: Path) -> bool:
    """Somebody may have tidied up /run. And who was killed takes a moment to end, which it does not
    spend listening."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        pass  # its queue is full, or we have no descriptor to ask with
    return True


def launch_failure(error: CapsuleError) -> CapsuleError:
    """What a failed launch means: the host is full, or the host is not as it should be."""
    stage, cause = error.details.get("stage", "launch"), error.details.get("cause")
    details = {"stage": stage, "errno": error.details.get("errno", "")}
    if stage == MOUNT_POINT and details["errno"] in ("ENOTDIR", "ELOOP"):
        return no_mount_point()
    text = f"the sandbox could not be started: {stage}: {error.message}"
    if cause == "no_space":
        return NoSpaceError(text, hint="free some space below data_dir", **details)
    if cause in ("limit", "busy"):
        full = surroundings.exhausted() or "the host is at a limit; delete sandboxes"
        return CapacityError(text, hint=full, **details)
    if cause is None:
        full = surroundings.exhausted()
        return CapacityError(f"{text}: no process could be made", hint=full) if full else error
    return UnavailableError(text, hint="`capsule doctor` shows what this host allows", **details)


def no_mount_point() -> InvalidError:
    """It is looked for without following links, in files that a program has written."""
    return InvalidError(
        "volumes: a mount point, or what is on the way to it, is a link or a file in what the"
        " sandbox begins from, not a folder",
        hint="mount the volume at another path, or remove what is there before the snapshot",
        field="volumes",
    )


def _remove_dead(directory: Path) -> None:
    """Sockets of servers that were killed: the name says whose it was."""
    for path in directory.glob("*.sock"):
        owner = path.name.partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            path.unlink(missing_ok=True)
