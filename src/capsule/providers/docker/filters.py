"""Seccomp for containers: compiled for programs, which have it from the agent, and as a profile for
the Engine, which gives it to all of the container."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from capsule.host_errors import host_errors
from capsule.providers.docker import hardening
from capsule.providers.docker.probe import Facts
from capsule.providers.docker.settings import DockerSettings
from capsule.providers.local import seccomp

Profile = dict[str, Any]


class Filters:
    """`arch`: of the Engine's machine; None: of this one."""

    def __init__(self, settings: DockerSettings, arch: str | None) -> None:
        self._settings = settings
        self._arch = arch
        self._known: dict[str, tuple[bytes, Profile]] = {}
        self._files: dict[str, str] = {}

    async def get(self, name: str) -> tuple[bytes, Profile]:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = await asyncio.to_thread(self._compile, name)
        return found

    async def for_engine(self, facts: Facts, name: str, profile: Profile) -> Profile | str | None:
        """Podman takes the name of a file, its own. Where it does not see ours, its own profile
        holds for the container; programs have ours from the agent in any case."""
        if facts.kind != "Podman":
            return profile
        if not facts.shares_root:
            return None
        if name not in self._files:
            self._files[name] = await asyncio.to_thread(self._write, name, profile)
        return self._files[name]

    def _write(self, name: str, profile: Profile) -> str:
        path = self._settings.run_dir / "seccomp" / f"{name}.json"
        with host_errors("the seccomp profile cannot be written for the Engine"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Two creates may come here at once, and the Engine must not read half of it.
            draft = path.with_name(f".{name}.{secrets.token_hex(8)}")
            draft.write_text(json.dumps(hardening.for_agent(profile)))
            draft.rename(path)
        return str(path.absolute())

    def _compile(self, name: str) -> tuple[bytes, Profile]:
        profile = seccomp.load_profile(name, self._settings.profiles_dir)
        return seccomp.compile_profile(profile, self._arch), profile
