"""What a build leaves when nobody is there any more to clean up after it.

A build under way has a file, `FOLDER/ID`, held by a lock, with a line for each image and container
that it made. Where everything went well, or badly but we lived, they are removed and then the
file. If the server was killed, or the Engine, the file is found without its lock, and the work is
done then.

The ids were read from the builder's output, where a program can put any. So only what was not there
when the build began is noted, and only what nothing needs is removed: an image without a name,
without children and containers; a container that does not run.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from capsule.errors import NotFoundError
from capsule.providers.docker.image_engine import ImageEngine, discard_image

IMAGE, CONTAINER = "image", "container"
REPLACED = "replaced"  # an image that had the name before, with what it was made from
NAME = "name"  # one that an image has for a while
_KINDS = (IMAGE, CONTAINER, REPLACED, NAME)


@dataclass(slots=True, eq=False)
class Ledger:
    """Blocks; call it in a thread. Closed by `close`, which forgets it, or by the process's end."""

    path: Path
    _fd: int
    notes: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def begin(cls, folder: Path) -> Ledger:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / secrets.token_hex(8)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return cls(path, fd)

    @classmethod
    def abandoned(cls, folder: Path) -> Iterator[Ledger]:
        """Those of builds that were killed. Whoever gets one holds its lock."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                ledger = cls(path, fd)
                if ledger._take():
                    yield ledger

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            return False
        for line in os.pread(self._fd, 1 << 20, 0).decode("ascii", "replace").splitlines():
            kind, _, id = line.partition(" ")
            if kind in _KINDS and id:
                self.notes.append((kind, id))
        return True

    def note(self, kind: str, id: str) -> None:
        self.notes.append((kind, id))
        os.write(self._fd, f"{kind} {id}\n".encode("ascii"))

    def close(self, *, keep: bool = False) -> None:
        """With `keep` somebody else finishes it later."""
        if not keep:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


async def clear(engine: ImageEngine, ledger: Ledger, *, patience: float = 0.0) -> bool:
    """Remove what is noted, within `patience` seconds: the Engine ends a build that was cancelled
    in its own time. False: something is still in use, and may go later.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    left = ledger.notes[::-1]
    while True:
        left = [note for note in left if not await _removed(engine, *note)]
        # What runs from an image that was replaced is a sandbox: no reason to wait.
        if all(kind == REPLACED for kind, _ in left) or loop.time() > deadline:
            return not left
        await asyncio.sleep(0.05)


async def await_end(
    engine: ImageEngine, ledger: Ledger, before: set[str], *, image: str, step: str, within: float
) -> None:
    """After a build was cancelled in `step`, which started from `image`: until the Engine has
    removed its container. If the step was just done, note the image that came of it after all."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    quiet = 0
    while quiet < 2 and loop.time() < deadline:
        quiet = 0 if await _runs_from(engine, image, before) else quiet + 1
        await asyncio.sleep(0.05)
    for id in await engine.image_ids() - before:
        found = await engine.image(id) or {}
        if str(found.get("Parent")).removeprefix("sha256:").startswith(image):
            made_by = " ".join((await engine.history(id))[0].split())
            if made_by.endswith(step.partition(" ")[2]):
                await asyncio.to_thread(ledger.note, IMAGE, id)


async def _runs_from(engine: ImageEngine, image: str, before: set[str]) -> bool:
    for each in await engine.everything():
        new = str(each["Id"]) not in before
        ours = str(each["ImageID"]).removeprefix("sha256:").startswith(image)
        if new and ours and "capsule.id" not in (each.get("Labels") or {}):
            return True
    return False


async def _removed(engine: ImageEngine, kind: str, id: str) -> bool:
    if kind == NAME:
        with suppress(NotFoundError):
            await engine.remove_image(id)  # the name; the image too, if it has no other
        return True
    if kind != CONTAINER:
        return await discard_image(engine, id, parents=kind == REPLACED)
    found = await engine.inspect(id)
    if found is None:
        return True
    if found["State"].get("Running"):
        return False
    await engine.remove(id)
    return True
