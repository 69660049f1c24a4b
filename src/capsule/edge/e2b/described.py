"""How a route of E2B's control plane is documented."""

from __future__ import annotations

from typing import Any

from capsule.edge.e2b.control_views import E2bError
from capsule.edge.routing import Described, describe


class Describe:
    """The keyword arguments of a route's decorator."""

    def __init__(self, types: Described) -> None:
        self._types = types

    def __call__(
        self,
        body: Any = None,
        returns: Any = None,
        status: int = 200,
        *,
        many: bool = False,
        also: int | None = None,
    ) -> dict[str, Any]:
        """`many`: the answer is a list of them; `also`: another status of the same."""
        found = describe(self._types, body=body, returns=returns, status=status, error=E2bError)
        if many:
            content = found["responses"][status]["content"]["application/json"]
            content["schema"] = {"type": "array", "items": content["schema"]}
        if also is not None:
            found["responses"][also] = found["responses"][status]
        return found
