"""What gives way when there is too much: the oldest, of the tenant that has most. So nobody's files
push out those of others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple


class Item(NamedTuple):
    tenant: str
    id: str
    content: str  # what has the same is there once
    size: int


def giving_way(kept: Iterable[Item], most: int) -> list[str]:
    """The ids of those, given the oldest first, without which the others have at most `most`
    bytes."""
    every = list(kept)
    waiting: dict[str, deque[Item]] = {}
    having, own, used = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
    for each in every:
        waiting.setdefault(each.tenant, deque()).append(each)
        having[each.content] += 1
        own[each.tenant, each.content] += 1
        if own[each.tenant, each.content] == 1:
            used[each.tenant] += each.size
    total = sum({each.content: each.size for each in every}.values())
    found: list[str] = []
    while total > most:
        tenant = max(used, key=lambda name: used[name])
        gone = waiting[tenant].popleft()
        found.append(gone.id)
        having[gone.content] -= 1
        own[tenant, gone.content] -= 1
        total -= gone.size if not having[gone.content] else 0
        used[tenant] -= gone.size if not own[tenant, gone.content] else 0
    return found
