"""E2B's templates in terms of the service: a build makes a template whose name nobody knows, and
tags are names that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, BinaryIO

from msgspec import UNSET, Meta, UnsetType, field

from capsule.catalog import Origin
from capsule.config import Config
from capsule.edge.drain import Gate
from capsule.edge.e2b import script as d
from capsule.edge.e2b.control_shapes import Body, Name
from capsule.edge.e2b.control_views import ENVD_VERSION, View, cores
from capsule.edge.e2b.template_names import (
    Tagged,
    build_id,
    build_of,
    maybe,
    new_build,
    tagged,
    tags_of,
    told,
)
from capsule.edge.e2b.uploads import Uploads
from capsule.edge.errors import invalid_field, sentence
from capsule.errors import CapsuleError, NotFoundError, NotSupportedError, UnavailableError
from capsule.model import MIB, Limits, Template, User
from capsule.service import Service
from capsule.service.builds import Build, Line, Order
from capsule.service.caller import Caller
from capsule.service.template_names import RESERVED, inner, shown
from capsule.service.tenant_templates import TenantTemplates
from capsule.settings import brief

PAGE = 100
Tag = Annotated[str, Meta(max_length=64)]
Tags = Annotated[list[Tag], Meta(max_length=32)]


class E2bNewTemplate(Body, kw_only=True, frozen=True):
    name: Name
    tags: Tags | None = None
    cpu_count: Annotated[int, Meta(ge=1, le=4096)] | None = None
    memory_mb: Annotated[int, Meta(ge=16, le=2**32)] | None = field(name="memoryMB", default=None)
    min_free_disk_mb: int | None = None


class E2bTagging(Body, kw_only=True, frozen=True):
    target: Name
    tags: Tags


class E2bUntagging(Body, kw_only=True, frozen=True):
    name: Name
    tags: Tags


class E2bRequested(View, frozen=True, kw_only=True):
    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class E2bUpload(View, frozen=True, kw_only=True):
    present: bool
    url: str | UnsetType = UNSET


class E2bLogEntry(View, frozen=True, kw_only=True):
    timestamp: datetime
    level: str
    message: str
    step: str | UnsetType = UNSET


class E2bReason(View, frozen=True, kw_only=True):
    message: str
    step: str | UnsetType = UNSET
    log_entries: list[E2bLogEntry] | UnsetType = UNSET


class E2bBuildInfo(View, frozen=True, kw_only=True):
    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    status: str
    logs: list[str]
    log_entries: list[E2bLogEntry]
    reason: E2bReason | UnsetType = UNSET


class E2bAlias(View, frozen=True, kw_only=True):
    template_id: str = field(name="templateID")
    public: bool


class E2bTagged(View, frozen=True, kw_only=True):
    tags: list[str]
    build_id: str = field(name="buildID")


class E2bTag(View, frozen=True, kw_only=True):
    tag: str
    build_id: str = field(name="buildID")
    created_at: datetime


class E2bTemplate(View, frozen=True, kw_only=True):
    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    public: bool
    aliases: list[str]
    names: list[str]
    created_at: datetime
    updated_at: datetime
    created_by: None
    last_spawned_at: None
    spawn_count: int
    build_count: int
    envd_version: str
    build_status: str


class _Begun:
    """A build that was asked for: what its sandboxes will have, and which names it gets."""

    def __init__(self, at: Tagged, names: list[Tagged], of: str, limits: dict[str, Any]) -> None:
        self.at = at
        self.names = names
        self.of = of  # what the catalog calls it meanwhile
        self.limits = limits
        self.file: d.Script | None = None


class TemplateCalls:
    def __init__(self, config: Config, service: Service, gate: Gate, uploads: Uploads) -> None:
        self._config = config
        self._service = service
        self._gate = gate
        self._uploads = uploads
        self._own = TenantTemplates(service.templates)
        self._begun: dict[Build, _Begun] = {}

    def request(self, caller: Caller, p: E2bNewTemplate) -> E2bRequested:
        self._gate.admit()
        at = tagged(p.name)
        tags = tags_of(p.tags or []) or [at.tag]
        if at.tag not in tags and ":" in p.name:
            tags = [at.tag, *tags]
        limits: dict[str, Any] = {}
        if p.cpu_count is not None:
            limits["cpus"] = float(p.cpu_count)
        if p.memory_mb is not None:
            limits["memory"] = p.memory_mb * MIB
        of = new_build(at.name)
        build = self._service.builds.announce(build_id(of), caller.tenant)
        names = [Tagged(at.name, tag) for tag in dict.fromkeys(tags)]
        known = {each: begun for each, begun in self._begun.items() if self._is_known(each)}
        self._begun = {**known, build: _Begun(at, names, of, limits)}
        return E2bRequested(
            template_id=at.name,
            build_id=build.id,
            public=False,
            names=[at.name],
            tags=[each.tag for each in names],
            aliases=[at.name],
        )

    def _is_known(self, build: Build) -> bool:
        try:
            return self._service.builds.find(build.id, build.tenant) is build
        except NotFoundError:
            return False

    async def upload(self, caller: Caller, hash: str, base: str) -> E2bUpload:
        if not d.HASH.fullmatch(hash):
            raise invalid_field("hash", f"{hash[:80]!r} is no sha256")
        present = await asyncio.to_thread(self._uploads.has, caller.tenant, hash)
        return E2bUpload(present=present, url=self._uploads.place(caller.tenant, hash, base))

    async def start(self, caller: Caller, template: str, id: str, p: d.E2bBuild) -> None:
        """Raises what is wrong with it at once; what goes wrong later is in its status."""
        self._gate.admit()
        build, begun = self._found(caller, template, id)
        if p.from_image_registry:
            raise invalid_field(
                "fromImageRegistry",
                "the Engine's own credentials are used, and no others",
                hint="log the Engine in to the registry, or load the image into it",
            )
        made = begun.file = d.script(await self._base(caller, p), p.steps)
        uploads = self._uploads.folder(caller.tenant)
        data, most = self._config.data_dir, self._config.max_context

        def context() -> BinaryIO:
            return d.context(made, uploads, data, most)

        async def done(built: Template) -> None:
            await self._name(caller, built, begun, p)

        force = p.force or any(step.force for step in p.steps)
        self._service.builds.start(build, caller, Order(begun.of, context, done, not force))

    async def _base(self, caller: Caller, p: d.E2bBuild) -> str:
        if p.from_image and not p.from_template:
            return p.from_image
        if not p.from_template or p.from_image:
            raise invalid_field("fromImage", "a template starts from an image, or from a template")
        found = await self._own.get(caller, maybe(p.from_template).kept)
        return await self._service.templates.base(found)

    async def _name(self, caller: Caller, built: Template, begun: _Begun, p: d.E2bBuild) -> None:
        made = replace(
            built,
            description=f"built as {begun.at}",
            user=User(d.USER, d.PLACE),
            sudo=True,
            limits=replace(built.limits, **begun.limits),
            prepare=d.PREPARE,
            start=p.start_cmd or "",
            ready=p.ready_cmd or "",
        )
        templates = self._service.templates
        for each in begun.names:
            await templates.give(made, inner(caller.tenant, each.kept))
        await templates.take_back(built.name)

    def status(
        self, caller: Caller, template: str, id: str, *, offset: int, limit: int
    ) -> E2bBuildInfo:
        build, begun = self._found(caller, template, id)
        lines = build.lines[offset : offset + min(limit, PAGE)]
        reason: E2bReason | UnsetType = UNSET
        if build.error is not None:
            reason = _reason(build.error, begun, build)
        return E2bBuildInfo(
            template_id=begun.at.name,
            build_id=build.id,
            status=build.state,
            logs=[],
            log_entries=[_entry(line, begun) for line in lines],
            reason=reason,
        )

    def _found(self, caller: Caller, template: str, id: str) -> tuple[Build, _Begun]:
        """Raises NotFoundError."""
        build = self._service.builds.find(id, caller.tenant)
        begun = self._begun[build]
        if begun.at.name != maybe(template).name:
            raise NotFoundError(f"build {brief(id)} does not exist", hint="begin another")
        return build, begun

    async def alias(self, caller: Caller, name: str) -> E2bAlias:
        """By its name alone it exists under any tag."""
        try:
            found = await self._own.get(caller, maybe(name).kept)
        except NotFoundError:
            tagged_so = [] if ":" in name else await self._builds(caller, maybe(name).name)
            if not tagged_so:
                raise
            found = tagged_so[0]
        return E2bAlias(template_id=told(shown(found.name)).name, public=self._is_public(found))

    async def tag(self, caller: Caller, p: E2bTagging) -> E2bTagged:
        tags = tags_of(p.tags)
        source = await self._made(caller, maybe(p.target).kept)
        name = maybe(p.target).name
        for tag in tags:
            await self._service.templates.give(source, inner(caller.tenant, Tagged(name, tag).kept))
        return E2bTagged(tags=tags, build_id=build_of(source))

    async def untag(self, caller: Caller, p: E2bUntagging) -> None:
        name = maybe(p.name).name
        every = [Tagged(name, tag).kept for tag in tags_of(p.tags)]
        for kept in every:
            await self._made(caller, kept)
        for kept in every:
            await self._own.delete(caller, kept)

    async def _builds(self, caller: Caller, name: str) -> list[Template]:
        return [
            each
            for each in await self._own.list(caller)
            if told(shown(each.name)).name == name and self._is_made(each)
        ]

    async def tags(self, caller: Caller, name: str) -> list[E2bTag]:
        wanted = maybe(name).name
        found = await self._builds(caller, wanted)
        if not found:
            raise NotFoundError(f"template {brief(wanted)} does not exist", hint="build it first")
        return [
            E2bTag(
                tag=told(shown(each.name)).tag,
                build_id=build_of(each),
                created_at=self._changed(each),
            )
            for each in found
        ]

    async def list(self, caller: Caller) -> Sequence[E2bTemplate]:
        every = sorted(await self._own.list(caller), key=lambda each: shown(each.name))
        by_name: dict[str, list[Template]] = {}
        for each in every:
            by_name.setdefault(told(shown(each.name)).name, []).append(each)
        return [self._view(name, templates) for name, templates in by_name.items()]

    def _view(self, name: str, templates: Sequence[Template]) -> E2bTemplate:
        first = templates[0]
        limits: Limits = first.limits
        return E2bTemplate(
            template_id=name,
            build_id=build_of(first),
            cpu_count=cores(limits),
            memory_mb=limits.memory // MIB,
            disk_size_mb=limits.disk // MIB,
            public=self._is_public(first),
            aliases=[name],
            names=[str(told(shown(each.name))) for each in templates],
            created_at=min(map(self._changed, templates)),
            updated_at=max(map(self._changed, templates)),
            created_by=None,
            last_spawned_at=None,
            spawn_count=0,
            build_count=len({build_of(each) for each in templates}),
            envd_version=ENVD_VERSION,
            build_status="ready",
        )

    async def _made(self, caller: Caller, kept: str) -> Template:
        """Raises NotFoundError, InvalidError: it is none of the caller's."""
        found = await self._own.get(caller, kept)
        if not self._is_made(found) or found.name != inner(caller.tenant, kept):
            raise invalid_field("name", f"{str(told(kept))!r} was not built here, and has no tags")
        return found

    def _is_made(self, template: Template) -> bool:
        return self._service.templates.origin(template) is Origin.MADE

    def _is_public(self, template: Template) -> bool:
        return not template.name.startswith(RESERVED)

    def _changed(self, template: Template) -> datetime:
        return datetime.fromtimestamp(self._service.templates.changed_at(template), UTC)


def _entry(line: Line, begun: _Begun) -> E2bLogEntry:
    step = begun.file.step(line.step) if begun.file is not None and line.step else UNSET
    at = datetime.fromtimestamp(line.at, UTC)
    return E2bLogEntry(timestamp=at, level="info", message=line.text, step=step)


def _reason(error: CapsuleError, begun: _Begun, build: Build) -> E2bReason:
    number = error.details.get("number") or build.step
    step: str | UnsetType = UNSET
    if begun.file is not None and isinstance(number, int):
        step = begun.file.step(number) if number else d.BASE
    text = sentence(error)
    said = str(error.details.get("output", "")).strip()[-2000:]
    if isinstance(error, UnavailableError | NotSupportedError) and not number:
        text += " (templates are built by a Docker Engine: see docs/docker.md)"
    return E2bReason(message=f"{text}\n{said}" if said else text, step=step)
