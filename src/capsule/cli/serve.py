"""`capsule serve`: read the settings, then hand over to the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsule.config import load_config


def serve_command(file: Path | None, overrides: Mapping[str, Any], *, as_json: bool) -> int:
    given = {name: value for name, value in overrides.items() if value is not None}
    if as_json:
        given["log_format"] = "json"
    config = load_config(file=file, **given)
    from capsule.app import serve

    serve(config)
    return 0
