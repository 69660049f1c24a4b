"""Who we are to an Engine, which may serve others, too; and what its labels say of a box."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsule.errors import UnavailableError
from capsule.model import Isolation, SandboxId
from capsule.providers.docker.plan import LABEL_BOX


def owner_of(data_dir: Path, run_dir: Path) -> str:
    """One server, told by both its directories. Blocks."""
    run = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()
    return f"{_data_dir_id(data_dir / 'docker-id')}-{run[:8]}"


def _data_dir_id(file: Path) -> str:
    """A name for this data directory that no other has, made once."""
    with contextlib.suppress(FileNotFoundError):
        text = file.read_text().strip()
        if text:
            return text
    draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    draft.write_text(secrets.token_hex(4))
    with contextlib.suppress(FileExistsError):
        os.link(draft, file)
    draft.unlink()
    return file.read_text().strip()


def record_of(container: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """What a handle carries, from a container's labels; the least of it when they were changed."""
    try:
        record = json.loads(labels.get(LABEL_BOX, ""))
    except ValueError:
        record = {}
    if not isinstance(record, dict) or "isolation" not in record:
        record = {"isolation": Isolation.CONTAINER.value, "transport": "socket"}
    return {**record, "container": container}


def safe(sandbox_id: str) -> SandboxId:
    """The service made the id; a path or a URL made from it must stay below us anyway."""
    if not sandbox_id or not all(c.isalnum() or c in "-_" for c in sandbox_id):
        raise UnavailableError(f"not the id of a box: {sandbox_id!r}")
    return SandboxId(sandbox_id)
