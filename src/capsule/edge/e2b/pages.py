"""Long lists, page by page. A page's token says where it ended, so that what comes or goes between
two pages neither repeats nor hides anything."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from capsule.edge.errors import invalid_field

PAGE = 100
MOST = 1000

T = TypeVar("T")
Place = tuple[float, str]  # when it began, and its name


class Page(NamedTuple, Generic[T]):
    items: list[T]
    next_token: str | None


def page(
    items: Iterable[T],
    place: Callable[[T], Place],
    *,
    limit: int = PAGE,
    token: str = "",
    newest_first: bool = True,
) -> Page[T]:
    """Raises InvalidError (the token)."""
    found = sorted(items, key=place, reverse=newest_first)
    if token:
        last = _read(token)
        found = [x for x in found if (place(x) < last if newest_first else place(x) > last)]
    more = len(found) > limit
    return Page(found[:limit], _token(place(found[limit - 1])) if more else None)


def _token(last: Place) -> str:
    return base64.urlsafe_b64encode(f"{last[0]!r}/{last[1]}".encode()).decode()


def _read(token: str) -> Place:
    try:
        at, _, name = base64.urlsafe_b64decode(token.encode()).decode().partition("/")
        return float(at), name
    except (ValueError, binascii.Error):
        raise invalid_field("nextToken", "not one of this server's") from None
