"""What the local provider has of its host while it is open."""

from __future__ import annotations

from capsule.model import Isolation
from capsule.providers.local import enforcement, plan
from capsule.providers.local.adjust import Adjuster
from capsule.providers.local.cores import Cores
from capsule.providers.local.disk import Disks
from capsule.providers.local.layers import Layers
from capsule.providers.local.probe import Facts
from capsule.providers.local.roots import Roots
from capsule.providers.local.settings import LocalSettings
from capsule.providers.local.volumes import Volumes
from capsule.providers.local.watchers import Watchers


class Host:
    def __init__(
        self, settings: LocalSettings, facts: Facts, level: Isolation, backing: str
    ) -> None:
        self.level = level
        self._backing = backing
        self.cores = Cores(facts.cpus)
        self.watchers = Watchers(settings.run_dir / "boxes", shared=not facts.uid_ranges)
        self.disks = Disks(settings.data_dir, backing, facts.mkfs)
        self.roots = Roots(
            settings.data_dir, level, overlay=facts.can("overlay"), agent=settings.agent
        )
        self.learn(facts)
        # Of the uids that programs have inside; where a box has one uid, that is ours.
        owner = plan.UID if facts.uid_ranges else None
        self.layers = Layers(settings.data_dir / "layers", owner=owner)
        self.volumes = Volumes(settings.data_dir / "volumes", owner=owner, mkfs=facts.mkfs)

    def learn(self, facts: Facts) -> None:
        """Also later: with a new launcher the cgroups may be others."""
        self.facts = facts
        self.unenforced = tuple(enforcement.unenforced(facts, self.level, self._backing))
        self.features = enforcement.features(facts, self.level, self._backing)

    def adjuster(self, parts: plan.Parts) -> Adjuster | None:
        if not parts.adjustable or parts.view is None:
            return None
        entries = self.facts.cgroups.entries
        return Adjuster(
            launched=parts.limits,
            cores=len(self.cores),
            view=parts.view,
            cgroups=lambda limits: entries(parts.unique, limits, memory=limits.memory),
        )
