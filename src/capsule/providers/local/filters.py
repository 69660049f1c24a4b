"""Seccomp programs for boxes: compiled once for each profile and level."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from capsule.model import Isolation
from capsule.providers.local import seccomp


class Filter(NamedTuple):
    program: bytes
    fork_answer: int  # see `seccomp.fork_answer`


class Filters:
    def __init__(self, profiles_dir: Path | None) -> None:
        self._profiles_dir = profiles_dir
        self._made: dict[tuple[str, Isolation], Filter] = {}

    async def get(self, name: str, level: Isolation, *, own_uid: bool) -> Filter:
        """Raises InvalidError, NotFoundError."""
        found = self._made.get((name, level))
        if found is None:
            found = await asyncio.to_thread(self._make, filter_names(name, level, own_uid=own_uid))
            self._made[name, level] = found
        return found

    def _make(self, names: list[str]) -> Filter:
        first, *others = (seccomp.load_profile(name, self._profiles_dir) for name in names)
        program = seccomp.compile_profile(first, also=others)
        return Filter(program, seccomp.fork_answer(program))


def filter_names(profile: str, level: Isolation, *, own_uid: bool) -> list[str]:
    """The seccomp profiles that a program must pass, all of them."""
    if level is Isolation.NAMESPACES:
        return [profile]
    names = (
        ["landlock"] if profile == "default" else [profile, "landlock"]
    )  # it is the stricter one
    return names if own_uid else [*names, "shared-uid"]
