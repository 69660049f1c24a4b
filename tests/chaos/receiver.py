"""The receiver of the run's webhook: each delivery is signed, and an event has one id."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from capsule_sdk import UnauthenticatedError, verify_webhook
from tests.chaos.model import Model, Owed


class Receiver:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.url = ""
        self.secret = ""
        self.ids: dict[Owed, set[str]] = {}
        self._bodies: dict[str, bytes] = {}
        self._refused: set[str] = set()
        self._dice = random.Random(f"{model.seed}-receiver")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        async with server:
            self.url = "http://{}:{}/".format(*server.sockets[0].getsockname())
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                pairs = (line.partition(": ") for line in head[1:] if line)
                headers = {name.lower(): value for name, _, value in pairs}
                body = await reader.readexactly(int(headers["content-length"]))
                status = self._take(headers, body)
                writer.write(f"HTTP/1.1 {status} \r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the server was killed, or keeps no connection
        finally:
            writer.close()

    def _take(self, headers: dict[str, str], body: bytes) -> int:
        said = json.loads(body)
        id, data = said["id"], said["data"]
        if self._dice.random() < 0.02 and id not in self._refused:
            self._refused.add(id)
            return 503
        self.model.counts["deliveries"] += 1
        sandbox = data["sandbox_id"]
        try:
            verify_webhook(body, headers["capsule-signature"], self.secret)
        except UnauthenticatedError as error:
            self.model.violated("webhooks", sandbox, "its signature", "a valid one", error)
        self.model.check("webhooks", sandbox, "its id", headers["capsule-delivery"], id)
        same = self._bodies.setdefault(id, body)
        self.model.check("webhooks", sandbox, "a further delivery of an event", same, body)
        event = Owed(said["type"], sandbox, data.get("exec", {}).get("exec_id", ""))
        self.ids.setdefault(event, set()).add(id)
        return 200

    async def settled(self, within: float = 20.0) -> None:
        """What is owed has come; a delivery that was refused comes again after five seconds."""
        owed = [event for event, at in self.model.owed.items() if self.model.surely(at)]
        deadline = asyncio.get_running_loop().time() + within
        while missing := [event for event in owed if event not in self.ids]:
            if self.model.lies or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.1)
        self.model.counts["events"] += len(owed)
        for event in missing:
            wanted = f"{event.event} {event.exec_id}"
            self.model.violated("webhooks", event.sandbox, "what was delivered", wanted, "nothing")
        for event, ids in self.ids.items():
            if (event.exec_id or event.sandbox) not in self.model.retold:
                about = f"ids of {event.event} {event.exec_id}"
                self.model.check(
                    "webhooks", event.sandbox, "an event", f"1 {about}", f"{len(ids)} {about}"
                )
