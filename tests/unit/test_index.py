"""The index of routes finds what a look at every route would find."""

from __future__ import annotations

from typing import Any, cast

import pytest
from starlette.routing import Match, Route
from starlette.types import Scope

from capsule.edge.index import FOUND, Index
from capsule.edge.nowhere import METHODS
from capsule.edge.site import build_web


class Anything:
    """Stands in for the service: no route is called here."""

    def __getattr__(self, name: str) -> Any:
        return self


ANYTHING = cast(Any, Anything())
WEB = build_web(ANYTHING, ANYTHING, "1", sessions=ANYTHING)
PATHS = sorted({route.path for route in WEB.routes if isinstance(route, Route)})


def asked(method: str, path: str) -> Scope:
    return {"type": "http", "method": method, "path": path, "headers": []}


def filled(path: str) -> str:
    """With something in the place of each parameter."""
    return path.replace("{path:path}", "a/b").replace("{", "x").replace("}", "y")


@pytest.mark.parametrize("method", METHODS)
def test_every_route_is_found(method: str) -> None:
    index, found = Index(WEB.routes), 0
    for path in map(filled, PATHS):
        scope = asked(method, path)
        match, child = index.matches(scope)
        wanted = (route for route in WEB.routes if route.matches(scope)[0] is Match.FULL)
        assert child.get(FOUND) is next(wanted, None), path
        found += match is Match.FULL
    assert found


@pytest.mark.parametrize("path", ["/nowhere", "*", "", "//", "/v1", "/v1/", "/sandboxes/a/b/c/d"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    assert Index(WEB.routes).matches(asked("GET", path)) == (Match.NONE, {})
