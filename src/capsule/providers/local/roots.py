"""From a template's `root` to the layers a box is mounted from, and whether it has its programs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from capsule.errors import NotFoundError, NotSupportedError
from capsule.model import Isolation, Template, User
from capsule.providers.local import programs, skeleton
from capsule.providers.local.plan import Root

log = structlog.get_logger(__name__)

LOOK = 1.0  # seconds for which the host is believed to be as it was


class Roots:
    def __init__(self, data_dir: Path, level: Isolation, *, overlay: bool, agent: Path) -> None:
        self._parent = data_dir / "roots"
        self._images = data_dir / "images"
        self._level = level
        self._overlay = overlay
        self._agent = agent  # which is `sudo`, by that name
        self._hosts: dict[User, Root] = {}
        self._plain: skeleton.Made | None = None
        self._copied: tuple[str, ...] = ()
        self._signature: tuple[object, ...] = ()
        self._looked = -LOOK
        self._found: set[tuple[tuple[str, ...], str | None]] = set()  # needs, and on which PATH
        self._layered: dict[tuple[User, bool, tuple[Path, ...]], Root] = {}

    async def get(self, template: Template) -> Root | None:
        """None at the landlock level. Raises NotFoundError for a missing image or program."""
        kind, _, name = template.root.partition(":")
        if self._level is Isolation.LANDLOCK and kind != "host":
            raise NotSupportedError(
                f"template {template.name} starts from {template.root}, which needs namespaces",
                hint="use a template with `root: host`, or see `capsule doctor`",
            )
        if kind == "host":
            self._look()
            self._require_on_host(template)
            inside = self._level is Isolation.NAMESPACES
            return await self._host_root(template.user) if inside else None
        return await asyncio.to_thread(self._layered_root, template, kind, name)

    def _look(self) -> None:
        """Forgets what may have changed. At every create it would be fifty system calls."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self._found.clear()
        if skeleton.signature(self._copied) != self._signature:
            self._plain = None

    def _require_on_host(self, template: Template) -> None:
        """What is missing may be installed any moment; what was there a moment ago still is."""
        wanted = template.needs, template.env.get("PATH")
        if wanted not in self._found:
            programs.require(template, programs.missing_on_host(template), "on this host")
            self._found.add(wanted)

    async def _host_root(self, user: User) -> Root:
        if self._plain is None:
            self._hosts, self._plain = {}, await asyncio.to_thread(self._prepare_host)
        if user not in self._hosts:
            self._hosts[user] = await asyncio.to_thread(self._prepare_for, user, self._plain)
        return self._hosts[user]

    def _prepare_host(self) -> skeleton.Made:
        # Stamped first: a change while the files are copied is seen the next time.
        self._copied = skeleton.copied_paths()
        self._signature = skeleton.signature(self._copied)
        tree = skeleton.host_tree(sudo=self._agent.read_bytes())
        return skeleton.Made(tree, skeleton.prepare(tree, self._parent, "host"))

    def _prepare_for(self, user: User, plain: skeleton.Made) -> Root:
        tree = skeleton.for_user(plain.tree, user)
        path = skeleton.prepare(tree, self._parent, "host", like=plain)
        return Root((path,), ("usr", *skeleton.own_dirs()))

    def _find_layers(self, template: Template, kind: str, name: str) -> tuple[Path, ...]:
        if not self._overlay:
            raise NotSupportedError(
                f"template {template.name} starts from {template.root}, which needs overlay mounts",
                hint="use a kernel from 5.11 on, or run the server as root",
            )
        if kind == "image":
            # Loaded by those who use images: 12 ms of every other `capsule run`.
            from capsule.providers.local import images

            return tuple(images.layers(name, self._images))
        path = Path(name)
        if kind != "dir" or not path.is_absolute() or not path.is_dir():
            raise NotFoundError(
                f"template {template.name} has no usable root: {template.root}",
                hint="use host, dir:/an/absolute/path, or image:NAME",
            )
        return (path,)

    def _layered_root(self, template: Template, kind: str, name: str) -> Root:
        """In a thread: an image may have been imported again since the last time."""
        layers = self._find_layers(template, kind, name)
        programs.require(template, programs.missing_in_layers(template, layers), "in its image")
        known = template.user, template.sudo, layers
        if known not in self._layered:
            sudo = self._agent.read_bytes() if template.sudo else b""
            if sudo and not skeleton.takes_sudo(layers):
                log.warning(
                    "no sudo of ours: the image has a link in place of /opt or a folder below",
                    template=template.name,
                    root=template.root,
                )
            tree = skeleton.image_tree(layers, template.user, sudo=sudo)
            top = skeleton.prepare(tree, self._parent, "image")
            self._layered[known] = Root((top, *layers))
        return self._layered[known]
