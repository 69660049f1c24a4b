"""Images from Dockerfiles, by a real Engine: they work, they fail well, they leave nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from pathlib import Path

import pytest

from capsule.catalog import load_catalog, shipped
from capsule.errors import (
    CapacityError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from capsule.model import Template
from capsule.providers.docker.images import DockerImages, ImageSettings
from capsule.providers.docker.leftovers import CONTAINER, IMAGE, Ledger
from capsule.providers.images import Log, Recipe, Step
from capsule.service.templates import Templates
from tests.images.conftest import Workshop, context
from tests.support.images import Images

pytestmark = [pytest.mark.slow]


async def test_a_dockerfile_becomes_a_template(workshop: Workshop, images: Images) -> None:
    name = workshop.name()
    dockerfile = f"FROM {images.python}\nRUN echo MARK > /made\nENV GREETING=hello\n"
    said, built = await workshop.build(name, dockerfile)
    assert [each.text for each in said if isinstance(each, Step)][:2] == [
        f"FROM {images.python}",
        f"RUN echo {workshop.mark} > /made",
    ]
    template = built.template
    assert template.image == built.image.reference == f"capsule/{name}:latest"
    assert template.root == f"image:{name}"
    assert template.default_language == "python"
    assert {"python", "bash"} <= set(template.languages)
    assert template.env["GREETING"] == "hello"
    assert template.env["HOME"] == "/workspace"
    # Another process sees it as well.
    assert (await workshop.catalog())[name] == template


async def test_building_again_replaces_the_image_and_keeps_what_was_set(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    _, first = await workshop.build(name, f"FROM {images.python}\nRUN echo MARK 1 > /made\n")
    edited = dataclasses.replace(first.template, ttl=77.0)
    await asyncio.to_thread((await workshop.catalog()).add, edited, replace=True)
    _, second = await workshop.build(name, f"FROM {images.python}\nRUN echo MARK 2 > /made\n")
    assert second.image.id != first.image.id
    assert second.template.ttl == 77.0
    assert workshop.left_images() == []


async def test_the_stages_of_a_build_do_not_stay(workshop: Workshop, images: Images) -> None:
    dockerfile = (
        f"FROM {images.python} AS first\nRUN echo MARK > /made\n"
        f"FROM {images.alpine}\nCOPY --from=first /made /copied\nRUN echo MARK\n"
    )
    said, built = await workshop.build(workshop.name(), dockerfile)
    assert Log(f"{workshop.mark}\n") in said
    assert built.template.default_language == "sh"
    assert workshop.left_images() == []


async def test_an_image_without_any_interpreter_is_a_template_too(workshop: Workshop) -> None:
    _, built = await workshop.build(workshop.name(), "FROM scratch\nCOPY Dockerfile /MARK\n")
    assert built.template.languages == {} and built.template.default_language == ""
    assert (await workshop.catalog())[built.template.name] == built.template


async def test_a_failing_step_is_told_with_its_output(workshop: Workshop, images: Images) -> None:
    dockerfile = f"FROM {images.python}\nRUN echo MARK\nRUN echo to see; echo err >&2; exit 3\n"
    with pytest.raises(InvalidError, match="step 3 of 4 failed") as caught:
        await workshop.build(workshop.name(), dockerfile)
    details = caught.value.details
    assert details["exit_code"] == 3
    assert (details["number"], details["step"]) == (3, "RUN echo to see; echo err >&2; exit 3")
    assert sorted(details["output"].split("\n")) == ["", "err", "to see"]
    assert workshop.left_images() == workshop.left_containers() == []
    assert workshop.name() not in await workshop.catalog()


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FRM x", "unknown instruction: FRM"),
        ("", "cannot be empty"),
        ("FROM scratch\nCOPY nothing /there", "file not found in build context"),
    ],
)
async def test_a_wrong_dockerfile_is_the_senders_fault(
    workshop: Workshop, dockerfile: str, message: str
) -> None:
    with pytest.raises(InvalidError, match=message):
        await workshop.build(workshop.name(), dockerfile)


async def test_a_failed_rebuild_leaves_the_old_image(workshop: Workshop, images: Images) -> None:
    name = workshop.name()
    _, built = await workshop.build(name, f"FROM {images.python}\nRUN echo MARK\n")
    with pytest.raises(InvalidError):
        await workshop.build(name, f"FROM {images.python}\nRUN echo MARK 2\nRUN exit 1\n")
    found = await workshop.templates.images(built.template)
    assert [image.id for image in found] == [built.image.id]


async def test_leaving_cancels_the_build(workshop: Workshop, images: Images) -> None:
    name = workshop.name()
    dockerfile = f"FROM {images.python}\nRUN echo MARK\nRUN echo MARK going; sleep 600\n"
    recipe = Recipe(context(dockerfile.replace("MARK", workshop.mark)))
    async with aclosing(workshop.templates.build(name, recipe, provider="docker")) as words:
        async for said in words:
            if isinstance(said, Log) and "going" in said.text:
                break
        assert len(workshop.left_containers()) == 1  # it runs
    assert workshop.left_containers() == workshop.left_images() == []
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n")  # its place is free


async def test_a_build_that_takes_too_long_is_cancelled(workshop: Workshop, images: Images) -> None:
    config = dataclasses.replace(workshop.config, build_timeout=3.0)
    templates = Templates(config, await workshop.catalog(), _nobody)
    recipe = Recipe(context(f"FROM {images.python}\nRUN echo {workshop.mark}; sleep 600\n"))
    try:
        with pytest.raises(UnavailableError, match="took too long"):
            async for _ in templates.build(workshop.name(), recipe):
                pass
    finally:
        await templates.aclose()
    assert workshop.left_containers() == []


async def test_builds_are_counted(workshop: Workshop, images: Images) -> None:
    slow = f"FROM {images.python}\nRUN echo {workshop.mark} going; sleep 600\n"
    first = workshop.templates.build(workshop.name("a"), Recipe(context(slow)))
    second = workshop.templates.build(workshop.name("b"), Recipe(context(slow)))
    async with aclosing(first), aclosing(second):
        for each in (first, second):
            assert isinstance(await anext(each), Step)
        with pytest.raises(CapacityError, match="limit 2") as caught:
            await workshop.build(workshop.name("c"), "FROM scratch\n")
        assert caught.value.retry_after > 0
        with pytest.raises(ConflictError, match="is being built"):
            await workshop.build(workshop.name("a"), "FROM scratch\n")


async def test_what_a_program_prints_is_not_believed(workshop: Workshop, images: Images) -> None:
    """A step that claims to be the builder makes us remove nothing."""
    victim = workshop.api.run(images.alpine, "sleep", "600")
    try:
        _, built = await workshop.build(
            workshop.name("v"), f"FROM {images.alpine}\nRUN echo MARK\n"
        )
        parent = workshop.api.get(f"/images/{built.image.id}/json")["Parent"]
        lies = [f" ---> Running in {victim[:12]}", f" ---> {parent[7:19]}", "Step 1/1 : FROM x"]
        script = "; ".join(f"echo '{lie}'" for lie in lies)
        with pytest.raises(InvalidError):
            await workshop.build(
                workshop.name(), f"FROM {images.alpine}\nRUN echo MARK {script}; {script}; exit 1\n"
            )
        assert workshop.api.get(f"/containers/{victim}/json")["State"]["Running"]
        assert workshop.image_id(built.image.reference) == built.image.id
        assert workshop.image_id(parent) == parent
    finally:
        workshop.api.remove(victim)


async def test_what_a_killed_build_left_is_removed_by_the_next(
    workshop: Workshop, images: Images
) -> None:
    """As if the server had been killed with -9: the ledger is there, and nobody holds it."""
    container = _stopped(workshop, images)
    made = workshop.api.call("POST", "/commit", {}, container=container)["Id"]
    folder = workshop.config.data_dir / "builds"
    ledger = await asyncio.to_thread(Ledger.begin, folder)
    for kind, id in ((IMAGE, made.removeprefix("sha256:")), (CONTAINER, container)):
        await asyncio.to_thread(ledger.note, kind, id)
    ledger.close(keep=True)
    assert workshop.left_images() == [made]
    await workshop.build(workshop.name(), f"FROM {images.alpine}\nRUN echo MARK next\n")
    assert workshop.left_images() == workshop.left_containers() == []
    assert list(folder.iterdir()) == []


def _stopped(workshop: Workshop, images: Images) -> str:
    made = workshop.api.run(images.alpine, "echo", workshop.mark)
    workshop.api.call("POST", f"/containers/{made}/wait")
    return made


@pytest.mark.parametrize("name", sorted(shipped()))
async def test_the_dockerfiles_that_come_along_build(
    workshop: Workshop, images: Images, name: str
) -> None:
    base = {"node": images.node, "go": images.go}.get(name, images.python)
    if name == "datascience":
        _, made = await workshop.build(
            workshop.name("base"),
            f"FROM {images.python}\nRUN cd /usr/lib/python3/dist-packages"
            " && for m in numpy pandas matplotlib sklearn; do mkdir $m; touch $m/__init__.py; done"
            " && touch matplotlib/pyplot.py && echo MARK\n",
        )
        base = made.image.reference
    config = dataclasses.replace(
        workshop.config, docker_image=f"capsule/{{template}}:{workshop.mark}"
    )
    templates = Templates(config, await workshop.catalog(), _nobody)
    try:
        *_, built = [
            each
            async for each in templates.build(name, Recipe(args={"BASE": base}), provider="docker")
        ]
        assert not isinstance(built, Step)
        image = f"capsule/{name}:{workshop.mark}"
        checks = (
            "test -d /workspace && grep -q '^[^:]*:[^:]*:1000:' /etc/passwd"
            " && test $(stat -c %u /workspace) = 1000"
        )
        container = workshop.api.run(image, "sh", "-c", f"{checks} && sleep 600", User="1000")
        try:
            ran = workshop.api.exec(container, "sh", "-c", f"{checks} && id -un && cat /etc/passwd")
            assert ran.exit_code == 0, ran.output
        finally:
            workshop.api.remove(container)
        await templates.delete(name)
        assert workshop.image_id(image) is None
        with pytest.raises(InvalidError, match="no image that was built here"):
            await templates.delete(name)
    finally:
        await templates.aclose()


async def _nobody(template: Template) -> list[str]:
    return []


async def test_with_pulls_off_a_missing_base_is_refused_at_once(
    workshop: Workshop, data_dir: Path
) -> None:
    settings = ImageSettings(data_dir=data_dir, host=workshop.api.url, pull="never")
    engine = DockerImages(settings)
    try:
        with pytest.raises(NotFoundError, match="nowhere/at-all:1 is not there, and pulls are off"):
            await anext(engine.build(Template("x"), Recipe(context("FROM nowhere/at-all:1\n"))))
    finally:
        await engine.aclose()


async def test_a_template_in_use_is_not_removed(workshop: Workshop, images: Images) -> None:
    name = workshop.name()
    _, built = await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n")
    workshop.users.append("box1")
    with pytest.raises(ConflictError, match=f"{name} is in use by sandbox box1") as caught:
        await workshop.templates.delete(name)
    assert caught.value.details["sandbox_ids"] == ["box1"]
    assert await workshop.templates.get(name) == built.template
    workshop.users.clear()
    await workshop.templates.delete(name)
    with pytest.raises(NotFoundError):
        await workshop.templates.get(name)
    assert workshop.image_id(built.image.reference) is None


async def test_an_image_that_somebody_elses_container_needs_stays(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    _, built = await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n")
    container = workshop.api.run(built.image.reference, "sleep", "600")
    try:
        with pytest.raises(ConflictError, match="is in use"):
            await workshop.templates.delete(name)
        assert await workshop.templates.get(name) == built.template
    finally:
        workshop.api.remove(container)


async def test_somebody_elses_image_is_never_removed(workshop: Workshop, images: Images) -> None:
    """A template that is not made here may start from any image."""
    folder = workshop.config.data_dir / "own"
    folder.mkdir()
    text = f"image: {images.alpine}\nlanguages: {{}}\n"
    await asyncio.to_thread((folder / "mine.yaml").write_text, text)
    catalog = await asyncio.to_thread(load_catalog, folder, data_dir=workshop.config.data_dir)
    templates = Templates(workshop.config, catalog, _nobody)
    try:
        with pytest.raises(InvalidError, match="is folder, and has no image that was built here"):
            await templates.delete("mine")
        with pytest.raises(InvalidError, match="which is not built here"):
            await anext(templates.build("mine", Recipe(context("FROM scratch\n"))))
    finally:
        await templates.aclose()
    assert workshop.image_id(images.alpine) is not None


async def test_an_image_of_the_store_is_not_replaced_under_a_sandbox(
    workshop: Workshop, images: Images
) -> None:
    name = workshop.name()
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK\n", provider="local")
    workshop.users.append("box1")
    with pytest.raises(ConflictError, match="in use by sandbox box1"):
        await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK 2\n", provider="local")
    # The Engine keeps the old one for whoever runs from it.
    await workshop.build(name, f"FROM {images.alpine}\nRUN echo MARK 2\n", provider="docker")
    workshop.users.clear()


async def test_a_server_may_refuse_to_build(workshop: Workshop) -> None:
    config = dataclasses.replace(workshop.config, max_builds=0)
    templates = Templates(config, await workshop.catalog(), _nobody)
    with pytest.raises(ForbiddenError, match="builds no images"):
        await anext(templates.build("mine", Recipe(context("FROM scratch\n"))))
    await templates.aclose()
