"""From a template's `root` to the layers a box is mounted from, and whether it has its programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from capsule.errors import NotFoundError, NotSupportedError
from capsule.model import Isolation, Template
from capsule.providers.local import skeleton
from capsule.providers.local.disk import SYSTEM_PATH
from capsule.providers.local.plan import Root


class Roots:
    def __init__(self, data_dir: Path, level: Isolation, *, overlay: bool) -> None:
        self._parent = data_dir / "roots"
        self._images = data_dir / "images"
        self._level = level
        self._overlay = overlay
        self._host: Root | None = None
        self._copied: tuple[str, ...] = ()
        self._signature: tuple[object, ...] = ()
        self._layered: dict[tuple[Path, ...], Root] = {}

    async def get(self, template: Template) -> Root | None:
        """None at the landlock level. Raises NotFoundError for a missing image or program."""
        kind, _, name = template.root.partition(":")
        if self._level is Isolation.LANDLOCK:
            if kind != "host":
                raise NotSupportedError(
                    f"template {template.name} starts from {template.root}, which needs namespaces",
                    hint="use a template with `root: host`, or see `capsule doctor`",
                )
            find_programs(template, (Path("/"),))
            return None
        if kind == "host":
            find_programs(template, (Path("/"),))
            return await self._host_root()
        layers = await asyncio.to_thread(self._find_layers, template, kind, name)
        find_programs(template, layers)
        return await self._layered_root(layers)

    async def _host_root(self) -> Root:
        if self._host is None or skeleton.signature(self._copied) != self._signature:
            self._host = await asyncio.to_thread(self._prepare_host)
        return self._host

    def _prepare_host(self) -> Root:
        # Stamped first: a change while the files are copied is seen the next time.
        self._copied = skeleton.copied_paths()
        self._signature = skeleton.signature(self._copied)
        path = skeleton.prepare(skeleton.host_tree(), self._parent, "host")
        return Root((path,), ("usr", *skeleton.own_dirs()))

    def _find_layers(self, template: Template, kind: str, name: str) -> tuple[Path, ...]:
        if not self._overlay:
            raise NotSupportedError(
                f"template {template.name} starts from {template.root}, which needs overlay mounts",
                hint="use a kernel from 5.11 on, or run the server as root",
            )
        if kind == "image":
            from capsule.providers.local import images

            return tuple(images.layers(name, self._images))
        path = Path(name)
        if kind != "dir" or not path.is_absolute() or not path.is_dir():
            raise NotFoundError(
                f"template {template.name} has no usable root: {template.root}",
                hint="use host, dir:/an/absolute/path, or image:NAME",
            )
        return (path,)

    async def _layered_root(self, layers: tuple[Path, ...]) -> Root:
        if layers not in self._layered:
            tree = await asyncio.to_thread(skeleton.image_tree, layers)
            top = await asyncio.to_thread(skeleton.prepare, tree, self._parent, "image")
            self._layered[layers] = Root((top, *layers))
        return self._layered[layers]


def find_programs(template: Template, layers: Iterable[Path]) -> None:
    """Raises NotFoundError naming what the template needs and this host, or its image, has not."""
    layers = tuple(layers)
    missing = [name for name in template.needs if not _has(name, layers)]
    if missing:
        where = "on this host" if layers == (Path("/"),) else "in its image"
        raise NotFoundError(
            f"template {template.name} needs {', '.join(missing)}, which is not installed {where}",
            hint=f"install {', '.join(missing)} below /usr, or use another template",
            template=template.name,
            missing=missing,
        )


def _has(name: str, layers: tuple[Path, ...]) -> bool:
    """Links count as they are: where they lead inside an image is not the host's to follow."""
    places = (name,) if name.startswith("/") else SYSTEM_PATH.split(":")
    for layer in layers:
        for place in places:
            path = os.path.join(layer, place.lstrip("/"), "" if place == name else name)
            try:
                os.lstat(path.rstrip("/"))
            except OSError:
                continue
            return True
    return False
