"""Who this server is to something that may serve others, too."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from capsule.errors import UnavailableError
from capsule.model import SandboxId


def owner_of(data_dir: Path, run_dir: Path, file: str) -> str:
    """One server, told by both its directories; `file`: where the first keeps its name. Blocks."""
    run = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()
    return f"{_data_dir_id(data_dir / file)}-{run[:8]}"


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


def safe(sandbox_id: str) -> SandboxId:
    """The service made the id; a path or a URL made from it must stay below us anyway."""
    if not sandbox_id or not all(c.isalnum() or c in "-_" for c in sandbox_id):
        raise UnavailableError(f"not the id of a box: {sandbox_id!r}")
    return SandboxId(sandbox_id)
