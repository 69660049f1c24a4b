"""Where the agent's binary is: named by the user, packed into the wheel, or built in the tree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from capsule.errors import NotFoundError

VARIABLE = "CAPSULE_AGENT"
PACKAGED = Path(__file__).parent / "_bin" / "capsule-agent"
BUILT = Path(__file__).parents[2] / "agent" / "build" / "capsule-agent"


def find(env: Mapping[str, str] = os.environ) -> Path:
    """The path of an executable agent. Raises NotFoundError, with what to do about it."""
    if named := env.get(VARIABLE):
        if os.access(named, os.X_OK):
            return Path(named).absolute()
        raise NotFoundError(
            f"the agent named by {VARIABLE} is not an executable file: {named}",
            hint=f"unset {VARIABLE}, or let it name a built capsule-agent",
        )
    for path in (PACKAGED, BUILT):
        if os.access(path, os.X_OK):
            return path
    raise NotFoundError(
        f"the agent's binary is missing: neither {PACKAGED} nor {BUILT} exists",
        hint="in a clone run `make agent`; otherwise install the package again",
    )
