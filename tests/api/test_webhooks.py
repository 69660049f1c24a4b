"""Webhooks as a client has them: made over the API, sent for a real sandbox, checked by its SDK."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from capsule_sdk import (
    CapsuleClient,
    InvalidError,
    NotFoundError,
    UnauthenticatedError,
    verify_webhook,
)
from tests.support import wait_for
from tests.support.servers import real_server

pytestmark = pytest.mark.real


class Inbox(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[tuple[str, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.headers["Capsule-Signature"], body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_the_life_of_a_sandbox_is_delivered_and_the_last_event_kept(inbox: Inbox) -> None:
    with real_server(WEBHOOK_TARGETS="any") as server, CapsuleClient(server.url) as client:
        hook = client.webhooks.create(inbox.url)
        assert hook.secret is not None
        with client.create("bash") as sandbox:
            done = sandbox.exec(["false"])
        wait_for(lambda: len(inbox.taken) == 3, what="three deliveries")
        bodies = {}
        for signature, body in inbox.taken:
            verify_webhook(body, signature, hook.secret)
            with pytest.raises(UnauthenticatedError):
                verify_webhook(body + b" ", signature, hook.secret)
            with pytest.raises(UnauthenticatedError, match="ago"):
                verify_webhook(body, signature, hook.secret, tolerance=-1)
            bodies[json.loads(body)["type"]] = json.loads(body)["data"]
        assert set(bodies) == {"sandbox.created", "sandbox.deleted", "exec.finished"}
        assert {data["sandbox_id"] for data in bodies.values()} == {sandbox.id}
        assert bodies["exec.finished"]["exec"]["exec_id"] == done.exec_id
        assert bodies["exec.finished"]["exec"]["exit_code"] == 1

        def settled() -> bool:
            found = client.webhooks.deliveries(hook.webhook_id)
            return [each.state for each in found] == ["delivered"] * 3

        wait_for(settled, what="recorded")
        last = client.webhooks.deliveries(hook.webhook_id, limit=1)[0]
        assert last.attempts[0]["status"] == 204
        assert client.webhooks.redeliver(hook.webhook_id, last.delivery_id).state == "pending"
        wait_for(lambda: len(inbox.taken) == 4, what="sent again")
        client.webhooks.delete(hook.webhook_id)
        # What ends with the server is kept to be sent by the next one.
        client.webhooks.create("http://127.0.0.1:9/", events=["sandbox.deleted"])
        client.create("bash")
        server.process.terminate()
        server.process.wait(30)
        with contextlib.closing(sqlite3.connect(server.base / "data/webhooks.db")) as db:
            kept = db.execute("SELECT event FROM delivery WHERE state = 'pending'").fetchall()
        assert kept == [("sandbox.deleted",)]


def test_a_secret_is_shown_once_and_targets_are_public_addresses() -> None:
    with real_server() as server, CapsuleClient(server.url) as client:
        made = client.webhooks.create("https://example.org/", events=["sandbox.failed"])
        assert made.secret
        (listed,) = client.webhooks.list()
        assert listed.secret is None and listed.events == ("sandbox.failed",)
        assert client.webhooks.get(made.webhook_id) == listed
        client.webhooks.delete(made.webhook_id)
        for ask in (client.webhooks.get, client.webhooks.delete, client.webhooks.deliveries):
            with pytest.raises(NotFoundError):
                ask(made.webhook_id)
        with pytest.raises(InvalidError, match=r"169\.254\.169\.254 is not a public address"):
            client.webhooks.create("http://169.254.169.254/latest/meta-data/")
