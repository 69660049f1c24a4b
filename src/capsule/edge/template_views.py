"""Templates and their images, as clients get them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from capsule.edge.views import View
from capsule.model import Limits, Template
from capsule.service import Image
from capsule.service.template_names import shown


class TemplateView(View, frozen=True, kw_only=True):
    name: str
    description: str
    languages: list[str]
    default_language: str
    limits: Limits
    network: str
    ttl_ms: int
    origin: str
    root: str
    image: str

    @classmethod
    def of(cls, template: Template, origin: str) -> TemplateView:
        return cls(**_template_fields(template, origin))


def _template_fields(template: Template, origin: str) -> dict[str, Any]:
    return {
        "name": shown(template.name),
        "description": template.description,
        "languages": sorted(template.languages),
        "default_language": template.default_language,
        "limits": template.limits,
        "network": template.network,
        "ttl_ms": round(template.ttl * 1000),
        "origin": origin,
        "root": template.root,
        "image": template.image,
    }


class ImageView(View, frozen=True, kw_only=True):
    provider: str
    reference: str
    id: str
    size: int
    created_at: datetime

    @classmethod
    def of(cls, image: Image) -> ImageView:
        return cls(
            provider=image.provider,
            reference=image.reference,
            id=image.id,
            size=image.size,
            created_at=datetime.fromtimestamp(image.created, UTC),
        )


class TemplateInfoView(TemplateView, frozen=True, kw_only=True):
    images: list[ImageView]

    @classmethod
    def with_images(
        cls, template: Template, origin: str, images: Sequence[Image]
    ) -> TemplateInfoView:
        found = [ImageView.of(image) for image in images]
        return cls(**_template_fields(template, origin), images=found)


class BuiltView(View, frozen=True, kw_only=True):
    template: TemplateView
    image: ImageView
    log: str


class TemplatesView(View, frozen=True, kw_only=True):
    templates: list[TemplateView]
