"""Images in the Docker Engine: built, looked into, moved in and out, removed.

A template's image is called capsule/NAME:latest, unless the template or the configuration says
otherwise. Builds use the Engine's own builder, not BuildKit, which would need a protocol of its
own; it is in every Engine, and in Podman.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import secrets
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from capsule.config import Config
from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from capsule.host_errors import host_errors
from capsule.model import MIB, SYSTEM_PATH, Template
from capsule.providers.cleanup import finish, to_the_end
from capsule.providers.docker import address, leftovers
from capsule.providers.docker.build_stream import BuildStream, Lines
from capsule.providers.docker.context import bases, check_context
from capsule.providers.docker.engine import split_tag
from capsule.providers.docker.image_engine import ImageEngine
from capsule.providers.docker.leftovers import CONTAINER, IMAGE, NAME, REPLACED, Ledger
from capsule.providers.docker.settings import DEFAULT_IMAGE
from capsule.providers.docker_archive import END, config_name, entry, manifest
from capsule.providers.images import Image, Images, Look, Progress, Recipe
from capsule.providers.local.archive import Archive, opened
from capsule.providers.local.manifests import Contents, read_contents
from capsule.providers.local.unpack import Caps

LABEL = "capsule.template"  # no other of ours: a container has the labels of its image
TIDY_BUDGET = 60.0
PATIENCE = 15.0  # the Engine gives a program ten seconds between asking and killing it

_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    data_dir: Path
    host: str | None = None
    image: str = DEFAULT_IMAGE  # of templates that name none
    pull: str = "missing"
    # What a build's steps may use: they run as root in a container of the Engine's.
    memory: int = 0  # bytes; 0: no limit
    network: str = "default"
    max_context: int = 256 * MIB


def build(config: Config) -> DockerImages:
    return DockerImages(
        ImageSettings(
            data_dir=config.data_dir,
            host=config.docker_host,
            image=config.docker_image,
            pull=config.docker_pull,
            memory=config.build_memory,
            network=config.build_network,
            max_context=config.max_context,
        )
    )


class DockerImages(Images):
    provider: ClassVar[str] = "docker"

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._ledgers = settings.data_dir / "builds"
        self._known: ImageEngine | None = None

    async def aclose(self) -> None:
        engine, self._known = self._known, None
        if engine is not None:
            await engine.aclose()

    def reference(self, template: Template) -> str:
        return template.image or self.settings.image.replace("{template}", template.name)

    async def find(self, template: Template) -> Image | None:
        engine = await self._engine()
        found = await engine.image(self.reference(template))
        return None if found is None else _image(self.reference(template), found)

    async def programs(self, template: Template, names: tuple[str, ...]) -> frozenset[str]:
        image = await self.find(template)
        if image is None:
            raise NotFoundError(f"no image: {self.reference(template)}")
        return await self._look(image, names)

    async def _look(self, image: Image, names: tuple[str, ...]) -> frozenset[str]:
        """In a container that is never started: no program of the image runs."""
        engine = await self._engine()
        ledger = await asyncio.to_thread(Ledger.begin, self._ledgers)
        name = f"capsule-look-{secrets.token_hex(6)}"
        try:
            await asyncio.to_thread(ledger.note, CONTAINER, name)
            body = {"Image": image.id, "Cmd": ["true"], "HostConfig": {"NetworkMode": "none"}}
            await engine.create(name, body)
            places = image.env.get("PATH", SYSTEM_PATH).split(":")
            return frozenset({n for n in names if await _has(engine, name, n, places)})
        finally:
            work = self._settle(engine, ledger)
            await finish(work, f"look into {image.reference}", budget=TIDY_BUDGET)

    async def build(self, template: Template, recipe: Recipe) -> AsyncGenerator[Progress, None]:
        check_name(template.name)
        assert recipe.context is not None  # whoever asks has filled it in
        reference, most = self.reference(template), self.settings.max_context
        text = await asyncio.to_thread(check_context, recipe.context, recipe.file, most=most)
        engine = await self._engine()
        await self._check_bases(engine, bases(text, recipe.args))
        build = _Build(engine, reference, await asyncio.to_thread(Ledger.begin, self._ledgers))
        try:
            async with aclosing(build.run(recipe, self._params(template, recipe))) as words:
                async for said in words:
                    yield said
        finally:
            what = f"build of {template.name}"
            await finish(self._conclude(engine, build), what, budget=TIDY_BUDGET)

    async def save(self, template: Template, target: BinaryIO) -> None:
        engine = await self._engine()
        async with aclosing(engine.save_image(self.reference(template))) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(target.write, piece)

    async def load(self, template: Template, archive: Path, look: Look | None = None) -> Image:
        check_name(template.name)
        engine, reference = await self._engine(), self.reference(template)
        # Under a name of its own first: what it replaces is replaced when all is well.
        draft = f"{split_tag(reference)[0]}:incoming-{secrets.token_hex(6)}"
        ledger = await asyncio.to_thread(Ledger.begin, self._ledgers)
        try:
            await asyncio.to_thread(ledger.note, NAME, draft)
            async with _opened(archive, self.settings.data_dir) as source:
                await _load(engine, source, draft)
            image = _image(reference, await _expect(engine, draft))
            if look is not None:
                programs = await self._look(image, look.names)
                await asyncio.to_thread(look.take, image, programs)
            replaced = await engine.image(reference)
            await engine.tag(draft, reference)
            if replaced is not None:
                await asyncio.to_thread(ledger.note, REPLACED, _hex(replaced))
            return image
        finally:
            await finish(self._settle(engine, ledger), f"load of {reference}", budget=TIDY_BUDGET)

    async def remove(self, template: Template) -> bool:
        engine, reference = await self._engine(), self.reference(template)
        found = await engine.image(reference)
        if found is None or not _is_ours(reference, found):
            return False
        try:
            await engine.remove_image(reference, parents=True)
        except NotFoundError:
            return False
        except ConflictError as error:
            raise ConflictError(
                f"image {reference} is in use: {error.message}",
                hint="remove the containers that run from it first (docker ps -a)",
            ) from error
        return True

    async def tidy(self) -> None:
        engine = await self._engine()
        for ledger in await asyncio.to_thread(lambda: list(Ledger.abandoned(self._ledgers))):
            await self._settle(engine, ledger, patience=0.0)

    async def _conclude(self, engine: ImageEngine, build: _Build) -> None:
        try:
            await build.await_end()
        finally:
            await self._settle(engine, build.ledger)

    async def _settle(
        self, engine: ImageEngine, ledger: Ledger, *, patience: float = PATIENCE
    ) -> None:
        """Remove what the ledger notes. What cannot be removed now is left for `tidy`."""
        done = False
        try:
            done = await leftovers.clear(engine, ledger, patience=patience)
        finally:
            await asyncio.to_thread(ledger.close, keep=not done)

    async def _engine(self) -> ImageEngine:
        if self._known is None:
            found = await asyncio.to_thread(address.find, self.settings.host)
            self._known = self._known or ImageEngine(found)
        return self._known

    async def _check_bases(self, engine: ImageEngine, wanted: list[str]) -> None:
        """The Engine pulls what is missing, without being asked."""
        for name in wanted if self.settings.pull == "never" else ():
            if await engine.image(name) is None:
                raise NotFoundError(
                    f"the base image {name} is not there, and pulls are off",
                    hint="load it into the Engine, or set CAPSULE_DOCKER_PULL=missing",
                    image=name,
                )

    def _params(self, template: Template, recipe: Recipe) -> dict[str, str]:
        params = {
            "t": self.reference(template),
            "dockerfile": recipe.file,
            "buildargs": json.dumps(dict(recipe.args)),
            "labels": json.dumps({LABEL: template.name}),
            "networkmode": self.settings.network,
            "rm": "true",
            "forcerm": "true",
            "version": "1",
        }
        if not recipe.cache:
            params["nocache"] = "true"
        if recipe.pull and self.settings.pull != "never":
            params["pull"] = "true"
        if memory := self.settings.memory:
            params["memory"] = params["memswap"] = str(memory)
        return params


class _Build:
    """One build, and what it has made so far."""

    def __init__(self, engine: ImageEngine, reference: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self._engine = engine
        self._reference = reference
        self._stream = BuildStream(reference)
        self._before: set[str] = set()
        self._noted = (0, 0)
        self._over = False  # the Engine has said how it ended

    async def run(
        self, recipe: Recipe, params: Mapping[str, str]
    ) -> AsyncGenerator[Progress, None]:
        engine, context = self._engine, recipe.context
        assert context is not None
        there = await engine.everything()
        self._before = {*await engine.image_ids(), *(str(each["Id"]) for each in there)}
        replaced = await engine.image(self._reference)
        lines = Lines()
        async with aclosing(engine.build(context, params)) as pieces:
            async for piece in pieces:
                for line in lines.feed(piece):
                    for said in self._hear(line):
                        yield said
                await self._note()
        self._over = True
        self._stream.ended()
        if replaced is not None:
            # It has lost its name to the new one, unless they are the same.
            await asyncio.to_thread(self.ledger.note, REPLACED, _hex(replaced))

    def _hear(self, line: bytes) -> Iterator[Progress]:
        try:
            yield from self._stream.hear(line)
        except CapsuleError:
            self._over = True
            raise

    async def await_end(self) -> None:
        """Until the Engine has given up a build that nobody follows any more."""
        await self._note()
        images, step = self._stream.images, self._stream.step
        if not self._over and images and step is not None:
            await leftovers.await_end(
                self._engine,
                self.ledger,
                self._before,
                image=images[-1],
                step=step.text,
                within=PATIENCE,
            )

    async def _note(self) -> None:
        images, containers = self._stream.images, self._stream.containers
        first, second = self._noted
        self._noted = (len(images), len(containers))
        for kind, ids in ((CONTAINER, containers[second:]), (IMAGE, images[first:])):
            for id in ids:
                if not any(known.startswith(id) for known in self._before):
                    await asyncio.to_thread(self.ledger.note, kind, id)


@asynccontextmanager
async def _opened(archive: Path, spool: Path) -> AsyncGenerator[Archive, None]:
    """In a thread: an archive that is compressed is unpacked first, next to the other data."""
    stack = ExitStack()
    try:
        folder = await asyncio.to_thread(tempfile.TemporaryDirectory, dir=spool)
        stack.push(folder)
        work = Path(folder.name, "archive")
        with host_errors(f"cannot read {archive}"):
            entered = stack.enter_context
            source = await to_the_end(
                asyncio.to_thread(lambda: entered(opened(archive, work, Caps())))
            )
        yield source
    finally:
        await to_the_end(asyncio.to_thread(stack.close))


async def _expect(engine: ImageEngine, reference: str) -> dict[str, Any]:
    found = await engine.image(reference)
    if found is None:
        raise UnavailableError(f"the Engine took the archive, and has no image {reference}")
    return found


async def _load(engine: ImageEngine, source: Archive, reference: str) -> None:
    contents = await asyncio.to_thread(read_contents, source)
    if contents.kind == "rootfs":
        pieces = source.raw(contents.layers[0].extent)
        words = engine.import_root(_in_threads(pieces), reference)
    else:
        words = engine.load_image(_in_threads(_renamed(source, contents, reference)))
    lines = Lines()
    async with aclosing(words):
        async for piece in words:
            for line in lines.feed(piece):
                if "error" in (said := json.loads(line)):
                    raise InvalidError(f"the Engine cannot load the archive: {said['error']}")


def _renamed(source: Archive, contents: Contents, reference: str) -> Iterator[bytes]:
    """The image as `docker save` writes it, whatever the archive is, under our name alone: its own
    would replace what the Engine has under that."""
    config = source.document(contents.document)
    names = [f"{i}/layer.tar" for i in range(len(contents.layers))]
    described = manifest(config_name(config), names, reference)
    yield from entry(config_name(config), len(config), [config])
    for name, layer in zip(names, contents.layers, strict=True):
        yield from entry(name, layer.extent.size, source.raw(layer.extent))
    yield from entry("manifest.json", len(described), [described])
    yield END


async def _in_threads(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        if piece:  # an empty one would be the end of the request
            yield piece


def check_name(name: str) -> None:
    """Stricter than for templates: it becomes a part of an image's name."""
    if len(name) > 64 or not _NAME.fullmatch(name):
        raise InvalidError(
            f"not a name for an image: {name[:100]!r}",
            hint="up to 64 lower-case letters and digits, with single . _ or - between them",
            field="name",
        )


async def _has(engine: ImageEngine, container: str, name: str, places: list[str]) -> bool:
    for place in places:
        if place and await engine.is_program(container, f"{place}/{name}"):
            return True
    return False


def _is_ours(reference: str, found: Mapping[str, Any]) -> bool:
    """Whether it was built or imported here. A template may name any image, also others'."""
    labels = (found.get("Config") or {}).get("Labels") or {}
    return reference.startswith("capsule/") or LABEL in labels


def _hex(found: Mapping[str, Any]) -> str:
    return str(found["Id"]).removeprefix("sha256:")


def _image(reference: str, found: Mapping[str, Any]) -> Image:
    config = found.get("Config") or {}
    pairs = (str(text).partition("=") for text in config.get("Env") or ())
    return Image(
        provider=DockerImages.provider,
        reference=reference,
        id=str(found["Id"]),
        size=int(found.get("Size") or 0),
        created=_seconds(str(found.get("Created") or "")),
        env={key: value for key, equals, value in pairs if key and equals},
    )


def _seconds(text: str) -> float:
    """RFC 3339 with nanoseconds, of which Python takes six digits."""
    try:
        return datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text)).timestamp()
    except ValueError:
        return 0.0
