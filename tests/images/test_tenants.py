"""What tenants build is their own: two may give the same name to different images."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from capsule.errors import ConflictError, ForbiddenError, InvalidError, NotFoundError
from capsule.providers.images import Recipe
from capsule.service.caller import Caller, KeyScope
from capsule.service.template_names import inner, shown
from capsule.service.templates import Built
from capsule.service.tenant_templates import TenantTemplates
from tests.images.conftest import Workshop, context

pytestmark = [pytest.mark.slow]

RUN = frozenset({KeyScope.READ, KeyScope.RUN})
DEFAULT = Caller("default", RUN)


async def build(own: TenantTemplates, who: Caller, name: str, file: str | None) -> Built:
    recipe = Recipe(context(file) if file else None)
    async with aclosing(own.build(who, name, recipe, provider="docker")) as words:
        said = [each async for each in words]
    assert isinstance(said[-1], Built)
    return said[-1]


async def test_two_tenants_build_under_one_name(workshop: Workshop) -> None:
    own, name = TenantTemplates(workshop.templates), workshop.name()
    blue, red = Caller(workshop.name("blue"), RUN), Caller(workshop.name("red"), RUN)
    file = f"FROM scratch\nCOPY Dockerfile /{workshop.mark}"
    first = await build(own, blue, name, f"{file}-blue\n")
    with pytest.raises(NotFoundError, match="does not exist"):
        await own.get(red, name)
    second = await build(own, red, name, f"{file}-red\n")
    assert first.image.id != second.image.id
    assert first.template.name == inner(blue.tenant, name)
    assert shown(first.template.name) == shown(second.template.name) == name
    assert first.template in await own.list(blue) and first.template not in await own.list(red)
    assert first.template not in await own.list(DEFAULT)
    await own.delete(blue, name)
    with pytest.raises(NotFoundError):
        await own.get(blue, name)
    assert await own.get(red, name) == second.template
    await own.delete(red, name)
    assert workshop.image_id(second.image.reference) is None


async def test_what_is_everybodys_is_the_operators_to_change(workshop: Workshop) -> None:
    own, blue = TenantTemplates(workshop.templates), Caller("blue", RUN)
    for who, name, file, kind in (
        (blue, "python", None, ForbiddenError),
        (DEFAULT, "python", None, ForbiddenError),
        (Caller("blue"), "python", None, ForbiddenError),
        (blue, "python", "FROM scratch\n", ConflictError),
        (DEFAULT, "own", "FROM scratch\n", ForbiddenError),
        (Caller(), "tenant-own", "FROM scratch\n", InvalidError),
        (blue, "Own", "FROM scratch\n", InvalidError),
        (blue, "x" * 109, "FROM scratch\n", InvalidError),
    ):
        with pytest.raises(kind):
            await build(own, who, name, file)
    with pytest.raises(ForbiddenError, match="scope admin"):
        await own.delete(blue, "python")
