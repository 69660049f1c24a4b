"""Where settings come from: a YAML file, and the environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from capsule.errors import InvalidError

PREFIX = "CAPSULE_"

# Variables with our prefix that are no settings of the server. Kubernetes invents the last two for
# a Service that is called `capsule`, and CAPSULE_PORT=tcp://….
_FOREIGN = ("CAPSULE_CONFIG", "CAPSULE_AGENT", "CAPSULE_URL", "CAPSULE_API_KEY")
_FOREIGN_PREFIXES = ("CAPSULE_TEST_", "CAPSULE_BENCH_", "CAPSULE_SERVICE_", "CAPSULE_PORT_")


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise InvalidError(f"the configuration {path} is not YAML: {detail}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidError(f"the configuration {path} is not a mapping of settings")
    return {str(key): value for key, value in content.items()}


def read_env(env: Mapping[str, str], limits: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    of_limits = {f"MAX_LIMITS_{name.upper()}": name for name in limits}
    for key, text in env.items():
        if not key.startswith(PREFIX) or key in _FOREIGN or key.startswith(_FOREIGN_PREFIXES):
            continue
        if key == "CAPSULE_PORT" and "://" in text:
            continue
        name = key.removeprefix(PREFIX)
        if name in of_limits:
            values.setdefault("max_limits", {})[of_limits[name]] = text
        else:
            values[name.lower()] = text
    return values
