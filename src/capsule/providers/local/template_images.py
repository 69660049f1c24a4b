"""The local store as a place of images: imported, exported, never built here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

from capsule.config import Config
from capsule.errors import NotFoundError
from capsule.host_errors import host_errors
from capsule.model import SYSTEM_PATH, Template
from capsule.providers.cleanup import to_the_end
from capsule.providers.images import Image, Images, Look
from capsule.providers.local import image_store, images
from capsule.providers.local.export import export_image


def build(config: Config) -> LocalImages:
    return LocalImages(config.data_dir, config.docker_image)


class LocalImages(Images):
    provider: ClassVar[str] = "local"

    def __init__(self, data_dir: Path, reference: str) -> None:
        """`reference` is what an exported image is called, with {template} in it."""
        self._store = data_dir / "images"
        self._reference = reference

    async def aclose(self) -> None:
        return

    async def find(self, template: Template) -> Image | None:
        try:
            return _image(await asyncio.to_thread(self._read, template))
        except NotFoundError:
            return None

    async def programs(self, template: Template, names: tuple[str, ...]) -> frozenset[str]:
        def look() -> frozenset[str]:
            image = self._read(template)
            return _programs(image, images.layers(image.name, self._store), names)

        return await asyncio.to_thread(look)

    async def save(self, template: Template, target: BinaryIO) -> None:
        def write() -> None:
            name = template.image or self._reference.replace("{template}", template.name)
            with host_errors("cannot write the archive"):
                export_image(self._read(template).name, self._store, target, name)

        await to_the_end(asyncio.to_thread(write))

    async def load(self, template: Template, archive: Path, look: Look | None = None) -> Image:
        def take() -> image_store.Image:
            name = _name(template) or template.name
            with images.importing(archive, name, self._store, replace=True) as unpacked:
                if look is not None:
                    look.take(_image(unpacked.image), _programs(*unpacked, look.names))
                return unpacked.image

        return _image(await to_the_end(asyncio.to_thread(take)))

    async def remove(self, template: Template) -> bool:
        name = _name(template)
        if name is None:
            return False
        try:
            await to_the_end(asyncio.to_thread(images.remove_image, name, self._store))
        except NotFoundError:
            return False
        return True

    def _read(self, template: Template) -> image_store.Image:
        name = _name(template)
        if name is None:
            raise NotFoundError(
                f"template {template.name} has no image: its root is {template.root}",
                hint="`capsule template import` makes a template that has one",
            )
        return image_store.ImageStore(self._store).read(name)


def _programs(
    image: image_store.Image, layers: Sequence[Path], names: tuple[str, ...]
) -> frozenset[str]:
    return images.find_programs(layers, names, image.config.env.get("PATH", SYSTEM_PATH))


def _name(template: Template) -> str | None:
    kind, _, name = template.root.partition(":")
    return name if kind == "image" else None


def _image(image: image_store.Image) -> Image:
    return Image(
        provider=LocalImages.provider,
        reference=image.name,
        id=image.layers[-1] if image.layers else "",
        size=image.amount.bytes,
        created=image.created,
        env=image.config.env,
    )
