"""Asking systemd for a scope: against a manager of our own at a real socket, good and bad."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.providers.local import scope
from capsule.providers.local.scope import Scope

PID = 4711
APPS = "/user.slice/user-1000.slice/user@1000.service/app.slice"
FIXED = {"b": "I", "u": "I", "t": "Q", "y": "B"}


class Reader:
    """A second reading of the D-Bus specification; it shares no line with what it checks."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def read(self, signature: str) -> list[Any]:
        found = []
        while signature:
            one = _first(signature)
            found.append(self._one(one))
            signature = signature[len(one) :]
        return found

    def _one(self, kind: str) -> Any:
        if kind in FIXED:
            return self._number(FIXED[kind])
        if kind in "so":
            return self._bytes(self._number("I"))
        if kind == "g":
            return self._bytes(self._number("B"))
        if kind == "v":
            (value,) = self.read(self._one("g"))
            return value
        if kind[0] == "(":
            self.at += -self.at % 8
            return self.read(kind[1:-1])
        size = self._number("I")
        self.at += -self.at % (8 if kind[1] in "(t" else 4)
        end, found = self.at + size, []
        while self.at < end:
            found.append(self._one(kind[1:]))
        assert self.at == end
        return found

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        padding = self.data[self.at : self.at + -self.at % size]
        assert not any(padding)
        self.at += len(padding) + size
        (value,) = struct.unpack(f"<{kind}", self.data[self.at - size : self.at])
        return int(value)

    def _bytes(self, size: int) -> str:
        text = self.data[self.at : self.at + size].decode()
        assert self.data[self.at + size] == 0
        self.at += size + 1
        return text


def _first(signature: str) -> str:
    if signature[0] == "a":
        return "a" + _first(signature[1:])
    depth, end = 0, 0
    while True:
        depth += {"(": 1, ")": -1}.get(signature[end], 0)
        end += 1
        if depth == 0:
            return signature[:end]


def message(kind: int, serial: int, body: bytes = b"", *, signature: str = "") -> bytes:
    """An answer to `serial`, as systemd 257 sends it."""
    fields = struct.pack("<BB2sI", 5, 1, b"u\0", serial)
    if signature:
        fields += bytes([8, 1]) + b"g\0" + bytes([len(signature)]) + signature.encode() + b"\0"
    head = struct.pack("<cBBBIII", b"l", kind, 1, 1, len(body), 99, len(fields))
    return head + fields + bytes(-len(fields) % 8) + body


SIGNAL = struct.pack("<cBBBIII", b"l", 4, 1, 1, 0, 7, 8) + struct.pack("<BB2sI", 9, 1, b"u\0", 0)


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode() + b"\0"


class Manager:
    """Keeps what it was asked, and answers by `answer`: member → bytes, None for never."""

    def __init__(self, path: Path, answer: Callable[[str, int], bytes | None]) -> None:
        self.greeting = b"OK 0123456789abcdef0123456789abcdef\r\n"
        self.calls: list[tuple[str, list[Any]]] = []
        self.objects: list[str] = []
        self.unit = ""
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cgroup(self, pid: int) -> str:
        """As /proc has it: the move is a job, and comes a moment after the answer."""
        assert pid == PID
        unit, self.unit = self.unit, f"{APPS}/{self.unit}" if self.unit else ""
        return unit or SESSION

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                with connection, connection.makefile("rwb", buffering=0) as stream:
                    self._converse(stream)

    def _converse(self, stream: Any) -> None:
        assert stream.read(1) == b"\0"
        assert stream.readline() == f"AUTH EXTERNAL {b'1000'.hex()}\r\n".encode()
        stream.write(self.greeting)
        if not stream.readline():
            return
        while head := stream.read(16):
            _, _, _, _, length, serial, fields = struct.unpack("<cBBBIII", head)
            rest = stream.read(fields + -fields % 8 + length)
            header = dict(_fields(head, rest))
            body = Reader(rest[len(rest) - length :])
            arguments = body.read(header.get(8, ""))
            assert body.at == length
            self.calls.append((header[3], arguments))
            self.objects.append(header[1])
            answer = self._answer(header[3], serial)
            if answer is None:
                time.sleep(5)
                return
            if header[3] == "StartTransientUnit" and answer[-1:] != b"!":
                self.unit = arguments[0]
            stream.write(SIGNAL + answer)


def _fields(head: bytes, rest: bytes) -> list[tuple[int, Any]]:
    reader = Reader(head + rest)
    reader.at = 12
    return [(code, value) for code, value in reader.read("a(yv)")[0]]


def obliging(member: str, serial: int) -> bytes:
    return message(2, serial, text(":1.7" if member == "Hello" else "/job/1"), signature="s")


def refusing(member: str, serial: int) -> bytes:
    return message(3, serial, text("Cannot set property Slice"), signature="s")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "private"


@pytest.fixture
def manage(place: Path) -> Iterator[Callable[..., Manager]]:
    made: list[Manager] = []

    def start(answer: Callable[[str, int], bytes | None], path: Path = place) -> Manager:
        made.append(Manager(path, answer))
        return made[-1]

    yield start
    for each in made:
        each.close()


SESSION = "/user.slice/user-1000.slice/session-1.scope"


def claim(
    manager: Manager | None,
    *places: tuple[Path, bool],
    timeout: float = 5.0,
    begun_in: str = "/system.slice/cron.service",
) -> Scope:
    own = manager.cgroup if manager is not None else scope.own_cgroup
    return scope.claim(PID, 1000, [*places], begun_in, timeout=timeout, own=own)


def test_the_launcher_alone_moves_into_a_delegated_scope(
    place: Path, manage: Callable[..., Manager]
) -> None:
    manager = manage(obliging)
    given = claim(manager, (place, False))
    assert given.why == "" and given.own == f"{APPS}/{given.unit}"
    ((member, (unit, mode, properties, further)),) = manager.calls
    assert (member, unit, mode, further) == ("StartTransientUnit", given.unit, "fail", [])
    assert unit.startswith(f"capsule-{PID}-") and unit.endswith(".scope")
    assert dict(properties) == {
        "Description": "Sandboxes of Capsule",
        "Slice": "app.slice",
        "CollectMode": "inactive-or-failed",
        "Delegate": 1,
        "TasksMax": (1 << 64) - 1,
        "PIDs": [PID],
    }


def test_a_bus_is_greeted_first_and_is_asked_where_no_manager_answers(
    place: Path, tmp_path: Path, manage: Callable[..., Manager]
) -> None:
    manager = manage(obliging, tmp_path / "bus")
    given = claim(manager, (place, False), (tmp_path / "bus", True))
    assert given.unit
    assert [member for member, _ in manager.calls] == ["Hello", "StartTransientUnit"]


@pytest.mark.parametrize(
    ("delegated", "members"),
    [
        (True, ["Get"]),
        (False, ["Get", "StartTransientUnit"]),
        (None, ["Get", "StartTransientUnit"]),
    ],
    ids=["delegated", "not delegated", "not a unit of this manager"],
)
def test_a_scope_that_was_delegated_to_the_server_is_used(
    place: Path, manage: Callable[..., Manager], delegated: bool | None, members: list[str]
) -> None:
    def answer(member: str, serial: int) -> bytes:
        if member != "Get":
            return obliging(member, serial)
        if delegated is None:
            return refusing(member, serial)
        return message(2, serial, b"\1b\0\0" + struct.pack("<I", delegated), signature="v")

    manager, own = manage(answer), f"{APPS}/run-r2f4a.scope"
    given = claim(manager, (place, False), begun_in=own)
    assert (given.own == own) == bool(delegated) and given.own
    assert [member for member, _ in manager.calls] == members
    assert manager.calls[0][1] == ["org.freedesktop.systemd1.Scope", "Delegate"]
    assert manager.objects[0] == "/org/freedesktop/systemd1/unit/run_2dr2f4a_2escope"


def test_what_systemd_says_is_the_reason(place: Path, manage: Callable[..., Manager]) -> None:
    given = claim(manage(refusing), (place, False))
    assert given == Scope(why="StartTransientUnit: Cannot set property Slice")


def test_a_manager_that_is_silent_costs_no_more_than_its_time(
    place: Path, tmp_path: Path, manage: Callable[..., Manager]
) -> None:
    manager, begun = manage(lambda member, serial: None), time.monotonic()
    given = claim(manager, (place, False), (tmp_path / "bus", True), timeout=0.2)
    assert given == Scope(
        why=f"{place} did not answer within 0.1 seconds; no manager answers at {tmp_path}/bus"
    )
    assert time.monotonic() - begun < 2


def test_an_answer_alone_is_not_believed(place: Path, manage: Callable[..., Manager]) -> None:
    manager = manage(lambda member, serial: message(2, serial, text("!") + b"!"))
    given = claim(manager, (place, False), timeout=0.2)
    assert not given.own and "did not move the launcher" in given.why


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, id="another protocol"),
        pytest.param(b"\0" * 64, id="zeros"),
        pytest.param(b"\xff" * 64, id="a length that is none"),
        pytest.param(message(3, 2, b"\xff\xff\xff\xff\xff"), id="a text that is none"),
    ],
)
def test_junk_is_a_reason_and_no_exception(
    place: Path, manage: Callable[..., Manager], junk: bytes
) -> None:
    given = claim(manage(lambda member, serial: junk), (place, False), timeout=0.2)
    assert given.why and not given.own


def test_a_manager_of_somebody_else_refuses(place: Path, manage: Callable[..., Manager]) -> None:
    manager = manage(obliging)
    manager.greeting = b"REJECTED EXTERNAL\r\n"
    assert "refused us: REJECTED EXTERNAL" in claim(manager, (place, False)).why


def test_nobody_to_ask_is_a_reason(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(closed))
    long = tmp_path / ("x" * 120)
    given = claim(None, (tmp_path / "absent", False), (closed, True), (long, True))
    assert given.own == ""
    assert f"no manager answers at {tmp_path}/absent; " in given.why
    assert f"no manager answers at {closed}; " in given.why
    assert "AF_UNIX path too long" in given.why


def test_a_user_asks_the_manager_of_their_session_and_root_the_systems() -> None:
    usual = [(Path("/run/user/7/systemd/private"), False), (Path("/run/user/7/bus"), True)]
    assert scope.sockets(7, {}) == usual
    assert scope.sockets(7, {"XDG_RUNTIME_DIR": ""}) == usual  # su -
    own = (Path("/run/of/mine/systemd/private"), False)
    assert scope.sockets(7, {"XDG_RUNTIME_DIR": "/run/of/mine"}) == [own, *usual]
    assert scope.sockets(0, {"XDG_RUNTIME_DIR": "/run/user/7"}) == [
        (Path("/run/systemd/private"), False),
        (Path("/run/dbus/system_bus_socket"), True),
    ]


def test_who_asks_is_decided_by_the_init_and_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scope, "SYSTEMD", tmp_path / "absent")
    assert scope.asker("auto", PID) is None
    monkeypatch.setattr(scope, "SYSTEMD", tmp_path)
    never = scope.asker("never", PID)
    assert never is not None and never(SESSION) == Scope(why="the setting cgroup_scope is never")
    assert scope.asker("auto", PID) is not None


def test_an_own_cgroup_is_read_from_proc() -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    assert scope.own_cgroup(os.getpid()) in ("", *(line[3:] for line in lines))
