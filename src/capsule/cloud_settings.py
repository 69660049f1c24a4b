"""Settings of the clouds that sandboxes may be in. Part of `Config`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from capsule.settings import about
from capsule.storage_settings import StorageSettings


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CloudSettings(StorageSettings):
    e2b_api_key: str | None = field(
        default=None,
        metadata=about(
            "text",
            "key for sandboxes of E2B's cloud; unset: E2B_API_KEY, or the key that comes with a "
            "create",
            optional=True,
            secret=True,
        ),
    )
    e2b_api_url: str | None = field(
        default=None,
        metadata=about(
            "text",
            "where E2B's API is, if it is not E2B's own; unset: E2B_API_URL",
            optional=True,
        ),
    )
    e2b_sandbox_url: str | None = field(
        default=None,
        metadata=about(
            "text",
            "where its sandboxes are reached, if not by their own names; unset: E2B_SANDBOX_URL",
            optional=True,
        ),
    )
    e2b_domain: str | None = field(
        default=None,
        metadata=about("text", "domain of E2B's API; unset: E2B_DOMAIN, or e2b.app", optional=True),
    )
    e2b_template: str = field(
        default="base",
        metadata=about(
            "text",
            "E2B's template that sandboxes start from; {template} in it is the name of Capsule's",
        ),
    )
    e2b_timeout: float = field(
        default=900.0,
        metadata=about(
            "seconds",
            "how long the cloud keeps a sandbox after this server has gone; while it is there, "
            "that is extended",
            low=30.0,
            high=3600.0,
        ),
    )


def e2b_key(settings: CloudSettings) -> str | None:
    """The server's own key for E2B's cloud."""
    return settings.e2b_api_key or os.environ.get("E2B_API_KEY")
