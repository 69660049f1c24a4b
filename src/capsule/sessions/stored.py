"""How many bytes sessions keep for each tenant: artifacts, and files of sessions that are archives.
Their snapshots are the service's to count. Known without asking a file: a quota is looked at
between two awaits, so that a burst cannot slip through.
"""

from __future__ import annotations

from collections import Counter

from capsule.service import Service
from capsule.sessions.ledger import Ledger
from capsule.sessions.workspace import Workspaces


class Stored:
    def __init__(self, ledger: Ledger, kept: Workspaces, service: Service) -> None:
        self._ledger = ledger
        self._kept = kept
        self._service = service
        self._coming: Counter[str] = Counter()  # artifacts that are being written

    def open(self) -> None:
        self._service.quotas.beside.append(self)

    def of(self, tenant: str) -> int:
        archives = sum(size for whose, size in self._kept.archives.values() if whose == tenant)
        return self._ledger.stored[tenant] + self._coming[tenant] + archives

    def owners(self) -> set[str]:
        return {*self._ledger.stored, *(whose for whose, _ in self._kept.archives.values())}

    def left(self, tenant: str) -> int | None:
        """What it may store besides; None: it has no quota."""
        return self._service.quotas.storage_left(tenant)

    def expect(self, tenant: str, size: int) -> None:
        self._coming[tenant] += size

    def settle(self, tenant: str, size: int) -> None:
        """So much of what was expected has come, or does not."""
        self._coming[tenant] -= size
        self._coming += Counter()  # forgets those that are at 0
