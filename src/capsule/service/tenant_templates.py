"""Templates as a tenant sees them: everybody's, and those that it has built itself.

What the operator has (built in, in the configured folder, made by the default tenant or on the
command line) is everybody's to use, and takes the scope `admin` to change. What another tenant
builds is its own. In the catalog, and so in images and files, it has a name that says whose it is;
the tenant itself never sees that name.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from capsule.errors import ConflictError, ForbiddenError, InvalidError
from capsule.model import Template
from capsule.providers.images import Recipe
from capsule.service.caller import DEFAULT_TENANT, Caller, KeyScope
from capsule.service.template_names import RESERVED, inner, no_template, resolve, visible
from capsule.service.templates import Said, Templates
from capsule.settings import brief

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,107}", re.ASCII)  # with what comes before, at most 128


class TenantTemplates:
    def __init__(self, templates: Templates) -> None:
        self._templates = templates

    async def list(self, caller: Caller) -> list[Template]:
        return visible(await self._templates.fresh(), caller.tenant)

    async def get(self, caller: Caller, name: str) -> Template:
        """Raises NotFoundError."""
        catalog = await self._templates.fresh()
        found = resolve(catalog, name, caller.tenant)
        if found is None:
            raise no_template(catalog, name, caller.tenant, "name")
        return found

    async def delete(self, caller: Caller, name: str) -> None:
        """As `Templates.delete`; raises ForbiddenError for one that is everybody's."""
        template = await self.get(caller, name)
        if not template.name.startswith(RESERVED):
            _check_operator(caller, name)
        await self._templates.delete(template.name)

    async def build(
        self, caller: Caller, name: str, recipe: Recipe, *, provider: str | None = None
    ) -> AsyncGenerator[Said, None]:
        """As `Templates.build`."""
        await self._check_name(caller, name, own=recipe.context is not None)
        words = self._templates.build(inner(caller.tenant, name), recipe, provider=provider)
        async with aclosing(words):
            async for said in words:
                yield said

    async def _check_name(self, caller: Caller, name: str, *, own: bool) -> None:
        if caller.tenant == DEFAULT_TENANT:
            if name.startswith(RESERVED):
                raise InvalidError(
                    f"name: {brief(name)} begins with {RESERVED!r}, which is for tenants",
                    hint="choose another name",
                    field="name",
                )
            _check_operator(caller, name)
            return
        if not own:
            _check_operator(caller, name)
        if name in await self._templates.fresh():
            raise ConflictError(f"template {name} is everybody's", hint="choose another name")
        if not _NAME.fullmatch(name):
            raise InvalidError(
                f"name: {brief(name)} is no name of a template, allowed: 1 to 44 lower-case "
                "letters, digits, '.', '_', '-'",
                field="name",
            )


def _check_operator(caller: Caller, name: str) -> None:
    caller.require(KeyScope.ADMIN, f"to change template {name}, which is everybody's,")
    if caller.tenant != DEFAULT_TENANT:
        raise ForbiddenError(
            f"template {name} is everybody's, and belongs to tenant {DEFAULT_TENANT}",
            hint=f"act for it: X-Capsule-Tenant: {DEFAULT_TENANT}",
        )
