"""Containers that never run: by way of one, files come into a volume of the Engine's."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.docker.engine import Engine

BUDGET = 40.0


class Helpers:
    """`ids`: of those that are in use. One that is left behind counts as a box, and goes as one."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: Callable[[str], str],
        labels: Callable[[str], Mapping[str, str]],
    ) -> None:
        self.ids: set[str] = set()
        self._engine = engine
        self._name = name
        self._labels = labels

    @asynccontextmanager
    async def container(
        self, image: str, mounts: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[str]:
        """Its name. `image` is any that the Engine has."""
        id = f"helper-{secrets.token_hex(4)}"
        name = self._name(id)
        body = {
            "Image": image,
            "Entrypoint": ["/nothing"],
            "NetworkDisabled": True,
            "Labels": self._labels(id),
            "HostConfig": {"NetworkMode": "none", "Mounts": list(mounts)},
        }
        self.ids.add(id)
        try:
            await to_the_end(self._engine.create(name, body))
            yield name
        finally:
            await finish(self._engine.remove(name), f"container {name}", budget=BUDGET)
            self.ids.discard(id)
