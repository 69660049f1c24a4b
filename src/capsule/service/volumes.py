"""Volumes: named folders that outlive sandboxes, and that several of them may have at once.

What is in a volume is its owner's: it goes when somebody deletes it, and for no other reason. One
without a record is taken up again at the start, by the file that was kept beside it (`keepsakes`).
One that a sandbox has, running or paused, is not deleted.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import structlog

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
)
from capsule.model import MIB, MOUNTS, WORKSPACE, VolumeMount
from capsule.providers.cleanup import finish
from capsule.providers.contract import Volumed, VolumeLook
from capsule.service import validate
from capsule.service.admission import Admission, new_id
from capsule.service.caller import DEFAULT_TENANT, named
from capsule.service.keepsakes import Keepsakes
from capsule.service.sandboxes import DESTROY_BUDGET, Parts, Sandboxes
from capsule.service.values import Volume, VolumeWish
from capsule.settings import brief

log = structlog.get_logger(__name__)

KIND = "volume"
MAX_MOUNTS = 16
MOST_FOLDERS = 15  # from the root down to a mount point
LEAST_SIZE = 16 * MIB  # below that a file system's own needs are most of it
MOST_SIZE = 2**44


class Volumes:
    def __init__(self, parts: Parts, sandboxes: Sandboxes, admission: Admission) -> None:
        self._admission = admission
        self._parts = parts
        self._sandboxes = sandboxes
        self._known: dict[str, Volume] = {}  # by whose they are, and their names
        self._keepsakes = Keepsakes(parts.config.data_dir / "kept" / KIND, Volume)
        self.check: Callable[[str, int | None], None] = _pass  # told when tenants have quotas
        self.let_go: Callable[[Volume], Awaitable[None]] = _keep  # ends what only looks into it
        self._coming: dict[str, Volume] = {}  # checked, and not known yet
        self._busy: set[str] = set()  # being made or removed

    async def open(self) -> None:
        found = await self._keepsakes.open()
        over = {volume.id: volume for volume in found.unfinished}
        recorded = {_key(v): v for v in await self._parts.store.load_kept(KIND, Volume)}
        for key in [key for key, volume in recorded.items() if volume.id in over]:
            await self._parts.store.remove_kept(KIND, key)
            del recorded[key]
        kept = {_key(volume): volume for volume in found.kept}
        self._known = {**recorded, **kept}
        for key, volume in kept.items():
            if recorded.get(key) != volume:
                log.warning("volume without its record taken up again", volume=key)
                await self._note(volume)
        for key in recorded.keys() - kept.keys():
            await self._keepsakes.keep(key, recorded[key].id, recorded[key])
        for name, provider in self._parts.providers.items():
            if isinstance(provider, Volumed):
                try:
                    await self._tidy(name, provider, over)
                except CapsuleError as error:
                    log.warning("volumes not looked at", provider=name, reason=error.message)

    async def _tidy(self, name: str, provider: Volumed, over: Mapping[str, Volume]) -> None:
        """Remove what was half made or half removed. What nobody knows is kept: it is somebody's,
        and may not be shown to others."""
        ids = {volume.id for volume in self._known.values()}
        for id in sorted(set(await provider.volumes()) - ids - over.keys()):
            log.warning(
                "a volume has neither a record nor a file",
                volume_id=id,
                provider=name,
                hint="write its file into data_dir/kept/volume, or remove it from data_dir/volumes",
            )
        for volume in [each for each in over.values() if each.provider == name]:
            await provider.drop_volume(volume.id)
            await self._keepsakes.finish(volume.id)

    async def sweep(self) -> None:
        """Remove what was to be removed and could not: what holds it was down, for instance."""
        for volume in (await self._keepsakes.load()).unfinished:
            alive = volume.id in {each.id for each in self._known.values()}
            if alive or _key(volume) in self._busy:
                continue
            try:
                await self._volumed(volume.provider).drop_volume(volume.id)
                await self._keepsakes.finish(volume.id)
            except CapsuleError as error:
                log.warning("volume not removed yet", volume=_key(volume), reason=error.message)

    async def _note(self, volume: Volume) -> None:
        await self._parts.store.save_kept(KIND, _key(volume), volume.created, volume)

    def owners(self) -> set[str]:
        return {each.tenant for each in self._known.values()}

    def charged(self, tenant: str) -> Iterator[Volume]:
        """What counts for its quota: those that are being made, too."""
        every = (*self._known.values(), *self._coming.values())
        return (each for each in every if each.tenant == tenant)

    def list(self, tenant: str = DEFAULT_TENANT) -> list[Volume]:
        """Oldest first."""
        own = [each for each in self._known.values() if each.tenant == tenant]
        return sorted(own, key=lambda each: each.created)

    def find(self, name: str, tenant: str = DEFAULT_TENANT) -> Volume:
        """Raises NotFoundError."""
        key = named(tenant, validate.name("volume", name))
        found = self._known.get(key)
        if found is None or key in self._busy:
            raise NotFoundError(
                f"volume {brief(name)} does not exist",
                hint="create it first, or list the volumes",
                field="volumes",
            )
        return found

    def by_id(self, id: str) -> Volume:
        """Of any tenant. Raises NotFoundError."""
        for key, volume in self._known.items():
            if volume.id == id and key not in self._busy:
                return volume
        raise NotFoundError(f"volume {brief(id)} does not exist", hint="list the volumes")

    async def look(self, volume: Volume) -> VolumeLook:
        """How it is, where it has a size and that is known."""
        if volume.size is None:
            return VolumeLook()
        return await self._volumed(volume.provider).look_at_volume(volume.id)

    async def create(
        self,
        name: str,
        *,
        provider: str | None = None,
        size: int | None = None,
        metadata: Mapping[str, str] | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Volume:
        """`size`: the most bytes that it holds, where the host can see to that.

        Raises ConflictError (the name is taken), NotFoundError (the provider), NotSupportedError,
        NoSpaceError.
        """
        key = named(tenant, validate.name("name", name))
        if size is not None:
            validate.count("size", size, LEAST_SIZE, MOST_SIZE)
        validate.metadata(metadata or {})
        if key in self._known or key in self._busy:
            raise ConflictError(f"volume {name} exists already", hint="take another name")
        self.check(tenant, size)
        of = self._admission.provider(provider)
        maker = self._volumed(of)
        if size is not None:
            what = "hold volumes to a size"
            self._admission.require("volume_size", of, field="size", what=what)
        made = Volume(
            name=name,
            id=new_id(),
            provider=of,
            created=self._parts.clock.now(),
            metadata=dict(metadata or {}),
            size=size,
            tenant=tenant,
        )
        self._busy.add(key)
        self._coming[key] = made
        try:
            await self._keepsakes.begin(key, made.id, made)
            await maker.make_volume(made.id, size=size)
            await self._keepsakes.keep(key, made.id, made)
            await self._note(made)
            self._known[key] = made
        except BaseException:
            await finish(self._undo(maker, made), f"volume {key}", budget=DESTROY_BUDGET)
            raise
        finally:
            self._busy.discard(key)
            del self._coming[key]
        return made

    async def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """With all that is in it. Raises NotFoundError, ConflictError (sandboxes have it)."""
        volume = self.find(name, tenant)
        key = named(tenant, name)
        await self.let_go(volume)
        volume = self.find(name, tenant)  # meanwhile others may have come
        if users := self._users(volume):
            raise ConflictError(
                f"volume {name} is in use by {len(users)} sandboxes",
                hint="delete them first",
                sandbox_ids=users[:100],
            )
        self._busy.add(key)
        try:
            await self._keepsakes.begin(key, volume.id, volume)
            try:
                await self._parts.store.remove_kept(KIND, key)
            except BaseException:
                again = self._keepsakes.keep(key, volume.id, volume)
                await finish(again, f"volume {key}", budget=DESTROY_BUDGET)
                raise
            del self._known[key]
            await self._volumed(volume.provider).drop_volume(volume.id)
            await self._keepsakes.finish(volume.id)
        finally:
            self._busy.discard(key)

    async def _undo(self, maker: Volumed, made: Volume) -> None:
        # First: whatever fails here, and whenever the server is killed, `sweep` or the next start
        # goes on with it.
        await self._keepsakes.withdraw(_key(made), made.id)
        await self._parts.store.remove_kept(KIND, _key(made))
        await maker.drop_volume(made.id)
        await self._keepsakes.finish(made.id)

    def _users(self, volume: Volume) -> Sequence[str]:
        entries = self._sandboxes.entries.values()
        return [e.id for e in entries if any(v.id == volume.id for v in e.volumes)]

    def mounts(
        self,
        wishes: Sequence[VolumeWish],
        provider: str,
        tenant: str = DEFAULT_TENANT,
        home: str = WORKSPACE,
    ) -> tuple[VolumeMount, ...]:
        """What a create asks for, checked. Raises InvalidError, NotFoundError."""
        if len(wishes) > MAX_MOUNTS:
            raise InvalidError(f"volumes: {len(wishes)}, at most {MAX_MOUNTS}", field="volumes")
        found = [(self.find(wish.name, tenant), wish) for wish in wishes]
        for volume, wish in found:
            _check_path(wish.path, home)
            if volume.provider != provider:
                raise InvalidError(
                    f"volumes: {volume.name} is of provider {volume.provider}, not {provider}",
                    field="volumes",
                )
        paths = sorted(wish.path for wish in wishes)
        nested = any(b == a or b.startswith(f"{a}/") for a, b in pairwise(paths))
        if nested or len({volume.id for volume, _ in found}) < len(found):
            raise InvalidError(
                "volumes: each may be mounted once, and none inside another", field="volumes"
            )
        return tuple(VolumeMount(v.id, w.path, w.read_only, v.name) for v, w in found)

    def _volumed(self, name: str) -> Volumed:
        provider: object = self._parts.providers.get(name)
        if not isinstance(provider, Volumed):
            raise NotSupportedError(
                f"provider {name} has no volumes",
                hint="GET /v1/capabilities lists the features of each provider",
            )
        return provider


def _key(volume: Volume) -> str:
    return named(volume.tenant, volume.name)


def _check_path(path: str, home: str) -> None:
    validate.path(path)
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts[1:])
    above = tuple(f"{each}/" for each in dict.fromkeys((home, WORKSPACE, MOUNTS)))
    fits = len(parts) <= MOST_FOLDERS + 1 and all(len(os.fsencode(part)) < 256 for part in parts)
    if not path.startswith(above) or not plain or not fits:
        names = "" if fits else f", of up to {MOST_FOLDERS} names with up to 255 bytes each"
        raise InvalidError(
            f"volumes: {brief(path)} is no place for a volume",
            hint=f"name a folder below {', '.join(each[:-1] for each in above)}{names}",
            field="volumes",
        )


async def _keep(volume: Volume) -> None:
    pass


def _pass(tenant: str, size: int | None) -> None:
    pass
