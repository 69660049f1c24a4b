"""What an Engine's labels say of a box."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from capsule.model import Isolation
from capsule.providers.docker.plan import LABEL_BOX


def record_of(container: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """What a handle carries, from a container's labels; the least of it when they were changed."""
    try:
        record = json.loads(labels.get(LABEL_BOX, ""))
    except ValueError:
        record = {}
    if not isinstance(record, dict) or "isolation" not in record:
        record = {"isolation": Isolation.CONTAINER.value, "transport": "socket"}
    return {**record, "container": container}
