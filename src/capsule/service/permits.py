"""How many execs the service looks after at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from capsule.config import Config
from capsule.errors import CapacityError
from capsule.service.entry import Entry


class Permits:
    def __init__(self, config: Config) -> None:
        self.taken = 0
        self.begun = 0
        self.by_tenant: Counter[str] = Counter()  # taken
        self.check: Callable[[Entry], None] = _nothing  # told when tenants have quotas
        self._free = asyncio.Event()
        self._free.set()
        self._most = config.max_execs
        self._most_each = config.max_execs_per_sandbox

    async def all_free(self, by: float) -> bool:
        """Wait for the last exec to end, until `by` on the loop's clock."""
        try:
            async with asyncio.timeout_at(by):
                await self._free.wait()
        except TimeoutError:
            return False
        return True

    def give_back(self, tenant: str) -> None:
        self.by_tenant[tenant] -= 1
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]
        self.taken -= 1
        if not self.taken:
            self._free.set()

    def take(self, entry: Entry) -> Permit:
        """Raises CapacityError."""
        if entry.execs >= self._most_each:
            raise CapacityError(
                f"sandbox {entry.id} runs {entry.execs} execs, limit {self._most_each}",
                hint="wait for one to end, or kill one",
                limit=self._most_each,
            )
        if self.taken >= self._most:
            raise CapacityError(
                f"the server runs {self.taken} execs, limit {self._most}",
                hint="try again when some have ended",
                limit=self._most,
            )
        self.check(entry)
        self.taken += 1
        self.by_tenant[entry.tenant] += 1
        self.begun += 1
        self._free.clear()
        entry.execs += 1
        entry.using += 1
        return Permit(self, entry)


class Permit:
    """One exec's place among those that run. Releasing it again does nothing."""

    __slots__ = ("_entry", "_permits")

    def __init__(self, permits: Permits, entry: Entry) -> None:
        self._permits: Permits | None = permits
        self._entry = entry

    def release(self) -> None:
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.give_back(self._entry.tenant)
            self._entry.execs -= 1
            self._entry.using -= 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()


def _nothing(entry: Entry) -> None:
    pass
