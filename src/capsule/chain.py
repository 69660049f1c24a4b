"""The hash chain of a log: of executions, and of the trail. Sans-I/O.

Every entry holds the hash of the one before it, and its own hash is over all that it says: whoever
changes, removes or inserts one breaks the chain there. Cutting off the end leaves a chain that is
whole, and whoever may write the file can compute all of it anew; against both helps a head that was
written down elsewhere.

An entry has the digests of code and output, never their text: that can be removed, by age or
because somebody wants it forgotten, and the chain still holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

START = "0" * 64  # what the first entry has before it

_encode = msgspec.json.Encoder(order="deterministic").encode


class Entry(NamedTuple):
    """One row of the log, as it is stored."""

    seq: int
    body: bytes
    hash: str


class Texts(NamedTuple):
    """What is kept of code and output; None: removed since."""

    command: bytes | None
    stdout: bytes | None
    stderr: bytes | None


class Broken(NamedTuple):
    seq: int
    problem: str


class Verdict(NamedTuple):
    entries: int
    head: str
    broken: tuple[Broken, ...]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(seq: int, prev: str, said: dict[str, Any]) -> Entry:
    body = _encode({**said, "seq": seq, "prev": prev})
    return Entry(seq, body, digest(body))


def stamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")


def verify(
    entries: Iterable[tuple[Entry, Texts]],
    *,
    after: int = 0,
    prev: str = START,
    head: str | None = None,
) -> Verdict:
    """`after` and `prev` are number and hash of the last entry that was removed by age; `head` is a
    hash that was the last one once."""
    broken: list[Broken] = []
    expected, count = after + 1, 0
    seen = head in (None, prev)
    for entry, texts in entries:
        count += 1
        if entry.seq != expected:
            broken.append(Broken(entry.seq, f"entry {expected} is missing before it"))
        broken += [Broken(entry.seq, problem) for problem in _problems(entry, texts, prev)]
        expected, prev = entry.seq + 1, entry.hash
        seen = seen or prev == head
    if not seen:
        broken.append(Broken(expected, "the head that was given is not in the log"))
    return Verdict(count, prev, tuple(broken))


def _problems(entry: Entry, texts: Texts, prev: str) -> Iterable[str]:
    if digest(entry.body) != entry.hash:
        yield "its content does not have its hash"
    try:
        said = msgspec.json.decode(entry.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        yield "its content is no JSON"
        return
    if said.get("prev") != prev:
        yield "it does not follow the entry before it"
    if said.get("seq") != entry.seq:
        yield f"it says that it is entry {said.get('seq')}"
    for name, kept in texts._asdict().items():
        if kept is not None and digest(kept) != said.get(f"{name}_sha256"):
            yield f"its {name} does not have the hash that it says"
