"""Which of the many routes a request is for, without a look at each of them.

Routes are kept by method and the first part of their path, which none has as a parameter. It stands
before all of them, as a route like any other. What it does not find is for those behind it to
answer: an unknown path, a method that a path does not have, a WebSocket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

FOUND = "capsule.route"  # in a scope


class Index(BaseRoute):
    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: defaultdict[tuple[str, str], list[Route]] = defaultdict(list)
        for route in routes:
            if isinstance(route, Route):
                for method in route.methods or ():
                    self._routes[method, _first(route.path)].append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        asked = scope.get("method", ""), _first(scope["path"])
        for route in self._routes.get(asked, ()):
            match, found = route.matches(scope)
            if match is Match.FULL:
                return match, {**found, FOUND: route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope[FOUND].handle(scope, receive, send)


def _first(path: str) -> str:
    return path.split("/", 2)[1] if "/" in path else path
