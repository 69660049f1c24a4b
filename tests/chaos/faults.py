"""What is done to the server while clients use it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from tests.chaos.client import GONE, Client
from tests.chaos.model import Model
from tests.faults.machine import Machine
from tests.support.disks import filled

FAILED_WITHIN = 15.0  # the server looks after its boxes every few seconds


class Faults:
    def __init__(
        self, model: Model, host: Machine, clients: Sequence[Client], watcher: Client, *, disk: bool
    ) -> None:
        self.model = model
        self.host = host
        self.clients = clients
        self.watcher = watcher
        self.dice = random.Random(f"{model.seed}-faults")
        self.start_takes = 0.5
        self.killed = ""  # the box whose keeper was killed last
        self.deck = [
            self.kill, self.kill, self.kill, self.kill_while_starting,
            self.stop, self.kill_keeper, self.kill_keeper_while_down,
        ]  # fmt: skip
        if disk:
            self.deck.append(self.fill_disk)

    async def work(self, until: float) -> None:
        """Each fault of the deck once, then again, in another order each time."""
        while True:
            for fault in self.dice.sample(self.deck, len(self.deck)):
                pause = self.dice.uniform(0.2, 3.0)
                if time.monotonic() + pause > until:
                    return
                await asyncio.sleep(pause)  # a random moment of the clients
                self.model.counts[fault.__name__] += 1
                self.model.note("", f"--- {fault.__name__}")
                await fault()
                self.model.note("", f"--- {fault.__name__} is over")

    async def shoot(self) -> None:
        self.model.counts["SIGKILL"] += 1
        self.model.kills.append(time.monotonic())
        await self.host.kill()

    async def start(self) -> None:
        began = time.monotonic()
        await self.host.start()
        self.start_takes = time.monotonic() - began

    async def kill(self) -> None:
        await self.shoot()
        await self.start()

    async def kill_while_starting(self) -> None:
        await self.shoot()
        for _ in range(self.dice.randint(1, 3)):
            self.host.spawn()
            # A random moment of the start.
            await asyncio.sleep(self.dice.uniform(0.1, 1.0) * self.start_takes)
            await self.shoot()
        await self.start()

    async def stop(self) -> None:
        self.model.check(
            "faults", "server", "exit code of a graceful stop", 0, await self.host.stop()
        )
        await self.start()

    async def kill_keeper(self) -> None:
        await self.failed(self.doom())

    async def kill_keeper_while_down(self) -> None:
        await self.shoot()
        victim = self.doom()
        await self.start()
        await self.failed(victim)

    def doom(self) -> str:
        """Kill the keeper of a client's home: that is the box."""
        homes = [client.home for client in self.clients if client.home]
        for id in self.dice.sample(homes, len(homes)):
            with suppress(FileNotFoundError):  # it is being deleted
                self.killed = self.host.box_of(id)
                keeper = int(self.host.record(self.killed)["keeper"])
                self.model.doomed.add(id)
                self.model.note(id, "--- its keeper is killed")
                os.kill(keeper, signal.SIGKILL)
                return id
        return ""

    async def failed(self, id: str) -> None:
        """Its box died, and everybody who asks is told so."""
        deadline = time.monotonic() + FAILED_WITHIN
        state = "running" if id else "failed"
        while state == "running" and time.monotonic() < deadline:
            answer = await self.watcher.insist("GET", f"/v1/sandboxes/{id}", on=id)
            state = answer.json()["state"] if answer.is_success else answer.text
            await asyncio.sleep(0.1)
        if id and state == "running" and self.host.box_of(id) != self.killed:
            self.model.doomed.discard(id)  # it was just being reset: what died was its old box
            return
        self.model.check("boxes", id, "state of one that died", "failed", state)
        if id and state == "failed":
            self.model.owe("sandbox.failed", id)
            path = f"/v1/sandboxes/{id}/execs"
            answer = await self.watcher.insist("POST", path, on=id, json={"cmd": "true"})
            self.watcher.expect(answer, "boxes", id, *GONE)
            await self.watcher.delete(id)

    async def fill_disk(self) -> None:
        self.model.full_until = float("inf")
        # A sandbox's disk is a sparse file: what was answered before is to be in it.
        await asyncio.to_thread(os.sync)
        with filled(self.host.base / "data"):
            await asyncio.sleep(self.dice.uniform(1.0, 4.0))  # clients work on meanwhile
        for client in self.clients:
            client.worn = True
        self.model.full_until = time.monotonic() + 3.0
        await asyncio.sleep(3.0)  # until what waited to be written is
