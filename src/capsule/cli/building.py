"""`capsule template build`: an image from a Dockerfile, while somebody watches."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from capsule.catalog import as_mapping, load_catalog, shipped
from capsule.cli import show
from capsule.cli.codes import SIGNALED
from capsule.config import Config, load_config
from capsule.errors import InvalidError, NotFoundError
from capsule.providers.images import Fetch, Log, Progress, Recipe, Step
from capsule.service.templates import Built, Templates, recorded_users, spool


class Order(NamedTuple):
    target: str  # a template that Capsule brings a Dockerfile for, or a folder
    name: str | None
    file: str
    args: Mapping[str, str]
    cache: bool
    pull: bool
    provider: str | None


def build_image(order: Order, *, as_json: bool) -> int:
    return asyncio.run(_ended_by_signals(_build(order, load_config(), as_json)))


def open_templates(config: Config) -> Templates:
    """Without a server: what it does is in the data directory, where a running one sees it."""
    catalog = load_catalog(config.templates_dir, data_dir=config.data_dir)
    alone = dataclasses.replace(config, max_builds=1)  # 0 is for others, who ask a server
    return Templates(alone, catalog, recorded_users(config.data_dir))


async def _build(order: Order, config: Config, as_json: bool) -> int:
    folder = _folder(order)
    templates, view = open_templates(config), View(quiet=as_json)
    built: Built | None = None
    try:
        with spool(config.data_dir) as context:
            name, recipe = _recipe(order, folder, context, config.max_context)
            async with aclosing(templates.build(name, recipe, provider=order.provider)) as words:
                async for said in words:
                    if isinstance(said, Built):
                        built = said
                    else:
                        view.show(said)
    finally:
        view.close()
        await templates.aclose()
    assert built is not None  # the iteration ends with it, or raises
    if as_json:
        body = {"template": as_mapping(built.template), "image": dataclasses.asdict(built.image)}
        show.as_json(body)
        return 0
    print(f"{built.template.name}: {built.image.reference}, {show.size(built.image.size)}")
    show.note(f"try: capsule create {built.template.name}")
    return 0


def _folder(order: Order) -> Path | None:
    """None: it is the name of one that Capsule brings. A folder of that name is ./NAME."""
    known = shipped()
    if order.target in known:
        return None
    folder = Path(order.target)
    if not folder.is_dir():
        raise NotFoundError(
            f"neither a folder nor a template that Capsule can build: {order.target}",
            hint=f"there is {', '.join(known)}; or name the folder with your Dockerfile",
        )
    return folder


def _recipe(order: Order, folder: Path | None, context: BinaryIO, most: int) -> tuple[str, Recipe]:
    recipe = Recipe(file=order.file, args=order.args, cache=order.cache, pull=order.pull)
    if folder is None:
        if order.name not in (None, order.target):
            raise InvalidError(
                f"template {order.target} has its name already", hint="leave out --name"
            )
        return order.target, recipe
    from capsule_sdk._context import pack_context

    for piece in pack_context(folder, file=order.file, most=most):
        context.write(piece)
    show.note(f"sending {show.size(context.tell())} to the Engine")
    context.seek(0)
    return order.name or name_of(folder.resolve().name), dataclasses.replace(
        recipe, context=context
    )


def name_of(file: str) -> str:
    """alpine-3.20.tar.gz → alpine-3.20, My Project → my-project"""
    stem = re.sub(r"\.(tar|tgz|tar\.gz)$", "", file.lower())
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[:64] or "image"


class View:
    """What a person sees of a build, on stderr: the result alone is for pipes."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._parts: dict[str, Fetch] = {}
        self._open = False  # a line of progress has no end yet
        self._fresh = True  # the last text ended with a line break

    def show(self, said: Progress) -> None:
        if self._quiet:
            return
        match said:
            case Step():
                self._line(show.paint(f"[{said.number}/{said.total}] {said.text}", show.BOLD))
            case Log():
                self._text(said.text)
            case Fetch():
                self._fetch(said)

    def close(self) -> None:
        self._end_progress()
        if not self._fresh:
            self._text("\n")

    def _line(self, text: str) -> None:
        self.close()
        self._text(f"{text}\n")

    def _text(self, text: str) -> None:
        self._end_progress()
        safe = text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        sys.stderr.write(safe.decode(sys.stderr.encoding or "utf-8"))
        sys.stderr.flush()
        self._fresh = text.endswith("\n")

    def _fetch(self, said: Fetch) -> None:
        before = self._parts.get(said.part)
        self._parts[said.part] = said
        if not self._live:
            if before is None or before.status != said.status:
                self._line(f"{said.part}: {said.status}" if said.part else said.status)
            return
        known = [part for part in self._parts.values() if part.total]
        current, total = sum(p.current for p in known), sum(p.total for p in known)
        sys.stderr.write(f"\r\x1b[Kpulling: {show.size(current)} of {show.size(total)}")
        sys.stderr.flush()
        self._open = True

    def _end_progress(self) -> None:
        if self._open:
            sys.stderr.write("\r\x1b[K")
            self._open = False


async def _ended_by_signals(work: Coroutine[Any, Any, int]) -> int:
    """SIGTERM and SIGHUP cancel it, as Ctrl-C does: then nothing of the build is left."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # once: a second one would cancel the cleaning up
            task.cancel()
        ended_by.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return SIGNALED + ended_by[0]
