"""Webhooks, with a receiver that listens on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from capsule.config import Config
from capsule.errors import CapacityError, InvalidError, NotFoundError
from capsule.model import ExecId, Exit, Reason, SandboxId
from capsule.service.happenings import Ended, Happening, Happenings, Kind
from capsule.webhooks import hooks, records
from capsule.webhooks.hooks import Webhooks
from capsule.webhooks.outbound import is_public
from capsule.webhooks.records import Delivered, Delivery, Webhook
from tests.support import eventually

SECRET = "a secret of some length"


@dataclass
class Receiver:
    port: int = 0
    taken: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)  # what comes before 200s

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/hook?a=1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {k.lower(): v for k, v in (x.split(": ", 1) for x in lines[1:] if ": " in x)}
        body = await reader.readexactly(int(headers["content-length"]))
        headers[""] = lines[0]
        self.taken.append((headers, body))
        answer = self.answers.pop(0) if self.answers else b"200 OK"
        if answer != b"silence":
            writer.write(b"HTTP/1.1 " + answer + b"\r\ncontent-length: 2\r\n\r\nno")
            await writer.drain()
            writer.close()
        else:
            await reader.read()  # until we are given up
            writer.close()


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


@asynccontextmanager
async def webhooks(
    folder: Path, happenings: Happenings | None = None, targets: str = "any"
) -> AsyncIterator[tuple[Webhooks, Happenings]]:
    folder.mkdir(exist_ok=True)
    config = Config(data_dir=folder, run_dir=Path("/run/capsule"), webhook_targets=targets)
    happenings = happenings or Happenings()
    async with Webhooks(config, happenings) as made:
        yield made, happenings


def happened(kind: Kind = Kind.CREATED, tenant: str = "default") -> Happening:
    ended = None
    if kind is Kind.FINISHED:
        exit = Exit(Reason.TIMED_OUT, 137, 9, 1500.0, stdout_bytes=3)
        ended = Ended(ExecId("e1"), ("sleep", "9"), exit)
    return Happening(kind, 1_763_000_000.5, SandboxId("box1"), "bash", "local", tenant, exec=ended)


async def newest(made: Webhooks, hook: Webhook) -> Delivery | None:
    return next(iter(await made.deliveries("default", hook.id, 1)), None)


async def test_an_event_is_sent_signed_and_recorded(tmp_path: Path) -> None:
    async with receiver() as there, webhooks(tmp_path) as (made, happenings):
        hook = await made.create("default", there.url, secret=SECRET, events=["exec.finished"])
        happenings.tell(happened(Kind.CREATED))  # not subscribed
        happenings.tell(happened(Kind.FINISHED))
        await eventually(lambda: there.taken, what="delivered")
        headers, body = there.taken[0]
        assert headers[""] == "POST /hook?a=1 HTTP/1.1"
        time, _, digest = headers["capsule-signature"].partition(",v1=")
        text = time.removeprefix("t=").encode() + b"." + body
        assert digest == hmac.new(SECRET.encode(), text, hashlib.sha256).hexdigest()
        sent = json.loads(body)
        assert sent["id"] == headers["capsule-delivery"]
        assert sent["type"] == headers["capsule-event"] == "exec.finished"
        assert sent["at"] == "2025-11-13T02:13:20.500000Z"
        assert sent["data"]["sandbox_id"] == "box1"
        assert sent["data"]["exec"] == {
            "exec_id": "e1",
            "reason": "timed_out",
            "exit_code": 137,
            "signal": 9,
            "duration_ms": 1500.0,
            "stdout_bytes": 3,
            "stderr_bytes": 0,
        }

        async def settled() -> bool:
            (delivery,) = await made.deliveries("default", hook.id, 10)
            return delivery.state is Delivered.DONE and delivery.attempts[0].status == 200

        await eventually(settled, what="recorded")
        assert len(there.taken) == 1


async def test_a_delivery_is_tried_again_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "RETRIES", (0.01,) * 4)
    monkeypatch.setattr(hooks, "TIMEOUT", 0.5)
    async with receiver() as there, webhooks(tmp_path) as (made, happenings):
        there.answers = [b"500 Oops", b"302 Found\r\nlocation: http://127.0.0.1/", b"silence"]
        hook = await made.create("default", there.url)
        happenings.tell(happened())
        await eventually(lambda: len(there.taken) == 4, what="four attempts")
        assert len({headers["capsule-delivery"] for headers, _ in there.taken}) == 1
        (delivery,) = await made.deliveries("default", hook.id, 10)

        async def done() -> bool:
            (delivery,) = await made.deliveries("default", hook.id, 10)
            return [a.status for a in delivery.attempts] == [500, 302, None, 200]

        await eventually(done, what="all attempts are visible")
        assert delivery.attempts[0].error == "no"


async def test_a_failed_delivery_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "RETRIES", (0.01,))
    async with receiver() as there, webhooks(tmp_path) as (made, happenings):
        there.answers = [b"500 Oops"] * 2
        hook = await made.create("default", there.url)
        happenings.tell(happened())

        async def state(wanted: Delivered) -> str | None:
            delivery = await newest(made, hook)
            return delivery.id if delivery and delivery.state is wanted else None

        id = await eventually(lambda: state(Delivered.FAILED), what="given up")
        assert id is not None
        assert (await made.redeliver("default", hook.id, id)).id == id
        await eventually(lambda: state(Delivered.DONE), what="delivered after all")
        with pytest.raises(NotFoundError):
            await made.redeliver("default", hook.id, "evt-none")


async def test_pending_deliveries_outlive_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "TIMEOUT", 30.0)
    async with receiver() as there:
        there.answers = [b"silence"]
        async with webhooks(tmp_path) as (made, happenings):
            hook = await made.create("default", there.url)
            happenings.tell(happened())
            await eventually(lambda: there.taken, what="it is out")
            happenings.tell(happened(Kind.DELETED))  # and stop at once
        async with webhooks(tmp_path) as (made, _):
            assert [each.id for each in made.list("default")] == [hook.id]
            await eventually(lambda: len(there.taken) >= 3, what="both came (the first again)")
    sent = {json.loads(body)["type"] for _, body in there.taken}
    assert sorted(sent) == ["sandbox.created", "sandbox.deleted"]


async def test_a_tenant_gets_events_of_its_own_sandboxes_only(tmp_path: Path) -> None:
    async with receiver() as there, webhooks(tmp_path) as (made, happenings):
        mine = await made.create("mine", there.url)
        happenings.tell(happened(tenant="other"))
        happenings.tell(happened(tenant="mine"))
        await eventually(lambda: there.taken, what="delivered")
        assert [json.loads(body)["data"]["tenant"] for _, body in there.taken] == ["mine"]
        assert made.list("other") == []
        for ask in (made.delete, made.deliveries):
            with pytest.raises(NotFoundError):
                await ask("other", mine.id, *([1] if ask == made.deliveries else []))
        await made.delete("mine", mine.id)
        assert made.list("mine") == []


WRONG = [
    *("http://127.0.0.1/", "http://[::1]/", "http://10.0.0.1/", "https://169.254.169.254/x"),
    *("http://192.168.1.1:80/", "http://[::ffff:127.0.0.1]/", "http://100.64.0.1/"),
    *("ftp://example.org/", "http:///x", "https://user:pass@example.org/", "x", "http://h:0/"),
    *("http://exa mple.org/", "http://example.org/" + "x" * 3000, "http://[fd00::1]/"),
]


async def test_a_wrong_address_is_refused(tmp_path: Path) -> None:
    async with webhooks(tmp_path, targets="public") as (made, _):
        for url in WRONG:
            with pytest.raises(InvalidError, match="url"):
                await made.create("default", url)


async def test_a_name_is_checked_when_it_is_connected_to(tmp_path: Path) -> None:
    """`localhost` stands for any name that resolves to an inner address when it is used."""
    async with receiver() as there, webhooks(tmp_path, targets="public") as (made, happenings):
        hook = await made.create("default", there.url)
        happenings.tell(happened())

        async def refused() -> str:
            delivery = await newest(made, hook)
            return delivery.attempts[0].error if delivery and delivery.attempts else ""

        assert "not a public address" in await eventually(refused, what="tried")
        assert there.taken == []


PUBLIC = ["8.8.8.8", "2606:4700::1", "64:ff9b::808:808"]
INNER = [
    *("0.0.0.0", "224.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "::", "fe80::1", "::7f00:1"),
    *("fec0::1", "64:ff9b:1::a00:1", "::ffff:0:7f00:1", "198.18.0.1", "172.16.0.1"),
    "255.255.255.255",
]


def test_public_addresses() -> None:
    found = [each for each in (*PUBLIC, *INNER) if is_public(ipaddress.ip_address(each))]
    assert found == PUBLIC


async def test_slow_receivers_do_not_delay_others(tmp_path: Path) -> None:
    async with (
        receiver() as slow,
        receiver() as quick,
        webhooks(tmp_path) as (made, happenings),
    ):
        slow.answers = [b"silence"] * 500
        for _ in range(hooks.MAX_HOOKS):
            await made.create("full", slow.url)
        with pytest.raises(CapacityError, match=f"limit {hooks.MAX_HOOKS}"):
            await made.create("full", slow.url)
        for wrong in ({"events": ["nothing"]}, {"secret": "short"}):
            with pytest.raises(InvalidError):
                await made.create("one", slow.url, **wrong)
        await made.create("one", slow.url)
        await made.create("one", quick.url)
        for tenant in ["full"] * 20 + ["one"] * 20:
            happenings.tell(happened(tenant=tenant))
        await eventually(lambda: len(quick.taken) == 20, what="the quick receiver has all")
        assert len(slow.taken) <= hooks.AT_ONCE_TENANT + hooks.AT_ONCE_EACH


async def test_settled_deliveries_are_removed_by_age_and_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "A_TIME", 3)
    book = records.Book(tmp_path / "webhooks.db")
    await book.open()
    for hook in ("one", "two"):
        await book.add(Webhook(hook, "default", "https://example.org/", (), SECRET, 0.0))
        for number in range(20):
            state = Delivered.PENDING if number < 2 else Delivered.DONE
            at = 100.0 if number < 5 else 200.0  # several at the same moment
            id = f"{hook}-{number}"
            await book.save([Delivery(id, hook, "sandbox.created", b"{}", at, state)])
    await book.forget(150.0, 10)
    for hook in ("one", "two"):
        left = {each.id for each in await book.of(hook, 100)}
        assert left == {f"{hook}-{number}" for number in (0, 1, *range(10, 20))}
    await book.aclose()
