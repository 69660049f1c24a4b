"""`capsule template`: what sandboxes can start from, and images that become templates."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from capsule.catalog import as_mapping, load_catalog
from capsule.cli import show
from capsule.config import Config, load_config
from capsule.errors import NotFoundError
from capsule.model import Template

if TYPE_CHECKING:
    from capsule.service.templates import Templates

T = TypeVar("T")


def list_templates(*, as_json: bool) -> int:
    catalog = _catalog(load_config())
    if as_json:
        show.as_json({"templates": [as_mapping(template) for template in catalog.values()]})
        return 0
    rows = [
        (t.name, t.root, ", ".join(sorted({x.name for x in t.languages.values()})), t.description)
        for t in catalog.values()
    ]
    show.table(("name", "root", "languages", "description"), rows, empty="no templates")
    return 0


def show_template(name: str, *, as_json: bool) -> int:
    found = as_mapping(_find(_catalog(load_config()), name))
    if as_json:
        show.as_json(found)
        return 0
    import yaml

    print(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), end="")
    return 0


def import_image(
    archive: Path, name: str | None, *, provider: str | None, replace: bool, as_json: bool
) -> int:
    from capsule.cli.building import name_of

    if not archive.is_file():
        raise NotFoundError(f"no such file: {archive}", hint="make one: docker save NAME > x.tar")
    show.note(f"unpacking {archive.name}")
    wanted = name or name_of(archive.name)
    built = _do(lambda t: t.load(wanted, archive, provider=provider, replace=replace))
    template, image = built.template, built.image
    if as_json:
        show.as_json({"template": as_mapping(template), "image": dataclasses.asdict(image)})
        return 0
    print(
        f"{template.name}: {image.reference} of provider {image.provider}, {show.size(image.size)}"
    )
    show.note(f"try: capsule create {template.name}")
    return 0


def export_image(name: str, target: Path | None, *, provider: str | None, as_json: bool) -> int:
    """Into a file beside the target first: what is there under the name is whole."""
    path = target or Path(f"{name}.tar")
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            image = _do(lambda t: t.save(name, file, provider=provider))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    size = path.stat().st_size
    if as_json:
        show.as_json({"file": str(path), "size": size, "image": dataclasses.asdict(image)})
        return 0
    print(f"{path}: {show.size(size)}")
    show.note(f"elsewhere: capsule template import {path.name} --name {name}")
    return 0


def remove_image(name: str, *, as_json: bool) -> int:
    _do(lambda t: t.delete(name))
    if as_json:
        show.as_json({"removed": name})
    else:
        print(name)
    return 0


def _do(work: Callable[[Templates], Coroutine[Any, Any, T]]) -> T:
    from capsule.cli.building import open_templates

    async def run() -> T:
        templates = open_templates(load_config())
        try:
            return await work(templates)
        finally:
            await templates.aclose()

    return asyncio.run(run())


def _catalog(config: Config) -> Mapping[str, Template]:
    return load_catalog(config.templates_dir, data_dir=config.data_dir)


def _find(catalog: Mapping[str, Template], name: str) -> Template:
    if name not in catalog:
        raise NotFoundError(f"no such template: {name}", hint=f"there is {', '.join(catalog)}")
    return catalog[name]
