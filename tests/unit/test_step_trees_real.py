"""Whatever programs do to files, a step shows the tree that was there: random changes, a step each,
and every step looked at again. Also while stacks of layers are merged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from capsule.service import ExecCall, Service
from capsule.service import steps as steps_module
from tests.support import eventually
from tests.support.backends import layers
from tests.unit.test_service_real import folder, serving
from tests.unit.test_snapshots_real import sh
from tests.unit.test_steps_real import layers_of, stepping

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]
__all__ = ["folder"]

SEEDS = [int(seed) for seed in os.environ.get("CAPSULE_TREE_SEEDS", "1").split()]
NAMES = ("a", "b", "c")
PAUSE = "sleep 0.02\n"  # a change within one tick of the clock counts for the next step, too
# What no program of a shell does: renames that exchange, or leave a whiteout (Python has no
# renameat2), files that had no name, attributes.
HELPER = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None)
what, *paths = sys.argv[1:]
if what in ("swap", "whiteout"):
    old, new = (os.fsencode(path) for path in paths)
    libc.renameat2(-100, old, -100, new, 2 if what == "swap" else 4)
elif what == "nameless":
    fd = os.open(os.path.dirname(paths[0]) or ".", os.O_TMPFILE | os.O_RDWR, 0o644)
    os.write(fd, os.fsencode(paths[1]))
    libc.linkat(-100, b"/proc/self/fd/%d" % fd, -100, os.fsencode(paths[0]), 0x400)
elif what == "hole":
    fd = os.open(paths[0], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    os.pwrite(fd, os.fsencode(paths[1]) * 9000, 5000)
    libc.fallocate(fd, 3, ctypes.c_long(4096), ctypes.c_long(4096))
elif what == "note":
    os.setxattr(paths[0], "user.note", os.fsencode(paths[1]), follow_symlinks=False)
elif what == "forget":
    os.removexattr(paths[0], "user.note", follow_symlinks=False)
else:
    for top, _, names in os.walk(b"."):
        for name in names:
            path = os.path.join(top, name)
            if os.path.isfile(path) and not os.path.islink(path):
                noted = os.listxattr(path)
                noted and print(path, [(key, os.getxattr(path, key)) for key in sorted(noted)])
"""
# Names, kinds, modes, times, targets; which names are one file (not how many it has: a step's file
# may be another step's as well); contents; attributes of files. Root sees what its user hides.
LISTING = r"""
cd /workspace
find . /tmp/kept ! -type p ! -type c -printf '%p %y %m %T@ %l\n' | sort
find . -type f -printf '%i %P\n' | sort -k 2 |
    awk '$1 in first { print $2, first[$1]; next } { first[$1] = $2 }'
find . /tmp/kept -type f -exec sha1sum {} + | sort
python3 /tmp/do list | sort
"""
# `p` and `q` are paths, `n` a number that was not used before.
CHANGES = (
    "mkdir -p $(dirname {p}); test -p {p} || echo {n} > {p}",
    "test -p {p} || echo {n} >> {p}",
    "rm -rf {p}",
    "mkdir -p {p}; rm -rf {p}/a {p}/b; echo {n} > {p}/a; echo {n} > {p}/b",
    "rm -rf {p}; mkdir -p {p}; echo {n} > {p}/c",
    "mv -T {p} {q}",
    "rm -rf {q}; mv {p} {q}",
    "mv {p} t; mv {q} {p}; mv t {q}; rm -rf t",
    "rm -rf t; mv {p} t; mkdir {p}; mv t/* {p}; rm -rf t",
    "rm -rf t; mv {p}/a t; rm -rf {p}; mkdir {p}; mv t {p}/a; rm -rf t",
    "rm -rf t; mv {p} t; mv t {p}",
    "ln -f {p} {q}",
    "ln {p} {q}; rm -f {p}",
    "ln -sfn {q} {p}",
    "rm -rf {p}; ln -s {n} {p}",
    "chmod 7{m} {p}",
    "cp -a {p} {q}",
    "touch {p}",
    "rm -rf {p}; mkfifo {p}",
    "python3 /tmp/do swap {p} {q}",
    "python3 /tmp/do whiteout {p} {q}",
    "rm -rf {p}; python3 /tmp/do nameless {p} {n}",
    "python3 /tmp/do hole {p} {n}",
    "python3 /tmp/do note {p} {n}",
    "python3 /tmp/do forget {p}",
    "chmod 0 {p}",
    "mkdir -p {p}; echo {n} > {p}/a; chmod 0 {p}",
    "rm -rf /tmp/kept/{n}; mv {p} /tmp/kept/{n}",
    "mv /tmp/kept/* {q}",
    "rm -rf /tmp/kept/*",
    "chmod 7{m} /workspace /tmp/kept",
    "truncate -s 1000000 {p}",
)


async def as_root(service: Service, id: str, text: str) -> str:
    done = await service.exec(id, ExecCall(("sh", "-c", text), user="root"))
    assert done.exit.exit_code == 0, done.stderr.decode()
    return done.stdout.decode(errors="backslashreplace")


async def beginning(service: Service) -> str:
    put = f"cat > /tmp/do <<'END'\n{HELPER}END\nmkdir -m 777 /tmp/kept; sleep 0.02"
    return await stepping(service, put, template="python")


class Trees:
    """A sandbox, and what its steps were seen to be."""

    def __init__(self, service: Service, id: str, seed: int) -> None:
        self._service = service
        self._id = id
        self._random = random.Random(seed)
        self._count = 0
        self.seen: dict[int, tuple[str, str]] = {}  # by step: what was done, and the tree

    async def change(self) -> None:
        pick = self._random
        done = "\n".join(self._one() for _ in range(pick.randint(1, 3)))
        user = pick.choice((None, "root"))
        await self.do(done, *(pick.choice(("", PAUSE)) for _ in range(2)), user=user)

    async def do(
        self, done: str, before: str = "", after: str = PAUSE, *, user: str | None = None
    ) -> None:
        script = f"{before}cd /workspace; (\n{done}\n) 2>/dev/null\n{after}"
        await self._service.exec(self._id, ExecCall(("sh", "-c", script), user=user))
        number = self._service.steps.list(self._id)[-1].number
        self.seen[number] = (done, await self._tree(self._id))

    async def check(self, number: int) -> None:
        (other,) = await self._service.fork(self._id, 1, at=number)
        try:
            assert await self._tree(other.id) == self.seen[number][1], self._story(number)
        finally:
            await self._service.delete(other.id)

    async def undo(self, number: int) -> None:
        await self._service.steps.undo(self._id, number)
        assert await self._tree(self._id) == self.seen[number][1], self._story(number)
        self.seen = {each: what for each, what in self.seen.items() if each <= number}
        latest = self._service.steps.list(self._id)[-1].number  # looking has left one, too
        self.seen[latest] = ("", self.seen[number][1])

    async def _tree(self, id: str) -> str:
        return await as_root(self._service, id, LISTING)

    def _one(self) -> str:
        self._count += 1
        p, q = self._path(), self._path()
        mode = self._random.choice(("00", "55", "50"))
        return self._random.choice(CHANGES).format(p=p, q=q, n=self._count, m=mode)

    def _path(self) -> str:
        return "/".join(self._random.choices(NAMES, k=self._random.randint(1, 3)))

    def _story(self, number: int) -> str:
        return "\n".join(f"-- {n}\n{what[0]}" for n, what in self.seen.items() if n <= number)


def merge_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_DEPTH", 3)
    monkeypatch.setattr(steps_module, "LEAST_OWN", 3)


@pytest.mark.parametrize("merged", [False, True], ids=["deep", "merged"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_every_step_shows_the_tree_that_was_there(
    folder: Path, seed: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        merge_early(monkeypatch)
    async with serving(folder, disk_backing="memory" if seed % 2 else "auto") as service:
        id = await beginning(service)
        trees = Trees(service, id, seed)
        pick = random.Random(seed)
        for length in (14, 6) if merged else (22, 8):  # the first: until a step has all files
            for _ in range(length):
                await trees.change()
            for number in trees.seen:
                await trees.check(number)
            await trees.undo(pick.choice([*trees.seen][-8:]))
        depths = {len(step.layers) for step in service.steps.list(id)}
        assert max(depths) > 3, "steps lie on each other"


async def test_merged_steps_outlive_the_server_and_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_early(monkeypatch)
    async with serving(folder, drain="keep") as service:
        id = await stepping(
            service, *(f"echo {n} > f{n}; rm -f f{n - 3}; {PAUSE}" for n in range(9))
        )
    for name in (".half", "made"):  # of a server that was killed while it merged, or just then
        (folder / "d" / "layers" / name / "workspace").mkdir(parents=True)
    async with serving(folder) as service:
        assert set(layers(folder)) == layers_of(service, id)
        for n in range(9, 14):
            await sh(service, id, f"echo {n} > f{n}; {PAUSE}")
        for number in (14, 10, 7, 4):
            await service.steps.undo(id, number)
            assert f"f{number - 1}" in (await sh(service, id, "ls")).split()
        await service.delete(id)
        await eventually(lambda: layers(folder) == [], what="its layers to go")
