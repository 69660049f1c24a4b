"""What the server says of itself and its host."""

from __future__ import annotations

from capsule.edge.views import View
from capsule.model import Unenforced
from capsule.providers.contract import Capabilities, Finding


class ProviderView(View, frozen=True, kw_only=True):
    provider: str
    usable: bool
    isolation: str
    features: list[str]
    unenforced: tuple[Unenforced, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, found: Capabilities) -> ProviderView:
        return cls(
            provider=found.provider,
            usable=found.usable,
            isolation=found.isolation,
            features=sorted(found.features),
            unenforced=found.unenforced,
            findings=found.findings,
        )


class CapabilitiesView(View, frozen=True, kw_only=True):
    version: str
    providers: dict[str, ProviderView]


class HealthView(View, frozen=True, kw_only=True):
    status: str
