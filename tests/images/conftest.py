"""Templates over a real Engine, with a data directory of their own."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from capsule.catalog import Catalog, load_catalog
from capsule.config import Config
from capsule.model import Template
from capsule.providers.images import Progress, Recipe
from capsule.service.templates import Built, Templates
from tests.support import eventually
from tests.support.engine import EngineApi, EngineError


def context(dockerfile: str, **files: str) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in {"Dockerfile": dockerfile, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    out.seek(0)
    return out


@dataclass
class Workshop:
    """Builds, and knows what is left of them in an Engine that others use at the same time."""

    api: EngineApi
    config: Config
    templates: Templates
    users: list[str] = field(default_factory=list)  # sandboxes that run from whatever is asked for
    mark: str = field(default_factory=lambda: f"mark{secrets.token_hex(6)}")

    def name(self, word: str = "t") -> str:
        """Nobody else has it."""
        return f"{word}-{self.mark}"

    async def build(
        self, name: str, dockerfile: str, *, provider: str = "docker", **options: Any
    ) -> tuple[list[Progress], Built]:
        recipe = Recipe(context(dockerfile.replace("MARK", self.mark)), **options)
        async with aclosing(self.templates.build(name, recipe, provider=provider)) as words:
            said: list[Any] = [each async for each in words]
        return said[:-1], said[-1]

    async def catalog(self) -> Catalog:
        """As another process would read it."""
        return await asyncio.to_thread(load_catalog, data_dir=self.config.data_dir)

    def image_id(self, name: str) -> str | None:
        try:
            return str(self.api.get(f"/images/{name}/json")["Id"])
        except EngineError:
            return None

    def left_images(self) -> list[str]:
        """Images with our mark that have no name, and are no part of one that has."""
        every = {each["Id"]: each for each in self.api.get("/images/json", all=1)}
        parents = {each["ParentId"] for each in every.values()}
        nameless = [id for id, each in every.items() if _nameless(each) and id not in parents]
        return [id for id in nameless if self.mark in self._history(id)]

    def left_containers(self) -> list[str]:
        return [each["Id"] for each in self.api.containers() if self.mark in json.dumps(each)]

    def _history(self, id: str) -> str:
        try:
            return json.dumps(self.api.get(f"/images/{id}/history"))
        except EngineError:
            return ""  # somebody removed it meanwhile


def _nameless(image: dict[str, Any]) -> bool:
    return not [tag for tag in image["RepoTags"] or () if tag != "<none>:<none>"]


@pytest.fixture
def data_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ci-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def workshop(engine: EngineApi, data_dir: Path) -> AsyncIterator[Workshop]:
    config = Config(data_dir=data_dir, run_dir=data_dir / "run", docker_host=engine.url)
    users: list[str] = []

    async def used_by(template: Template) -> Sequence[str]:
        return users

    catalog = await asyncio.to_thread(load_catalog, data_dir=data_dir)
    templates = Templates(config, catalog, used_by)
    made = Workshop(engine, config, templates, users)
    yield made
    await templates.aclose()
    for image in engine.get("/images/json"):
        for tag in image["RepoTags"] or ():
            if made.mark in tag:
                engine.call("DELETE", f"/images/{tag}", force=1)
    # What was left in its first moments the Engine clears away by itself, in its own time.
    await eventually(lambda: not made.left_containers(), what="no container is left")
    assert made.left_images() == []
    assert list((data_dir / "builds").glob("*")) == []


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest) -> None:
    """A build makes containers, and other tests make theirs at the same time."""
    request.node.add_marker(pytest.mark.timeout(90))
