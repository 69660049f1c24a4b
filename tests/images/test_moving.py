"""Images between the Engine and the local store, and the templates that go with them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from capsule.errors import ConflictError
from capsule.providers.local import images as store
from capsule.providers.local.export import export_image
from capsule.providers.local.unpack import is_opaque
from tests.images.conftest import Workshop
from tests.support.images import Images

pytestmark = [pytest.mark.slow]

DOCKERFILE = """\
FROM {base}
RUN echo first > /kept && mkdir -p /gone/deep /full && touch /gone/deep/file && echo MARK > /full/a
RUN rm -r /gone && rm /full/a && cd /full && echo second > b && ln -s b link && ln b hard
RUN rm -r /full && mkdir /full && echo third > /full/c && chmod 640 /full/c
ENV GREETING=hello
"""


async def exported(workshop: Workshop, name: str, provider: str) -> Path:
    path = workshop.config.data_dir / f"{name}-{provider}.tar"
    with path.open("xb") as file:
        await workshop.templates.save(name, file, provider=provider)
    return path


def tree(name: str, folder: Path) -> dict[str, str]:
    """What an image's layers are when they are merged: each path and what is there."""
    layers = store.layers(name, folder)  # the top first
    found: dict[str, str] = {}
    hidden: set[str] = set()
    for layer in layers:
        below: set[str] = set()
        for at, folders, files in os.walk(layer):
            for name in (*folders, *files):
                path = Path(at, name)
                key = str(path.relative_to(layer))
                if key in found or any(f"{key}/".startswith(f"{h}/") for h in hidden):
                    continue
                mode = path.lstat().st_mode
                if stat.S_ISCHR(mode):
                    below.add(key)
                elif stat.S_ISLNK(mode):
                    found[key] = f"-> {os.readlink(path)}"
                elif stat.S_ISDIR(mode):
                    found[key] = "dir"
                    if is_opaque(path):
                        below.add(key)
                else:
                    found[key] = f"{stat.S_IMODE(mode):o} {path.read_bytes()[:40]!r}"
        hidden |= below
    return found


async def test_an_image_moves_to_the_local_store_and_back(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    _, built = await workshop.build(name, DOCKERFILE.replace("{base}", images.alpine))
    archive = await exported(workshop, name, "docker")
    moved = await workshop.templates.load(name, archive, provider="local")
    assert moved.template.image == built.template.image  # it is in both places now
    data = workshop.config.data_dir / "images"
    merged = await asyncio.to_thread(tree, name, data)
    assert merged["kept"] == "644 b'first\\n'"
    assert "gone" not in merged and "full/a" not in merged and "full/b" not in merged
    assert merged["full/c"] == "640 b'third\\n'"
    # Back again, under another name, and into the Engine.
    back = await exported(workshop, name, "local")
    other = workshop.name("back")
    again = await workshop.templates.load(other, back, provider="docker")
    assert again.template.default_language == built.template.default_language
    assert again.template.env["GREETING"] == "hello"
    container = workshop.api.run(again.image.reference, "sh", "-c", "sleep 600")
    try:
        ran = workshop.api.exec(container, "sh", "-c", "cat /kept /full/c; ls -d /gone /full/a")
        assert "first\nthird\n" in ran.output and ran.exit_code != 0
    finally:
        workshop.api.remove(container)
    # And the store's own archive gives the same image in the store.
    third = workshop.name("third")
    await workshop.templates.load(third, back, provider="local")
    assert await asyncio.to_thread(tree, third, data) == merged


async def test_a_build_for_the_local_provider_ends_in_its_store(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    dockerfile = f"FROM {images.alpine}\nRUN echo MARK > /made\n"
    await workshop.build(name, dockerfile, provider="local")
    found = await workshop.templates.images(await workshop.templates.get(name))
    assert {image.provider for image in found} == {"docker", "local"}
    folder = workshop.config.data_dir / "images"
    merged = await asyncio.to_thread(tree, name, folder)
    assert merged["made"] == f"644 {(workshop.mark + chr(10)).encode()!r}"
    await workshop.templates.delete(name)
    assert workshop.image_id(f"capsule/{name}:latest") is None
    assert await asyncio.to_thread(store.list_images, folder) == []


async def test_the_name_in_an_archive_does_not_matter(workshop: Workshop, images: Images) -> None:
    """An archive that says it is somebody else's image replaces nothing of theirs."""
    name, victim = workshop.name(), workshop.name("victim")
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK 1\n")
    _, built = await workshop.build(victim, f"FROM {images.alpine}\nRUN echo MARK 2\n")
    archive = await exported(workshop, name, "docker")
    lying = workshop.config.data_dir / "lying.tar"
    await asyncio.to_thread(rename, archive, lying, f"capsule/{victim}:latest")
    taken = workshop.name("taken")
    await workshop.templates.load(taken, lying, provider="docker")
    assert workshop.image_id(f"capsule/{victim}:latest") == built.image.id
    assert workshop.image_id(f"capsule/{taken}:latest") is not None


def rename(source: Path, target: Path, tag: str) -> None:
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            content = old.extractfile(member)
            data = content.read() if content else b""
            if member.name == "repositories":
                continue
            if member.name == "manifest.json":
                described = json.loads(data)
                described[0]["RepoTags"] = [tag]
                data = json.dumps(described).encode()
            member.size = len(data) if member.isreg() else 0
            new.addfile(member, io.BytesIO(data) if member.isreg() else None)


async def test_what_exists_is_replaced_only_when_asked_and_unused(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n")
    archive = await exported(workshop, name, "docker")
    for provider in ("docker", "local"):
        if provider == "local":
            await workshop.templates.load(name, archive, provider=provider)
        with pytest.raises(ConflictError, match="exists already"):
            await workshop.templates.load(name, archive, provider=provider)
        workshop.users.append("box1")
        with pytest.raises(ConflictError, match="in use by sandbox box1"):
            await workshop.templates.load(name, archive, provider=provider, replace=True)
        workshop.users.clear()
        await workshop.templates.load(name, archive, provider=provider, replace=True)


async def test_a_built_in_template_takes_its_image_from_an_import(
    workshop: Workshop, images: Images
) -> None:
    """`datascience` has its place in the store; `python` starts from the host there."""
    name = workshop.name()
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n")
    archive = await exported(workshop, name, "docker")
    before = await workshop.templates.get("datascience")
    loaded = await workshop.templates.load("datascience", archive, provider="local")
    assert loaded.template == before
    with pytest.raises(ConflictError, match="starts from host"):
        await workshop.templates.load("python", archive, provider="local")
    await workshop.templates.delete("datascience")
    assert await workshop.templates.get("datascience") == before


def test_an_export_holds_the_store_still(tmp_path: Path) -> None:
    """A removal waits for it: no layer goes while it is read."""
    root = tmp_path / "root.tar"
    with tarfile.open(root, "w") as tar:
        entry = tarfile.TarInfo("file")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"hello"))
    with store.importing(root, "mine", tmp_path / "store"):
        pass
    out = io.BytesIO()
    export_image("mine", tmp_path / "store", out, "capsule/mine:latest")
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        names = tar.getnames()
        described = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
    assert described[0]["RepoTags"] == ["capsule/mine:latest"]
    assert {*described[0]["Layers"], described[0]["Config"]} < set(names)
    with store.importing(_file(tmp_path, out.getvalue()), "again", tmp_path / "store"):
        pass
    assert tree("again", tmp_path / "store") == {"file": "644 b'hello'"}


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "again.tar"
    path.write_bytes(data)
    return path
