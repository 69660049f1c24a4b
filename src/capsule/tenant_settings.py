"""Settings of who may ask, how often, and how much each may use. Part of `Config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capsule.cloud_settings import CloudSettings
from capsule.config_checks import JWT_SECRET_MIN
from capsule.settings import about

_OVERRIDE = "; 0: no limit. `capsule tenant set` gives a tenant another one"
_RATE = ", such as 600/minute (second, minute, hour or day); unset: no limit"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TenantSettings(CloudSettings):
    jwt_secret: str | None = field(
        default=None,
        metadata=about(
            "text",
            f"secret of {JWT_SECRET_MIN} characters or more that JSON Web Tokens are signed with "
            "(HS256); see docs/authentication.md",
            optional=True,
            secret=True,
        ),
    )
    jwt_public_key: Path | None = field(
        default=None,
        metadata=about(
            "path",
            "PEM file with the public key of who signs tokens: RSA (RS256) or P-256 (ES256)",
            optional=True,
        ),
    )
    jwt_jwks_url: str | None = field(
        default=None,
        metadata=about(
            "text", "where the issuer of tokens publishes its keys, as JWKS", optional=True
        ),
    )
    jwt_issuer: str | None = field(
        default=None,
        metadata=about("text", "what a token's `iss` must be; unset: anything", optional=True),
    )
    jwt_audience: str | None = field(
        default=None,
        metadata=about(
            "text", "what a token's `aud` must name; unset: it must have none", optional=True
        ),
    )
    jwt_tenant_claim: str = field(
        default="tenant", metadata=about("text", "claim of a token that names the tenant")
    )
    jwt_scopes_claim: str = field(
        default="scope",
        metadata=about("text", "claim of a token with its scopes: a text with spaces, or a list"),
    )
    jwt_leeway: float = field(
        default=30.0,
        metadata=about("seconds", "how far the issuer's clock may be off", low=0.0, high=3600.0),
    )
    tenant_sandboxes: int = field(
        default=0,
        metadata=about("integer", f"sandboxes of one tenant at the same time{_OVERRIDE}", low=0),
    )
    tenant_execs: int = field(
        default=0,
        metadata=about("integer", f"execs of one tenant at the same time{_OVERRIDE}", low=0),
    )
    tenant_memory: int = field(
        default=0,
        metadata=about(
            "bytes",
            f"memory that the live sandboxes of one tenant may have together{_OVERRIDE}",
            low=0,
        ),
    )
    tenant_cpu_seconds: float = field(
        default=0.0,
        metadata=about(
            "number",
            f"seconds of CPU that one tenant may use in each tenant_cpu_period{_OVERRIDE}",
            low=0.0,
        ),
    )
    tenant_cpu_period: str = field(
        default="month",
        metadata=about(
            "choice",
            "what tenant_cpu_seconds are for: a day or a month, in UTC",
            choices=("day", "month"),
        ),
    )
    tenant_storage: int = field(
        default=0,
        metadata=about(
            "bytes",
            "snapshots, volumes, artifacts and kept files of sessions of one tenant, all"
            f" together{_OVERRIDE}",
            low=0,
        ),
    )
    rate_limit_key: str | None = field(
        default=None, metadata=about("text", f"requests with one key{_RATE}", optional=True)
    )
    rate_limit_address: str | None = field(
        default=None,
        metadata=about(
            "text",
            f"requests from one address, of IPv6 from one /64, keys or not{_RATE}",
            optional=True,
        ),
    )
    trusted_proxies: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "list",
            "addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are "
            "believed, such as 127.0.0.1 or 10.0.0.0/8",
        ),
    )
