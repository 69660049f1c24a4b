"""A template's name as E2B has it, `name` or `name:tag`, and what Capsule's catalog calls it: there
a tag stands behind two underscores, and `default` is left out. What is built has a name of its own,
from which the id of its build is made: tags are names for it.
"""

from __future__ import annotations

import re
import secrets
import uuid
from typing import NamedTuple

from capsule.edge.errors import invalid_field
from capsule.model import Template

DEFAULT = "default"
_BETWEEN = "__"
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*", re.ASCII)
MOST_NAME, MOST_TAG = 64, 40  # together what the catalog takes of a tenant
_BUILD = uuid.UUID("0c2c5a0e-7a8e-4d0b-9a53-1f1d5a3f2b60")


class Tagged(NamedTuple):
    name: str
    tag: str = DEFAULT

    @property
    def kept(self) -> str:
        """What the catalog calls it."""
        return self.name if self.tag == DEFAULT else f"{self.name}{_BETWEEN}{self.tag}"

    def __str__(self) -> str:
        return self.name if self.tag == DEFAULT else f"{self.name}:{self.tag}"


def tagged(text: str, field: str = "name") -> Tagged:
    """Raises InvalidError."""
    team, slash, rest = text.rpartition("/")
    name, colon, tag = rest.partition(":")
    if slash:
        _checked(team, field, MOST_NAME)
    return Tagged(_checked(name, field, MOST_NAME), _tag(tag, field) if colon else DEFAULT)


def maybe(text: str) -> Tagged:
    """Of a name that may be of any kind."""
    name, _, tag = text.rpartition("/")[2].partition(":")
    return Tagged(name, tag or DEFAULT)


def tags_of(given: list[str]) -> list[str]:
    return [_tag(tag, "tags") for tag in given]


def told(kept: str) -> Tagged:
    name, between, tag = kept.rpartition(_BETWEEN)
    return Tagged(name, tag) if between else Tagged(kept)


def new_build(name: str) -> str:
    """What the catalog calls it while it is built, and the Engine its image."""
    return f"{name}-{secrets.token_hex(4)}"


def build_id(of: str) -> str:
    return str(uuid.uuid5(_BUILD, of))


def build_of(template: Template) -> str:
    """The id of the build that it is from."""
    return build_id(template.root.removeprefix("image:"))


def _tag(text: str, field: str) -> str:
    return _checked(text, field, MOST_TAG)


def _checked(text: str, field: str, most: int) -> str:
    if len(text) > most or not _NAME.fullmatch(text):
        raise invalid_field(
            field,
            f"{text[:60]!r} cannot be one, allowed: up to {most} lower-case letters and digits,"
            " with single '.', '_' or '-' between them",
        )
    return text
