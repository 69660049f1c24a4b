"""Templates that come and go while the server runs: built, imported, exported, removed.

A build belongs to whoever iterates over it, and has no task of its own: closing the iteration
cancels it. What is written down is a file per template (catalog.py), after its image is there and
gone before its image goes; so other processes on the same data directory see the same templates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import structlog

from capsule.catalog import PROGRAMS, Catalog, Origin, image_template, shipped, shipped_context
from capsule.config import Config
from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
    UnavailableError,
)
from capsule.model import Template
from capsule.providers.images import Image, Images, Log, Look, Progress, Recipe, Tail
from capsule.providers.registry import BUILDER, IMAGES, make_images
from capsule.service.build_slots import BuildSlots
from capsule.service.template_users import UsedBy, recorded_users, shares
from capsule.settings import brief

__all__ = ["Built", "Said", "Tail", "Templates", "recorded_users", "shares", "spool"]

log = structlog.get_logger(__name__)

OWN_IMAGE = "capsule/{}:latest"


@dataclass(frozen=True, slots=True)
class Built:
    """The last event of a build that went well."""

    template: Template
    image: Image


Said = Progress | Built


class Templates:
    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        used_by: UsedBy,
        *,
        let_go: Callable[[Template], Awaitable[None]] | None = None,
    ) -> None:
        """`used_by` names the sandboxes that run from a template, `let_go` ends what else does."""
        self._config = config
        self._catalog = catalog
        self._used_by = used_by
        self._let_go = let_go
        self._opened: dict[str, Images] = {}
        self._slots = BuildSlots(config, self._tidy)

    def start(self) -> None:
        """From now on what builds leave is cleared up, also what is there already."""
        self._slots.start()

    async def _tidy(self) -> None:
        await (await self._of(BUILDER)).tidy()

    async def aclose(self) -> None:
        await self._slots.aclose()
        for images in self._opened.values():
            await images.aclose()
        self._opened.clear()

    async def fresh(self) -> Catalog:
        """The catalog as it is now, whoever changed it."""
        if self._catalog.stale():
            await asyncio.to_thread(self._catalog.refresh)
        return self._catalog

    async def get(self, name: str) -> Template:
        """Raises NotFoundError."""
        catalog = await self.fresh()
        found = catalog.get(name)
        if found is None:
            known = ", ".join(sorted(catalog))
            raise NotFoundError(
                f"template {brief(name)} does not exist", hint=f"take one of: {known}", field="name"
            )
        return found

    def origin(self, template: Template) -> Origin:
        return self._catalog.origin(template.name)

    async def images(self, template: Template) -> list[Image]:
        """Its images, as far as somebody can be asked for them."""
        found: list[Image] = []
        for provider in IMAGES:
            with suppress(NotSupportedError, UnavailableError):
                if (image := await (await self._of(provider)).find(template)) is not None:
                    found.append(image)
        return found

    async def build(
        self, name: str, recipe: Recipe, *, provider: str | None = None
    ) -> AsyncGenerator[Said, None]:
        """Build a template's image; without a context, by the Dockerfile that Capsule brings.

        `provider` is whose sandboxes are to start from it; the configured one if it is not given.
        Raises what `Images.build` raises; CapacityError, ConflictError (it is being built),
        NotFoundError (no such Dockerfile), InvalidError (the name).
        """
        draft = await self._draft(name, recipe.context is not None)
        if recipe.context is None:
            context = await asyncio.to_thread(shipped_context, name)
            recipe = dataclasses.replace(recipe, context=context, file="Dockerfile")
        images = await self._of(BUILDER)
        target = await self._target(draft, provider)
        with self._slots.take(name) as slot:
            with suppress(UnavailableError):
                await images.tidy()
            async with aclosing(images.build(draft, recipe)) as words:
                async for said in slot.heard(words):
                    yield said
            async with slot.in_time():
                built = await self._built(draft, images)
            if target is not None:
                yield Log(f"moving the image to provider {target.provider}\n")
                async with slot.in_time():
                    await self._move(built.template, images, target)
            yield built

    async def _target(self, draft: Template, provider: str | None) -> Images | None:
        """Who else is to have the image. None: those who build it, or nobody has a place for it."""
        if provider is not None:
            await self._of(provider)  # a name that nobody knows is told before anything is built
        wanted = provider or self._config.provider
        if wanted not in IMAGES or wanted == BUILDER or not draft.root.startswith("image:"):
            return None
        images = await self._of(wanted)
        if await images.find(draft) is not None:
            await self._check_unused(draft)  # there it would be replaced under their feet
        return images

    async def _built(self, draft: Template, images: Images) -> Built:
        image = await self._image(draft, images)
        programs = await images.programs(draft, PROGRAMS)
        template = await asyncio.to_thread(self._template, draft, image, programs, bare=True)
        await self._record(template)
        await self._release(template)
        return Built(template, image)

    async def load(
        self, name: str, archive: Path, *, provider: str | None = None, replace: bool = False
    ) -> Built:
        """Take an image archive as template `name`. Raises ConflictError (it exists), InvalidError,
        TooLargeError, NotSupportedError, NoSpaceError, UnavailableError."""
        images = await self._of(provider or self._config.provider)
        before = (await self.fresh()).get(name)
        if before is None:
            draft = _draft(name, images.provider)
        else:
            draft = await self._replaceable(before, images, replace=replace)
        made: list[Template] = []

        def take(image: Image, programs: frozenset[str]) -> None:
            made.append(self._template(draft, image, programs))

        image = await images.load(draft, archive, Look(PROGRAMS, take))
        try:
            await self._record(made[0])
        except BaseException:
            if before is None:
                await images.remove(draft)
            raise
        await self._release(made[0])
        return Built(made[0], image)

    async def save(self, name: str, target: BinaryIO, *, provider: str | None = None) -> Image:
        """Write a template's image to a new file that can seek. Raises NotFoundError."""
        template = await self.get(name)
        order = [provider] if provider else [self._config.provider, *IMAGES]
        for each in dict.fromkeys(order):
            try:
                images = await self._of(each)
                image = await images.find(template)
            except (NotFoundError, NotSupportedError, UnavailableError):
                if provider:
                    raise
                continue
            if image is not None:
                await images.save(template, target)
                return image
        raise NotFoundError(
            f"template {name} has no image" + (f" of provider {provider}" if provider else ""),
            hint=f"build it: capsule template build {name}",
        )

    async def delete(self, name: str) -> None:
        """Remove what was built or imported: the template, and its images. Of a template that is
        not made here, only the images go.

        Raises NotFoundError, ConflictError (sandboxes run from it), InvalidError (nothing to
        remove), UnavailableError.
        """
        template = await self.get(name)
        made = self.origin(template) is Origin.MADE
        await self._check_unused(template)
        if made:
            # First: from here on nobody can start another one.
            await asyncio.to_thread(self._catalog.discard, name)
        try:
            await self._check_unused(template)
            removed = await self._remove_images(template)
        except BaseException:
            if made:
                await asyncio.to_thread(self._catalog.add, template)
            raise
        if not made and not removed:
            raise InvalidError(
                f"template {name} is {self.origin(template)}, and has no image that was built here",
                hint="what was built or imported can be removed",
            )

    async def give(self, template: Template, name: str) -> Template:
        """The same under a name of its own, instead of what has that name so far.

        Raises ConflictError, InvalidError (it is not one that was made here).
        """
        before = (await self.fresh()).get(name)
        if before is not None and self.origin(before) is not Origin.MADE:
            raise ConflictError(f"template {name} is not made here", hint="choose another name")
        made = dataclasses.replace(template, name=name)
        await asyncio.to_thread(self._catalog.add, made, replace=True)
        if before is not None and not _alike(before, made):
            await self._leave(before)
        return made

    async def take_back(self, name: str) -> None:
        """A name; what it stands for goes with the last one. Nothing if there is none."""
        before = (await self.fresh()).get(name)
        await asyncio.to_thread(self._catalog.discard, name)
        if before is not None:
            await self._leave(before)

    async def _leave(self, template: Template) -> None:
        """It has lost a name. Sandboxes that run from it keep its images."""
        if not self._named_otherwise(template) and not await self._used_by(template):
            try:
                await self._remove_images(template)
            except CapsuleError as error:
                log.warning("image left behind", template=template.name, reason=error.message)

    def _named_otherwise(self, template: Template) -> bool:
        every = self._catalog.values()
        return any(each.name != template.name and _alike(each, template) for each in every)

    async def base(self, template: Template) -> str:
        """What others are built from that start from it. Raises NotFoundError (its image)."""
        found = await (await self._of(BUILDER)).find(template)
        if found is None:
            raise NotFoundError(
                f"template {template.name} has no image that others could start from",
                hint=f"build it: capsule template build {template.name}",
            )
        return found.reference

    def changed_at(self, template: Template) -> float:
        """When it was last written; 0: it was not written here."""
        return self._catalog.changed_at(template.name)

    async def _remove_images(self, template: Template) -> bool:
        if self._named_otherwise(template):
            return True
        removed = False
        for provider in IMAGES:
            if provider == BUILDER and self.origin(template) is Origin.MADE and not template.image:
                continue  # it never had one there
            try:
                images = await self._of(provider)
                removed = await images.remove(template) or removed
            except NotSupportedError:  # its package is not installed: nothing was made with it
                continue
        return removed

    async def _check_unused(self, template: Template) -> None:
        users = await self._used_by(template)
        if users:
            named = ", ".join(users[:5]) + (" and others" if len(users) > 5 else "")
            raise ConflictError(
                f"template {template.name} is in use by sandbox {named}",
                hint="delete them first, or wait for their end",
                sandbox_ids=list(users),
            )
        await self._release(template)

    async def _release(self, template: Template) -> None:
        if self._let_go is not None:
            await self._let_go(template)

    async def _draft(self, name: str, own: bool) -> Template:
        """What is to be built, checked against what there is."""
        known = {} if own else await asyncio.to_thread(shipped)
        if not own and name not in known:
            raise NotFoundError(
                f"no Dockerfile for {brief(name)} comes with Capsule",
                hint=f"there is one for {', '.join(known)}; or give a folder of your own",
                field="name",
            )
        template = (await self.fresh()).get(name)
        if template is None:
            return _draft(name, BUILDER)
        origin = self.origin(template)
        if own and origin is Origin.BUILT_IN:
            raise InvalidError(
                f"template {name} is built in, with a Dockerfile of its own",
                hint="choose another name",
                field="name",
            )
        if template.image and origin is not Origin.MADE:
            raise InvalidError(
                f"template {name} starts from {template.image}, which is not built here",
                hint="choose another name",
                field="name",
            )
        if origin is Origin.MADE:
            return dataclasses.replace(template, image=OWN_IMAGE.format(name))
        return template

    async def _replaceable(self, before: Template, images: Images, *, replace: bool) -> Template:
        """The template whose image an import may bring or replace."""
        name, made = before.name, self.origin(before) is Origin.MADE
        if not made and not _takes(before, images.provider):
            raise ConflictError(
                f"template {name} exists already, and starts from {before.image or before.root}",
                hint="choose another name",
            )
        if await images.find(before) is not None:
            if not replace:
                raise ConflictError(
                    f"template {name} exists already", hint="choose another name, or replace it"
                )
            await self._check_unused(before)
        if made and images.provider == BUILDER:
            return dataclasses.replace(before, image=OWN_IMAGE.format(name))
        return before

    def _template(
        self, draft: Template, image: Image, programs: frozenset[str], *, bare: bool = False
    ) -> Template:
        """What is to be written down for an image; what there is where it is not ours. Blocks."""
        name = draft.name
        before = self._catalog.get(name)
        if before is not None and self.origin(before) is not Origin.MADE:
            return before
        like = self._catalog["bash"]
        if before is not None:
            # What somebody may have set by hand.
            kept = ("limits", "network", "seccomp", "ttl", "runtime", "sudo")
            like = dataclasses.replace(like, **{field: getattr(before, field) for field in kept})
        made = image_template(name, name, env=image.env, programs=programs, like=like, bare=bare)
        return dataclasses.replace(made, image=draft.image)

    async def _record(self, template: Template) -> None:
        if self.origin(template) is Origin.MADE:
            await asyncio.to_thread(self._catalog.add, template, replace=True)

    async def _image(self, template: Template, images: Images) -> Image:
        found = await images.find(template)
        if found is None:
            raise UnavailableError(f"the image of template {template.name} has gone meanwhile")
        return found

    async def _move(self, template: Template, source: Images, target: Images) -> Image:
        await self._check_unused(template)
        with await asyncio.to_thread(spool, self._config.data_dir) as file:
            await source.save(template, file)
            await asyncio.to_thread(file.flush)
            return await target.load(template, Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"))

    async def _of(self, provider: str) -> Images:
        if provider not in self._opened:
            # In a thread: its package is imported now. Two may come at once; nothing is open yet.
            made = await asyncio.to_thread(make_images, provider, self._config)
            self._opened.setdefault(provider, made)
        return self._opened[provider]


def spool(folder: Path) -> BinaryIO:
    """A file without a name: however we end, nothing of it is left. Blocks."""
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


def _draft(name: str, provider: str) -> Template:
    own = OWN_IMAGE.format(name) if provider == BUILDER else ""
    return Template(name, root=f"image:{name}", image=own)


def _alike(one: Template, other: Template) -> bool:
    """Whether they start from the same image."""
    own = one.image or one.root.startswith("image:")
    return bool(own) and (one.root, one.image) == (other.root, other.image)


def _takes(template: Template, provider: str) -> bool:
    """Whether a template that is not ours starts from an image that an import may bring."""
    return not template.image if provider == BUILDER else template.root.startswith("image:")
