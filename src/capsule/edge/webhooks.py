"""What a client can do with webhooks, once for JSON-RPC and REST."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta, field

from capsule.edge import views as v
from capsule.edge.drain import Gate
from capsule.edge.shapes import Nothing, Shape, Word
from capsule.edge.views import View
from capsule.service.caller import Caller
from capsule.webhooks.hooks import Webhooks
from capsule.webhooks.records import Attempt, Delivery, Webhook


class CreateWebhook(Shape, kw_only=True, frozen=True):
    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    events: Annotated[list[str], Meta(max_length=32)] = field(default_factory=list)
    secret: Annotated[str, Meta(min_length=16, max_length=256)] | None = None


class OfWebhook(Shape, kw_only=True, frozen=True):
    webhook_id: Word


class ListDeliveries(Shape, kw_only=True, frozen=True):
    webhook_id: Word
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class OfDelivery(Shape, kw_only=True, frozen=True):
    webhook_id: Word
    delivery_id: Word


class WebhookView(View, frozen=True, kw_only=True):
    webhook_id: str
    url: str
    events: list[str]
    created_at: datetime
    secret: str | None = None

    @classmethod
    def of(cls, hook: Webhook, *, secret: bool = False) -> WebhookView:
        return cls(
            webhook_id=hook.id,
            url=hook.url,
            events=list(hook.events),
            created_at=_time(hook.created),
            secret=hook.secret if secret else None,
        )


class WebhooksView(View, frozen=True, kw_only=True):
    webhooks: list[WebhookView]


class AttemptView(View, frozen=True, kw_only=True):
    at: datetime
    duration_ms: float
    status: int | None
    error: str

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptView:
        return cls(
            at=_time(attempt.at),
            duration_ms=attempt.ms,
            status=attempt.status,
            error=attempt.error,
        )


class DeliveryView(View, frozen=True, kw_only=True):
    delivery_id: str
    event: str
    created_at: datetime
    state: str
    attempts: list[AttemptView]
    next_at: datetime | None
    body: str

    @classmethod
    def of(cls, delivery: Delivery) -> DeliveryView:
        waits = delivery.state == "pending" and delivery.due > 0
        return cls(
            delivery_id=delivery.id,
            event=delivery.event,
            created_at=_time(delivery.created),
            state=str(delivery.state),
            attempts=[AttemptView.of(attempt) for attempt in delivery.attempts],
            next_at=_time(delivery.due) if waits else None,
            body=delivery.body.decode(),
        )


class DeliveriesView(View, frozen=True, kw_only=True):
    deliveries: list[DeliveryView]


class WebhookVerbs:
    def __init__(self, webhooks: Webhooks, gate: Gate) -> None:
        self._webhooks = webhooks
        self._gate = gate

    async def create(self, caller: Caller, p: CreateWebhook) -> WebhookView:
        self._gate.admit()
        made = await self._webhooks.create(caller.tenant, p.url, events=p.events, secret=p.secret)
        return WebhookView.of(made, secret=True)

    async def list(self, caller: Caller, p: Nothing) -> WebhooksView:
        found = self._webhooks.list(caller.tenant)
        return WebhooksView(webhooks=[WebhookView.of(hook) for hook in found])

    async def get(self, caller: Caller, p: OfWebhook) -> WebhookView:
        return WebhookView.of(self._webhooks.find(caller.tenant, p.webhook_id))

    async def delete(self, caller: Caller, p: OfWebhook) -> v.DeletedView:
        await self._webhooks.delete(caller.tenant, p.webhook_id)
        return v.DeletedView()

    async def deliveries(self, caller: Caller, p: ListDeliveries) -> DeliveriesView:
        found = await self._webhooks.deliveries(caller.tenant, p.webhook_id, p.limit)
        return DeliveriesView(deliveries=[DeliveryView.of(each) for each in found])

    async def redeliver(self, caller: Caller, p: OfDelivery) -> DeliveryView:
        self._gate.admit()
        return DeliveryView.of(
            await self._webhooks.redeliver(caller.tenant, p.webhook_id, p.delivery_id)
        )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
