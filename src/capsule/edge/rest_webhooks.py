"""REST under `/v1`: webhooks.

POST   /v1/webhooks               {"url", "events", "secret"}: the answer has the secret, once
GET    /v1/webhooks
GET    /v1/webhooks/{webhook_id}
DELETE /v1/webhooks/{webhook_id}  with its deliveries
GET    …/deliveries               the newest first, with their attempts; ?limit=
POST   …/deliveries/{delivery_id}/redeliver
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capsule.edge import views as v
from capsule.edge.body import read_json
from capsule.edge.identity import caller_of
from capsule.edge.routing import Described, Route, describe, reply
from capsule.edge.shapes import Nothing, checked
from capsule.edge.webhooks import (
    CreateWebhook,
    DeliveriesView,
    DeliveryView,
    ListDeliveries,
    OfDelivery,
    OfWebhook,
    WebhooksView,
    WebhookVerbs,
    WebhookView,
)


def webhook_routes(verbs: WebhookVerbs, types: Described) -> APIRouter:
    router = APIRouter(prefix="/v1/webhooks", route_class=Route, tags=["webhooks"])

    @router.post("", **describe(types, body=CreateWebhook, returns=WebhookView, status=201))
    async def create(request: Request) -> Response:
        """Be told what happens. Its secret is in this answer, and can never be read again."""
        body = await read_json(request, CreateWebhook)
        return reply(await verbs.create(caller_of(request.scope), body), 201)

    @router.get("", **describe(types, returns=WebhooksView))
    async def list_webhooks(request: Request) -> Response:
        """All webhooks, oldest first; without their secrets."""
        return reply(await verbs.list(caller_of(request.scope), Nothing()))

    @router.get("/{webhook_id}", **describe(types, returns=WebhookView))
    async def get(request: Request, webhook_id: str) -> Response:
        """One webhook."""
        asked = checked(OfWebhook(webhook_id=webhook_id))
        return reply(await verbs.get(caller_of(request.scope), asked))

    @router.delete("/{webhook_id}", **describe(types, returns=v.DeletedView))
    async def delete(request: Request, webhook_id: str) -> Response:
        """Tell it no more, and forget its deliveries."""
        asked = checked(OfWebhook(webhook_id=webhook_id))
        return reply(await verbs.delete(caller_of(request.scope), asked))

    @router.get("/{webhook_id}/deliveries", **describe(types, returns=DeliveriesView))
    async def deliveries(request: Request, webhook_id: str, limit: int = 100) -> Response:
        """What it was told, or is to be told, the newest first."""
        asked = checked(ListDeliveries(webhook_id=webhook_id, limit=limit))
        return reply(await verbs.deliveries(caller_of(request.scope), asked))

    @router.post(
        "/{webhook_id}/deliveries/{delivery_id}/redeliver",
        **describe(types, returns=DeliveryView),
    )
    async def redeliver(request: Request, webhook_id: str, delivery_id: str) -> Response:
        """Send it again, under the same id."""
        asked = checked(OfDelivery(webhook_id=webhook_id, delivery_id=delivery_id))
        return reply(await verbs.redeliver(caller_of(request.scope), asked))

    return router
