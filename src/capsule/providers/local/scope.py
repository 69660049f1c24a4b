"""A cgroup from systemd: a delegated transient scope for one process, asked for over D-Bus.

An ordinary user asks the manager of their own session, root the system's. The sockets below
`systemd/private` are systemd's own and answer without a bus; the bus is the interface that systemd
promises. Whatever fails becomes a reason: without a scope Capsule goes on, with fewer limits.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 2.0  # seconds for everything; a manager that works needs some milliseconds
POLL = 0.002
MOST = 1 << 20  # bytes of an answer; those of a manager have a few hundred
SYSTEMD = Path("/run/systemd/system")  # exists where systemd is the init
LINGER = Path("/var/lib/systemd/linger")
NEVER = "the setting cgroup_scope is never"
METHOD_CALL, METHOD_RETURN, ERROR = 1, 2, 3
REPLY_SERIAL, UNLIMITED = 5, (1 << 64) - 1
DELEGATED = b"\1b\0\0" + struct.pack("=I", 1)  # a variant with true
MANAGER = "org.freedesktop.systemd1"
OBJECTS = "/org/freedesktop/systemd1"
BUS = "org.freedesktop.DBus"
PROPERTIES = f"{BUS}.Properties"
HELLO = (BUS, "/org/freedesktop/DBus", BUS, "Hello")
START = (MANAGER, OBJECTS, f"{MANAGER}.Manager", "StartTransientUnit")


class Scope(NamedTuple):
    """The launcher's cgroup, as a path below the mount; or why there is none."""

    own: str = ""
    why: str = ""

    @property
    def unit(self) -> str:
        return self.own.rpartition("/")[2]


class _RefusedError(Exception):
    """Somebody answered, but not with a scope."""


def asker(setting: str, pid: int) -> Callable[[str], Scope] | None:
    """How the launcher gets its scope, by the cgroup that the server was started in; None where
    another init runs this machine."""
    if not SYSTEMD.is_dir():
        return None
    if setting == "never":
        return lambda begun_in: Scope(why=NEVER)
    uid = os.geteuid()
    return partial(claim, pid, uid, sockets(uid, os.environ))


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def lingers(uid: int) -> bool:
    """Whether the user's manager stays when they log out."""
    return (LINGER / user_name(uid)).exists()


def sockets(uid: int, env: Mapping[str, str]) -> list[tuple[Path, bool]]:
    """Where a manager answers, and whether that is a bus; the quickest first."""
    if uid == 0:
        run = Path("/run")
        return [(run / "systemd/private", False), (run / "dbus/system_bus_socket", True)]
    usual = Path(f"/run/user/{uid}")
    folders = dict.fromkeys((Path(env.get("XDG_RUNTIME_DIR") or usual), usual))
    private = [(folder / "systemd/private", False) for folder in folders]
    return [*private, (usual / "bus", True)]


def claim(
    pid: int,
    uid: int,
    places: list[tuple[Path, bool]],
    begun_in: str,
    *,
    timeout: float = TIMEOUT,
    own: Callable[[int], str] | None = None,
) -> Scope:
    """Move `pid` into a scope of its own, unless the server has one that was delegated to it.

    Blocks for `timeout` seconds at most; never raises.
    """
    deadline = time.monotonic() + timeout
    reasons: dict[str, None] = {}
    for count, (path, is_bus) in enumerate(places):
        now = time.monotonic()
        # One that is silent leaves the others their time.
        mine = now + (deadline - now) / (len(places) - count)
        unit = f"capsule-{pid}-{secrets.token_hex(4)}.scope"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                peer = _Peer(connection, mine)
                peer.connect(path, uid, is_bus=is_bus)
                if begun_in.endswith(".scope") and peer.is_delegated(begun_in.rpartition("/")[2]):
                    return Scope(begun_in)
                arguments = transient_unit(unit, pid, uid)
                peer.call(START, "ssa(sv)a(sa(sv))", arguments)
            return Scope(_moved(own or own_cgroup, pid, unit, mine))
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            reasons[f"no manager answers at {path}"] = None
        except TimeoutError:
            reasons[f"{path} did not answer within {mine - now:.1f} seconds"] = None
        except (OSError, ValueError, struct.error) as error:
            reasons[f"{path}: {error}"] = None
        except _RefusedError as error:
            reasons[str(error)] = None
    return Scope(why="; ".join(reasons))


def own_cgroup(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def _moved(own: Callable[[int], str], pid: int, unit: str, deadline: float) -> str:
    """The answer says that a job was queued; the kernel says that it was done."""
    while True:
        try:
            path = own(pid)
        except OSError:
            raise _RefusedError("the launcher ended while systemd made its scope") from None
        if path.endswith(f"/{unit}"):
            return path
        if time.monotonic() > deadline:
            raise _RefusedError(f"systemd made {unit}, but did not move the launcher into it")
        time.sleep(POLL)


def transient_unit(unit: str, pid: int, uid: int) -> bytes:
    """The arguments of StartTransientUnit: name, mode, properties, no further units."""
    body = _Writer()
    body.text(unit)
    body.text("fail")
    with body.array(8):
        for name, value in (
            ("Description", "Sandboxes of Capsule"),
            ("Slice", "app.slice" if uid else "system.slice"),
            ("CollectMode", "inactive-or-failed"),
        ):
            body.property(name, "s")
            body.text(value)
        body.property("Delegate", "b")
        body.number("I", 1)
        body.property("TasksMax", "t")
        body.number("Q", UNLIMITED)
        body.property("PIDs", "au")
        with body.array(4):
            body.number("I", pid)
    with body.array(8):
        pass
    return bytes(body.data)


class _Writer:
    """D-Bus's encoding, little endian. Every value is aligned to its size."""

    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, to: int) -> None:
        self.data += bytes(-len(self.data) % to)

    def number(self, kind: str, value: int) -> None:
        self.align(struct.calcsize(kind))
        self.data += struct.pack(f"<{kind}", value)

    def text(self, value: str) -> None:
        encoded = value.encode()
        self.number("I", len(encoded))
        self.data += encoded + b"\0"

    def signature(self, value: str) -> None:
        self.data += bytes([len(value)]) + value.encode() + b"\0"

    def property(self, name: str, signature: str) -> None:
        self.align(8)
        self.text(name)
        self.signature(signature)

    @contextlib.contextmanager
    def array(self, alignment: int) -> Iterator[None]:
        """Its length does not count the padding before the first element."""
        self.number("I", 0)
        at = len(self.data)
        self.align(alignment)
        first = len(self.data)
        yield
        struct.pack_into("<I", self.data, at - 4, len(self.data) - first)


class _Peer:
    """One connection to a manager or a bus."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._received = b""
        self._serial = 0

    def connect(self, path: Path, uid: int, *, is_bus: bool) -> None:
        self._wait()
        self._connection.connect(str(path))
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] not in (0, uid) and not is_bus:
            raise _RefusedError(f"{path} is another user's")  # as after `su`
        self._send(b"\0AUTH EXTERNAL " + str(uid).encode().hex().encode() + b"\r\n")
        line = self._line()
        if not line.startswith(b"OK "):
            raise _RefusedError(f"{path} refused us: {line.decode(errors='replace')}")
        self._send(b"BEGIN\r\n")
        if is_bus:
            self.call(HELLO)

    def is_delegated(self, scope: str) -> bool:
        """Only a user's own manager knows the user's scopes; it marks none of them by an xattr."""
        name = "".join(c if c.isalnum() else f"_{ord(c):02x}" for c in scope)
        body = _Writer()
        body.text(f"{MANAGER}.Scope")
        body.text("Delegate")
        try:
            target = (MANAGER, f"{OBJECTS}/unit/{name}", PROPERTIES, "Get")
            return self.call(target, "ss", bytes(body.data)) == DELEGATED
        except _RefusedError:
            return False

    def call(
        self, target: tuple[str, str, str, str], signature: str = "", body: bytes = b""
    ) -> bytes:
        """Returns the answer's body when it succeeded."""
        destination, path, interface, member = target
        self._serial += 1
        serial = self._serial
        message = _Writer()
        message.data += struct.pack("<cBBBII", b"l", METHOD_CALL, 0, 1, len(body), serial)
        with message.array(8):
            fields = ((1, "o", path), (2, "s", interface), (3, "s", member), (6, "s", destination))
            for code, type_, value in fields:
                message.align(8)
                message.data.append(code)
                message.signature(type_)
                message.text(value)
            if signature:
                message.align(8)
                message.data.append(8)
                message.signature("g")
                message.signature(signature)
        message.align(8)
        self._send(bytes(message.data) + body)
        while (found := self._message(serial)) is None:  # a signal, or to somebody else
            pass
        kind, answer = found
        if kind == ERROR:
            raise _RefusedError(f"{member}: {answer[4:-1].decode(errors='replace')}")
        return answer

    def _message(self, serial: int) -> tuple[int, bytes] | None:
        """The next message: its kind and its body, if it is an answer to `serial`."""
        head = self._exactly(16)
        order = ">" if head[:1] == b"B" else "<"
        length, _, fields = struct.unpack(f"{order}III", head[4:])
        if length + fields > MOST:
            raise _RefusedError("systemd answered at too great length")
        rest = self._exactly(fields + -fields % 8 + length)
        kind = head[1]
        # A field is a code, the signature "u", and the number.
        ours = bytes([REPLY_SERIAL, 1]) + b"u\0" + struct.pack(f"{order}I", serial)
        if kind not in (METHOD_RETURN, ERROR) or ours not in rest[:fields]:
            return None
        return kind, rest[len(rest) - length :]

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)

    def _send(self, data: bytes) -> None:
        self._wait()
        self._connection.sendall(data)

    def _more(self) -> None:
        self._wait()
        data = self._connection.recv(4096)
        if not data:
            raise _RefusedError("systemd closed the connection")
        self._received += data
        if len(self._received) > 2 * MOST:
            raise _RefusedError("systemd answered at too great length")

    def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            self._more()
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def _line(self) -> bytes:
        while b"\r\n" not in self._received:
            self._more()
        line, _, self._received = self._received.partition(b"\r\n")
        return line
