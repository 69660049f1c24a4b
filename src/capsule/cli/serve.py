"""`capsule serve`: read the settings, then hand over to the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsule.config import Config, load_config


def serve_command(file: Path | None, overrides: Mapping[str, Any], *, as_json: bool) -> int:
    given = {name: value for name, value in overrides.items() if value is not None}
    if as_json:
        given["log_format"] = "json"
    config = load_config(file=file, **given)
    from capsule.app import serve

    serve(config, _as_json if as_json else None)
    return 0


def _as_json(config: Config, service: Any, port: int) -> str:
    """One line once it listens, for whoever started it to wait for."""
    from capsule.app import server_url, version

    found = service.capabilities()[config.provider]
    body = {
        "url": server_url(config, port),
        "version": version(),
        "isolation": found.isolation,
        "unenforced": [each.what for each in found.unenforced],
    }
    return json.dumps(body) + "\n"
