"""Settings of what outlives sandboxes: sessions, their log, their artifacts. Part of `Config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capsule.model import GIB, MIB
from capsule.settings import about

_DAY = 86400.0
_YEARS = 3650 * _DAY


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class StorageSettings:
    audit: str = field(
        default="auto",
        metadata=about(
            "choice",
            "whether to write down who did what; auto: once somebody has used a key",
            choices=("auto", "yes", "no"),
        ),
    )
    audit_ttl: float = field(
        default=90 * _DAY,
        metadata=about("seconds", "how long that is kept", low=60.0, high=_YEARS),
    )
    storage_dir: Path | None = field(
        default=None,
        metadata=about(
            "path",
            "where sessions, their log and their artifacts are kept; unset: `storage` below "
            "data_dir",
            optional=True,
        ),
    )
    storage_age: float = field(
        default=30 * _DAY,
        metadata=about(
            "seconds",
            "how long artifacts, logged output and the files of closed sessions are kept; 0: "
            "for ever",
            low=0.0,
            high=_YEARS,
        ),
    )
    storage_bytes: int = field(
        default=20 * GIB,
        metadata=about(
            "bytes",
            "most that all artifacts may have together, and the files of all closed sessions, and "
            "the text in the log; the oldest of the tenant that has most go first, and one session "
            "has at most a quarter",
            low=MIB,
        ),
    )
    max_artifact: int = field(
        default=100 * MIB,
        metadata=about("bytes", "largest file that is kept as an artifact", low=1),
    )
    log_output: int = field(
        default=64 * 1024,
        metadata=about(
            "bytes",
            "bytes of code and of each output stream that a session's log keeps per execution",
            low=0,
            high=GIB,
        ),
    )
    session_idle_timeout: float = field(
        default=1800.0,
        metadata=about(
            "seconds",
            "a session unused for this long is closed: its sandbox ends, its files are kept",
            low=1.0,
            high=_YEARS,
        ),
    )
    registry_dir: Path | None = field(
        default=None,
        metadata=about(
            "path",
            "folder with environments/, agents/, tools/ and prompts/ of your own",
            optional=True,
        ),
    )
