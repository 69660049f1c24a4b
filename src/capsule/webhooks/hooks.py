"""Tells whoever asked for it what happens to sandboxes: signed, again and again until it was taken.

    Webhooks ─┬─ write     takes in what happened, and writes it down before it is sent
              ├─ deliver   begins what is due, a few at a time
              │    └─ attempt ID   one per request that is out
              └─ tidy      forgets what was settled long ago

A delivery is recorded before its first attempt and until it was answered with 2xx, so it outlives
the server, and comes at least once: a receiver that answers too late gets it again, under the same
id. What happens in the instant in which a server is killed is told to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Self

import httpcore
import msgspec
import structlog

from capsule.config import Config
from capsule.errors import CapacityError, CapsuleError, InvalidError, NotFoundError
from capsule.service import Happening, Kind
from capsule.service.admission import new_id
from capsule.service.happenings import Happenings
from capsule.service.tasks import Tasks
from capsule.webhooks.outbound import Outbound, RefusedTargetError, check_url
from capsule.webhooks.records import Attempt, Book, Delivered, Delivery, Webhook
from capsule.webhooks.signing import signed

log = structlog.get_logger(__name__)

MAX_HOOKS = 20  # of one tenant
MAX_WAITING = 10_000  # deliveries of one webhook
KEPT = 1000  # settled deliveries of one webhook
KEPT_FOR = 7 * 86400.0
TIMEOUT = 10.0
AT_ONCE = 32
AT_ONCE_TENANT = 8  # and who has fewest out comes first: slow receivers are easily had
AT_ONCE_EACH = 4  # of one webhook: a slow receiver must not keep the others waiting
RETRIES = (5.0, 30.0, 120.0, 600.0, 3600.0, 4 * 3600.0, 12 * 3600.0)
TIDY_EVERY = 600.0

Due = tuple[float, int, Delivery]  # when, and in which order


class Webhooks:
    def __init__(self, config: Config, happenings: Happenings) -> None:
        self._private = config.webhook_targets == "any"
        self._happenings = happenings
        self._book = Book(config.data_dir / "webhooks.db")
        self._hooks: dict[str, Webhook] = {}
        self._heard: asyncio.Queue[Delivery] = asyncio.Queue()
        self._due: dict[str, list[Due]] = {}  # a heap for each webhook
        self._order = itertools.count()
        self._waiting: Counter[str] = Counter()  # deliveries by webhook
        self._out: Counter[str] = Counter()  # attempts by webhook
        self._out_of: Counter[str] = Counter()  # and by tenant
        self._moved = asyncio.Event()
        self._outbound = Outbound(private=self._private, timeout=TIMEOUT)
        self._tasks = Tasks()

    async def open(self) -> None:
        await self._book.open()
        self._hooks = {hook.id: hook for hook in await self._book.hooks()}
        for delivery in await self._book.pending():
            self._await_turn(delivery)
        self._happenings.listeners.append(self._hear)
        for work, name in ((self._write(), "write"), (self._deliver(), "deliver")):
            self._tasks.spawn(work, f"webhooks: {name}")
        self._tasks.spawn(self._tidy(), "webhooks: tidy")

    async def aclose(self) -> None:
        """What was not delivered yet is delivered by the next server."""
        with contextlib.suppress(ValueError):
            self._happenings.listeners.remove(self._hear)
        await self._tasks.aclose()
        try:
            await self._take_in()
        except CapsuleError as error:
            log.warning("webhooks not recorded", lost=self._heard.qsize(), reason=error.message)
        await self._outbound.aclose()
        await self._book.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def create(
        self, tenant: str, url: str, *, events: Sequence[str] = (), secret: str | None = None
    ) -> Webhook:
        """Of all events if none is named. Raises InvalidError, CapacityError."""
        known = [str(kind) for kind in Kind]
        for event in events:
            if event not in known:
                named = ", ".join(known)
                raise InvalidError(f"events: {event[:80]!r}, allowed: {named}", field="events")
        if secret is not None and not 16 <= len(secret) <= 256:
            raise InvalidError("secret: must have 16 to 256 characters", field="secret")
        check_url(url, private=self._private)
        have = sum(hook.tenant == tenant for hook in self._hooks.values())
        if have >= MAX_HOOKS:
            raise CapacityError(
                f"there are {have} webhooks, limit {MAX_HOOKS}",
                hint="delete one",
                limit=MAX_HOOKS,
            )
        chosen = tuple(kind for kind in known if kind in events) or tuple(known)
        made = Webhook(
            f"wh-{new_id()}",
            tenant,
            url,
            chosen,
            secret or f"whsec_{secrets.token_urlsafe(32)}",
            time.time(),
        )
        await self._book.add(made)
        self._hooks[made.id] = made
        return made

    def list(self, tenant: str) -> Sequence[Webhook]:
        found = (hook for hook in self._hooks.values() if hook.tenant == tenant)
        return sorted(found, key=lambda hook: hook.created)

    def find(self, tenant: str, id: str) -> Webhook:
        """Raises NotFoundError."""
        hook = self._hooks.get(id)
        if hook is None or hook.tenant != tenant:
            raise NotFoundError(f"webhook {id[:80]!r} does not exist", webhook=id[:80])
        return hook

    async def delete(self, tenant: str, id: str) -> None:
        """With its deliveries; what is out just now may still arrive."""
        hook = self.find(tenant, id)
        await self._book.remove(hook.id)
        del self._hooks[hook.id]
        self._due.pop(hook.id, None)
        self._waiting.pop(hook.id, None)

    async def deliveries(self, tenant: str, id: str, most: int) -> Sequence[Delivery]:
        """The newest first."""
        return await self._book.of(self.find(tenant, id).id, most)

    async def redeliver(self, tenant: str, id: str, delivery: str) -> Delivery:
        """Once more from the beginning, under the same id. Raises NotFoundError."""
        hook = self.find(tenant, id)
        found = await self._book.find(hook.id, delivery)
        if found is None:
            raise NotFoundError(f"delivery {delivery[:80]!r} does not exist", webhook=id)
        if found.state is not Delivered.PENDING:
            found = Delivery(found.id, found.hook, found.event, found.body, found.created)
            await self._book.save([found])
            self._await_turn(found)
        return found

    def _hear(self, happening: Happening) -> None:
        for hook in self._hooks.values():
            if hook.tenant != happening.tenant or happening.kind not in hook.events:
                continue
            if self._waiting[hook.id] >= MAX_WAITING:
                log.warning("webhook told too late, and not any more", webhook=hook.id)
                continue
            self._waiting[hook.id] += 1
            id = f"evt-{new_id()}"
            self._heard.put_nowait(
                Delivery(id, hook.id, happening.kind, _body(id, happening), happening.at)
            )

    async def _write(self) -> None:
        while True:
            first = await self._heard.get()
            self._heard.put_nowait(first)  # it is taken in with all that came since
            try:
                await self._take_in()
            except CapsuleError as error:
                log.warning("webhooks not recorded yet", reason=error.message)
                await asyncio.sleep(1)

    async def _take_in(self) -> None:
        heard = [self._heard.get_nowait() for _ in range(self._heard.qsize())]
        new = [delivery for delivery in heard if delivery.hook in self._hooks]
        if not new:
            return
        try:
            await self._book.save(new)
        except BaseException:
            for delivery in new:
                self._heard.put_nowait(delivery)
            raise
        for delivery in new:
            self._waiting[delivery.hook] -= 1
            self._await_turn(delivery)

    def _await_turn(self, delivery: Delivery) -> None:
        if delivery.hook not in self._hooks:  # it was deleted
            return
        self._waiting[delivery.hook] += 1
        entry = (delivery.due, next(self._order), delivery)
        heapq.heappush(self._due.setdefault(delivery.hook, []), entry)
        self._moved.set()

    async def _deliver(self) -> None:
        while True:
            self._moved.clear()
            self._begin_due()
            first = self._first()
            wait = None if first is None else max(first[0] - time.time(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._moved.wait()

    def _begin_due(self) -> None:
        now = time.time()
        while (first := self._first()) is not None and first[0] <= now:
            delivery = first[2]
            hook = self._hooks[delivery.hook]
            heapq.heappop(self._due[hook.id])
            if not self._due[hook.id]:
                del self._due[hook.id]
            self._out[hook.id] += 1
            self._out_of[hook.tenant] += 1
            self._tasks.spawn(self._attempt(hook, delivery), f"attempt {delivery.id}")

    def _first(self) -> Due | None:
        """What is to begin next. Of each webhook one is looked at: there may be thousands of one
        whose receiver is slow. None: whoever ends wakes us."""
        if self._out.total() >= AT_ONCE:
            return None
        free = [heap[0] for id, heap in self._due.items() if self._may_begin(self._hooks[id])]
        now = time.time()
        due = [each for each in free if each[0] <= now]
        return min(due, key=self._turn) if due else min(free, default=None)

    def _may_begin(self, hook: Webhook) -> bool:
        return self._out[hook.id] < AT_ONCE_EACH and self._out_of[hook.tenant] < AT_ONCE_TENANT

    def _turn(self, due: Due) -> tuple[int, float, int]:
        return (self._out_of[self._hooks[due[2].hook].tenant], due[0], due[1])

    async def _attempt(self, hook: Webhook, delivery: Delivery) -> None:
        try:
            attempt = await self._post(hook, delivery)
            after = _after(delivery, attempt)
            if hook.id in self._hooks:
                await self._keep(after)
        finally:
            self._out[hook.id] -= 1
            self._out_of[hook.tenant] -= 1
            self._out += Counter()  # forgets those that are at 0
            self._out_of += Counter()
            if hook.id in self._hooks:
                self._waiting[hook.id] -= 1
            self._moved.set()
        if after.state is Delivered.PENDING:
            self._await_turn(after)

    async def _keep(self, after: Delivery) -> None:
        try:
            await self._book.save([after])
        except CapsuleError as error:  # then it comes twice, which it may
            log.warning("delivery not recorded", delivery=after.id, reason=error.message)

    async def _post(self, hook: Webhook, delivery: Delivery) -> Attempt:
        at, began = time.time(), time.perf_counter()
        status, error = None, ""
        try:
            headers = {
                "Content-Type": "application/json",
                "User-Agent": "Capsule-Webhooks/1",
                "Capsule-Event": delivery.event,
                "Capsule-Delivery": delivery.id,
                "Capsule-Signature": signed(hook.secret, int(at), delivery.body),
            }
            status, answer = await self._outbound.post(hook.url, headers, delivery.body)
            error = "" if 200 <= status < 300 else answer.decode("utf-8", "replace")[:200]
        except RefusedTargetError as refused:
            error = str(refused)
        except TimeoutError:
            error = f"no answer within {TIMEOUT:g} seconds"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as wrong:
            error = f"{type(wrong).__name__}: {wrong}"[:200]
        except (httpcore.UnsupportedProtocol, OSError) as wrong:
            error = str(wrong)[:200]
        return Attempt(at, round((time.perf_counter() - began) * 1000, 1), status, error)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY)  # a start has enough to do
            try:
                await self._book.forget(time.time() - KEPT_FOR, KEPT)
            except CapsuleError as error:
                log.warning("deliveries not tidied", reason=error.message)


def _after(delivery: Delivery, attempt: Attempt) -> Delivery:
    if attempt.status is not None and 200 <= attempt.status < 300:
        return delivery.after(attempt, Delivered.DONE, 0.0)
    if len(delivery.attempts) >= len(RETRIES):
        log.warning("webhook not delivered", delivery=delivery.id, reason=attempt.error)
        return delivery.after(attempt, Delivered.FAILED, 0.0)
    # Not all at once when a receiver comes back.
    wait = RETRIES[len(delivery.attempts)] * (0.9 + secrets.randbelow(200) / 1000)
    return delivery.after(attempt, Delivered.PENDING, attempt.at + wait)


def _body(id: str, happening: Happening) -> bytes:
    data: dict[str, Any] = {
        "sandbox_id": happening.sandbox,
        "template": happening.template,
        "provider": happening.provider,
        "tenant": happening.tenant,
    }
    if happening.reason:
        data["reason"] = happening.reason
    if happening.exec is not None:
        exit = happening.exec.exit
        data["exec"] = {
            "exec_id": happening.exec.id,
            "reason": str(exit.reason),
            "exit_code": exit.exit_code,
            "signal": exit.signal,
            "duration_ms": exit.duration_ms,
            "stdout_bytes": exit.stdout_bytes,
            "stderr_bytes": exit.stderr_bytes,
        }
    at = datetime.fromtimestamp(happening.at, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"id": id, "type": happening.kind, "at": at, "data": data})
