"""Webhooks, on the server: `client.webhooks`; and how a receiver checks what it gets."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ._drivers import AsyncDriver, SyncDriver
from ._flow import Flow, method
from ._rpc import rpc
from .errors import UnauthenticatedError
from .values import DeliveryInfo, WebhookInfo


def verify_webhook(body: bytes, signature: str, secret: str, *, tolerance: float = 300.0) -> None:
    """Raises UnauthenticatedError unless `body` was signed with `secret`, and lately.

    `signature` is the header `Capsule-Signature`, `body` what came, before anything parsed it.
    """
    parts = dict(part.partition("=")[::2] for part in signature.split(","))
    at, given = parts.get("t", ""), parts.get("v1", "")
    if not (at.isascii() and at.isdigit() and len(at) < 16 and given.isascii()):
        raise UnauthenticatedError(f"no signature of a webhook: {signature[:80]!r}")
    expected = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected, given):
        raise UnauthenticatedError("the signature is not that of this body and this secret")
    if abs(time.time() - int(at)) > tolerance:
        raise UnauthenticatedError(f"signed more than {tolerance:g} seconds ago, or in the future")


class WebhookMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def create(
        self, url: str, *, events: Sequence[str] = (), secret: str | None = None
    ) -> Flow[WebhookInfo]:
        """Be told what happens to sandboxes; of everything if no events are named. `secret`, in the
        answer to this alone, is what `verify_webhook` needs."""
        params = {"url": url, "events": list(events), "secret": secret}
        return WebhookInfo.from_json((yield from self._ask("create", params, repeatable=False)))

    @method
    def get(self, webhook_id: str) -> Flow[WebhookInfo]:
        """One webhook."""
        params = {"webhook_id": webhook_id}
        return WebhookInfo.from_json((yield from self._ask("get", params)))

    @method
    def delete(self, webhook_id: str) -> Flow[None]:
        """Tell it no more, and forget its deliveries."""
        yield from self._ask("delete", {"webhook_id": webhook_id}, repeatable=False)

    @method
    def deliveries(self, webhook_id: str, *, limit: int = 100) -> Flow[list[DeliveryInfo]]:
        """What it was told or is to be told, the newest first."""
        body = yield from self._ask("deliveries", {"webhook_id": webhook_id, "limit": limit})
        return [DeliveryInfo.from_json(each) for each in body["deliveries"]]

    @method
    def redeliver(self, webhook_id: str, delivery_id: str) -> Flow[DeliveryInfo]:
        """Send it again, under the same id."""
        params = {"webhook_id": webhook_id, "delivery_id": delivery_id}
        return DeliveryInfo.from_json((yield from self._ask("redeliver", params)))

    @method
    def list(self) -> Flow[list[WebhookInfo]]:
        """All webhooks, oldest first."""
        body = yield from self._ask("list", {})
        return [WebhookInfo.from_json(each) for each in body["webhooks"]]

    def _ask(self, name: str, params: Mapping[str, Any], *, repeatable: bool = True) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"webhook.v1.{name}", params, retries=retries, repeatable=repeatable)


class Webhooks(WebhookMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver


class AsyncWebhooks(WebhookMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
