"""A service in this very process, for one `capsule run`: no server needed, nothing left behind.

Records and sockets live in a directory of its own below the run directory, locked while it is used.
What is costly to make and the same for everybody (disk images, imported images) is shared. Should
this process be killed outright, a later `capsule run` finds the directory unlocked and clears it
away.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from capsule.config import Config
from capsule.errors import CapsuleError, ConflictError
from capsule.model import Template
from capsule.providers.registry import make_provider
from capsule.service import Service
from capsule.service.lock import DirectoryLock, make_private

_SETTLED = 60.0  # seconds; a younger directory may not be locked yet


@contextlib.asynccontextmanager
async def ephemeral_service(
    config: Config, catalog: Mapping[str, Template]
) -> AsyncIterator[Service]:
    runs = config.run_dir / "runs"
    make_private(config.run_dir)
    make_private(runs)
    await _clear_stale(config, runs)
    home = runs / secrets.token_hex(4)
    make_private(home)
    try:
        own = dataclasses.replace(
            config, run_dir=home, drain="delete", drain_timeout=0.0, pool_min=0, pool_max=0
        )
        provider = make_provider(config.provider, own, catalog)
        # The provider keeps the shared data directory; only the service's records move.
        records = dataclasses.replace(own, data_dir=home / "data")
        async with Service(records, {config.provider: provider}, catalog) as service:
            yield service
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _clear_stale(config: Config, runs: Path) -> None:
    for home in _settled(runs):
        with contextlib.suppress(CapsuleError, OSError):
            await _clear(config, home)


def _settled(runs: Path) -> list[Path]:
    horizon = time.time() - _SETTLED
    with os.scandir(runs) as entries:
        return [Path(entry.path) for entry in entries if entry.stat().st_mtime < horizon]


async def _clear(config: Config, home: Path) -> None:
    try:
        lock = DirectoryLock.acquire(home)
    except ConflictError:
        return  # in use
    try:
        own = dataclasses.replace(config, run_dir=home)
        provider = make_provider(config.provider, own)
        await provider.open()
        try:
            async for handle in provider.owned():
                await provider.discard(handle)
        finally:
            await provider.aclose()
        await asyncio.to_thread(shutil.rmtree, home)
    finally:
        lock.close()
