"""What a client can do with templates, once for JSON-RPC and REST."""

from __future__ import annotations

import asyncio
import builtins
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import BinaryIO

from capsule.config import Config
from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.drain import Gate
from capsule.edge.presence import while_there
from capsule.edge.sse import event
from capsule.edge.template_views import (
    BuiltView,
    ImageView,
    TemplateInfoView,
    TemplatesView,
    TemplateView,
)
from capsule.service import Built, Fetch, Log, Recipe, Service, Step, Tail, spool
from capsule.service.caller import Caller
from capsule.service.templates import Said
from capsule.service.tenant_templates import TenantTemplates

SPOOLED_AT_ONCE = 1024 * 1024


class TemplateVerbs:
    def __init__(self, config: Config, service: Service, gate: Gate) -> None:
        self.config = config
        self.service = service
        self.gate = gate
        self._own = TenantTemplates(service.templates)

    async def list(self, caller: Caller, p: s.Nothing) -> TemplatesView:
        known = await self._own.list(caller)
        origin = self.service.templates.origin
        found = [TemplateView.of(each, origin(each)) for each in known]
        return TemplatesView(templates=sorted(found, key=lambda template: template.name))

    async def get(self, caller: Caller, p: s.OfTemplate) -> TemplateInfoView:
        templates = self.service.templates
        template = await self._own.get(caller, p.name)
        images = await templates.images(template)
        return TemplateInfoView.with_images(template, templates.origin(template), images)

    async def delete(self, caller: Caller, p: s.OfTemplate) -> v.DeletedView:
        await self._own.delete(caller, p.name)
        return v.DeletedView()

    async def build(self, caller: Caller, p: s.BuildTemplate) -> BuiltView:
        """The context comes with the params. It ends when the client leaves."""
        context = io.BytesIO(p.context_base64) if p.context_base64 else None
        async with aclosing(self.start(caller, p, context)) as words:
            return await while_there(self.finish(words))

    def start(
        self, caller: Caller, p: s.BuildOptions, context: BinaryIO | None
    ) -> AsyncGenerator[Said, None]:
        self.gate.admit()
        recipe = Recipe(context, file=p.file, args=p.args, cache=p.cache, pull=p.pull)
        return self._own.build(caller, p.name, recipe, provider=p.provider)

    async def finish(self, words: AsyncGenerator[Said, None]) -> BuiltView:
        """Wait for the end; what was said is part of the answer, as far as its end goes."""
        tail = Tail()
        async for said in words:
            match said:
                case Built():
                    return self._built(said, str(tail))
                case Step():
                    tail.add(f"[{said.number}/{said.total}] {said.text}\n")
                case Log():
                    tail.add(said.text)
        raise AssertionError("a build ends with what it built, or raises")

    def _built(self, built: Built, log: str) -> BuiltView:
        origin = self.service.templates.origin(built.template)
        return BuiltView(
            template=TemplateView.of(built.template, origin),
            image=ImageView.of(built.image),
            log=log,
        )

    def as_event(self, said: Said) -> bytes:
        match said:
            case Step():
                return event("step", said)
            case Log():
                return event("log", said)
            case Fetch():
                return event("fetch", said)
            case Built():
                return event("built", self._built(said, ""))

    async def received(
        self, chunks: AsyncIterator[bytes], stack: AsyncExitStack
    ) -> BinaryIO | None:
        """A body on disk, in a file that goes with `stack`; None: it is empty."""
        file: BinaryIO | None = None
        waiting: builtins.list[bytes] = []
        size = 0
        async for chunk in chunks:
            if file is None:
                file = await asyncio.to_thread(spool, self.config.data_dir)
                stack.callback(file.close)
            waiting.append(chunk)
            size += len(chunk)
            if size >= SPOOLED_AT_ONCE:
                await asyncio.to_thread(file.writelines, waiting)
                waiting, size = [], 0
        if file is not None:
            await asyncio.to_thread(file.writelines, waiting)
            await asyncio.to_thread(file.seek, 0)
        return file
