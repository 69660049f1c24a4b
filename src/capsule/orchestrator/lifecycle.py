"""A session from its start to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from capsule.orchestrator.unified_manager import Answer, UnifiedManager


class Lifecycle:
    """Starts and stops sessions; `sandbox_mgr` does what is between. The arguments are those of
    UnifiedManager."""

    def __init__(
        self,
        storage_path: str | Path = "./storage",
        runtime_path: str | Path = "./sandbox_runtime",
        e2b_api_key: str | None = None,
        **settings: Any,
    ) -> None:
        self.sandbox_mgr = UnifiedManager(storage_path, runtime_path, e2b_api_key, **settings)

    def start(
        self,
        agent_config: Mapping[str, Any] | None = None,
        environment: str | None = None,
        provider: str | None = None,
        session_id: str | None = None,
    ) -> Answer:
        """`{session_id, sandbox_id, provider, url}`. `type` of `agent_config` names an agent of the
        registry; what else it says is kept with the session, as labels."""
        config = dict(agent_config or {})
        agent = config.pop("type", None)
        return self.sandbox_mgr.start_sandbox(
            session_id,
            environment,
            provider=provider,
            agent=agent,
            metadata={str(name): str(value) for name, value in config.items()},
        )

    def stop(self, session_id: str, sandbox_id: str | None = None) -> Answer:
        """End it. Its log and its artifacts stay."""
        return self.sandbox_mgr.stop_sandbox(session_id, sandbox_id)

    def close(self) -> None:
        self.sandbox_mgr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
