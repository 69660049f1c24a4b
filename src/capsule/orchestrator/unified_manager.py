"""Sandboxes of every provider, by the names of their sessions."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog

from capsule.app import open_service
from capsule.config import Config, load_config
from capsule.edge.drain import Gate
from capsule.edge.session_shapes import BeginSession, ExecuteInSession, WriteSessionFiles
from capsule.edge.session_verbs import SessionVerbs
from capsule.orchestrator.background import Background
from capsule.service.caller import DEFAULT_TENANT, OPERATOR
from capsule.sessions.sessions import Sessions

Answer = dict[str, Any]


class UnifiedManager:
    """Every method answers as the routes under /api do, see docs/sessions.md; `url` has no server
    in it. Whatever Capsule raises is a CapsuleError."""

    def __init__(
        self,
        storage_path: str | Path = "./storage",
        runtime_path: str | Path = "./sandbox_runtime",
        e2b_api_key: str | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of the server. `e2b_api_key` is for E2B's cloud, whose keys begin
        with `e2b_`; without one `provider="e2b"` is served by this machine.

        Raises ConflictError: another process uses one of the folders.
        """
        storage = Path(storage_path).absolute()
        if e2b_api_key is not None and e2b_api_key.startswith("e2b_"):
            settings = {"e2b_api_key": e2b_api_key, **settings}
        config = load_config(
            storage_dir=storage,
            data_dir=storage / "server",
            run_dir=Path(runtime_path).absolute(),
            **settings,
        )
        _log_quietly()
        self._background = Background(lambda: _opened(config))
        self._verbs = self._background.value

    def start_sandbox(
        self,
        session_id: str | None,
        environment: str | None = None,
        *,
        provider: str | None = None,
        agent: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Answer:
        """`{session_id, sandbox_id, provider, url}`."""
        wanted = {
            "session_id": session_id,
            "environment": environment,
            "provider": provider,
            "agent": agent,
            "metadata": dict(metadata or {}),
        }
        shape = msgspec.convert(wanted, BeginSession)
        return self._call(self._verbs.create(DEFAULT_TENANT, shape, ""))

    def execute_code(
        self,
        session_id: str,
        code: str,
        *,
        language: str | None = None,
        timeout_ms: int | None = None,
    ) -> Answer:
        """`{stdout, stderr, results, artifacts, …}`."""
        shape = ExecuteInSession(
            session_id=session_id, code=code, language=language, timeout_ms=timeout_ms
        )
        return self._call(self._verbs.execute(OPERATOR, shape, ""))

    def list_files(self, session_id: str, path: str = "/workspace") -> Answer:
        return self._call(self._verbs.files(DEFAULT_TENANT, session_id, path, False))

    def write_file(self, session_id: str, path: str, content: str) -> Answer:
        shape = WriteSessionFiles(session_id=session_id, path=path, content=content)
        return self._call(self._verbs.write(DEFAULT_TENANT, shape))

    def read_artifact(self, session_id: str, artifact_id: str) -> bytes:
        found = self._verbs.artifact(DEFAULT_TENANT, session_id, artifact_id)
        _, file = self._background.call(found)
        with file:
            return file.read()

    def get(self, session_id: str) -> Answer:
        return self._call(self._verbs.get(DEFAULT_TENANT, session_id, ""))

    def close_sandbox(self, session_id: str) -> Answer:
        """Without a sandbox, with its files kept."""
        return self._call(self._verbs.close(DEFAULT_TENANT, session_id, ""))

    def reopen_sandbox(self, session_id: str) -> Answer:
        return self._call(self._verbs.reopen(DEFAULT_TENANT, session_id, ""))

    def stop_sandbox(self, session_id: str, sandbox_id: str | None = None) -> Answer:
        """End it. Its log and its artifacts stay."""
        return self._call(
            self._verbs.delete(DEFAULT_TENANT, session_id, sandbox_id=sandbox_id, purge=False)
        )

    def close(self) -> None:
        """Let go; sessions that are open go on, and the next manager takes them up. Idempotent."""
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Any) -> Answer:
        answer: Answer = msgspec.to_builtins(self._background.call(work))
        return answer


def _log_quietly() -> None:
    """Warnings, on stderr; unless this program has logging set up as it wants it."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


@contextlib.asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[SessionVerbs]:
    async with open_service(config) as service, Sessions(config, service) as sessions:
        yield SessionVerbs(sessions, Gate())
