"""`capsule template`: what sandboxes can start from, and images that become templates."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from capsule.catalog import (
    as_mapping,
    image_template,
    load_catalog,
    write_template,
    written_folder,
)
from capsule.cli import show
from capsule.config import Config, load_config
from capsule.errors import InvalidError, NotFoundError
from capsule.model import Template

_PROGRAMS = ("python3", "node", "go", "bash", "sh")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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


def import_image(archive: Path, name: str | None, *, replace: bool, as_json: bool) -> int:
    from capsule.providers.local import images

    config = load_config()
    if not archive.is_file():
        raise NotFoundError(f"no such file: {archive}", hint="make one: docker save NAME > x.tar")
    name = name or _name_of(archive)
    if not replace and name in _catalog(config):
        raise InvalidError(f"template {name} exists already", hint="choose another with --name")
    store = config.data_dir / "images"
    show.note(f"unpacking {archive.name}")
    with images.importing(archive, name, store, replace=replace) as (image, layers):
        path = image.config.env.get("PATH", _DEFAULT_PATH)
        programs = images.find_programs(layers, _PROGRAMS, path)
        like = load_catalog()["bash"]
        template = image_template(name, name, env=image.config.env, programs=programs, like=like)
        file = write_template(written_folder(config.data_dir), template, replace=replace)
    if as_json:
        show.as_json({"template": as_mapping(template), "image": dataclasses.asdict(image)})
        return 0
    amount = image.amount
    print(f"{name}: {amount.entries} entries, {show.size(amount.bytes)}")
    show.note(f"the template is {file}; try: capsule run --template {name} 'echo hello' -l bash")
    return 0


def remove_image(name: str, *, as_json: bool) -> int:
    from capsule.providers.local import images

    config = load_config()
    template = _find(_catalog(config), name)
    file = written_folder(config.data_dir) / f"{name}.yaml"
    if not file.is_file():
        raise InvalidError(
            f"template {name} was not imported", hint="only imported ones can be removed"
        )
    with contextlib.suppress(NotFoundError):
        images.remove_image(template.root.removeprefix("image:"), config.data_dir / "images")
    file.unlink()
    if as_json:
        show.as_json({"removed": name})
    else:
        print(name)
    return 0


def _catalog(config: Config) -> Mapping[str, Template]:
    return load_catalog(config.templates_dir, data_dir=config.data_dir)


def _find(catalog: Mapping[str, Template], name: str) -> Template:
    if name not in catalog:
        raise NotFoundError(f"no such template: {name}", hint=f"there is {', '.join(catalog)}")
    return catalog[name]


def _name_of(archive: Path) -> str:
    """alpine-3.20.tar.gz → alpine-3.20"""
    stem = re.sub(r"\.(tar|tgz|tar\.gz)$", "", archive.name.lower())
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._") or "image"
