"""A dockerd killed in the middle of a build: an error at once, and nothing left in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from capsule.catalog import load_catalog
from capsule.config import Config
from capsule.errors import UnavailableError
from capsule.model import Template
from capsule.providers.images import Log, Recipe
from capsule.service import build_slots as module
from capsule.service.templates import Templates
from tests.images.conftest import context
from tests.support import eventually
from tests.support.engine import Engine
from tests.support.images import Images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def _nobody(template: Template) -> list[str]:
    return []


async def test_what_a_killed_engine_leaves_goes_when_it_is_back(
    own_docker: Engine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIDY_AGAIN", 0.5)
    base = await asyncio.to_thread(lambda: Images(own_docker.api).alpine)
    before = nameless(own_docker)
    config = Config(data_dir=data_dir, run_dir=data_dir / "run", docker_host=own_docker.url)
    catalog = await asyncio.to_thread(load_catalog, data_dir=data_dir)
    templates = Templates(config, catalog, _nobody)
    templates.start()
    recipe = Recipe(context(f"FROM {base}\nRUN echo one > /one\nRUN echo going; sleep 600\n"))
    try:
        with pytest.raises(UnavailableError):
            async for said in templates.build("mine", recipe, provider="docker"):
                if isinstance(said, Log) and "going" in said.text:
                    await asyncio.to_thread(own_docker.kill)
        assert len(list((data_dir / "builds").iterdir())) == 1  # it remembers
        await asyncio.to_thread(own_docker.start)
        await eventually(
            lambda: not any((data_dir / "builds").iterdir()), what="it is cleared up", within=30
        )
        assert own_docker.api.containers() == []
        assert nameless(own_docker) == before
        await asyncio.wait_for(rebuilt(templates, base), 60)
    finally:
        await templates.aclose()


async def rebuilt(templates: Templates, base: str) -> None:
    async for _ in templates.build("mine", Recipe(context(f"FROM {base}\n")), provider="docker"):
        pass


def nameless(engine: Engine) -> list[str]:
    listed = engine.api.get("/images/json", all=1)
    return [each["Id"] for each in listed if each["RepoTags"] in (None, [], ["<none>:<none>"])]
