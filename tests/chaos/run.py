"""A run: clients, faults between their requests, and what must hold at the end.

The server is a real `capsule serve` with directories of its own. It is killed, also while it
starts, stopped gracefully, loses the keepers of boxes, and as root its disk is filled. Meanwhile
clients create, run, stream, write, snapshot, fork and so on, and note what they were answered
(`model.py`). Each surface (`surfaces.py`) says what must hold of it.

The seed decides what each client asks for, and which faults come when. Where a kill falls depends
on the machine as well, so a run with the same seed is like the other, and not the same.

With `lies` the model is given answers that never came. Such a run must find violations of
everything it was lied to about, without any fault: that proves that it would notice.

As an ordinary user without mount rights there is no full disk.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from capsule.audit.trail import verify_file
from capsule.sessions.ledger import verify_file as verify_sessions
from tests.chaos.client import LATEST, Client
from tests.chaos.faults import Faults
from tests.chaos.model import Model
from tests.chaos.receiver import Receiver
from tests.chaos.surfaces import ALL, Volumes
from tests.faults.footprint import names_in
from tests.faults.machine import Machine, end_all, machine
from tests.support.disks import small_disk
from tests.support.nursery import Nursery

DISK = "1536M"
SETTINGS = {"AUDIT": "yes", "WEBHOOK_TARGETS": "any", "LOG_LEVEL": "warning"}
# Empty once everything was deleted.
FOLDERS = (
    "run/boxes", "data/boxes", "data/layers", "data/volumes",
    "data/kept/snapshot", "data/kept/volume", "data/storage/workspaces",
)  # fmt: skip
COMPLAINTS = ("Traceback", "incident ", "never retrieved", "never awaited", "without completing")


class Options(NamedTuple):
    seconds: float
    seed: int
    clients: int = 8
    lies: bool = False


async def run(nursery: Nursery, options: Options, *, mounts: bool) -> Model:
    """`mounts`: whether we may mount a disk for the server, to fill it."""
    model = Model(options.seed, lies=options.lies)
    Volumes.sized = nursery.user is None and os.getuid() == 0
    async with machine(nursery, **SETTINGS) as host:
        with small_disk(host.base, DISK) if mounts else nullcontext():
            try:
                await disturbed(model, host, options, disk=mounts)
            finally:
                await end_all(host)
    return model


async def disturbed(model: Model, host: Machine, options: Options, *, disk: bool) -> None:
    receiver = Receiver(model)
    await host.start()
    async with receiver.listening(), host.http(timeout=LATEST) as http:
        clients = [Client(model, http, number) for number in range(options.clients)]
        for client in clients:
            client.surfaces = [surface(client) for surface in ALL]
        watcher = Client(model, http, options.clients)
        answer = await watcher.insist("POST", "/v1/webhooks", on="hook", json={"url": receiver.url})
        receiver.secret = answer.json()["secret"]
        faults = Faults(model, host, clients, watcher, disk=disk)
        until = time.monotonic() + options.seconds
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.work(until))
            if not options.lies:
                group.create_task(faults.work(until))
        model.note("", "--- the end: everything is looked at and deleted")
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.finish())
        await nothing_is_left(model, host, watcher)
        await receiver.settled()
    model.check("faults", "server", "exit code at the end", 0, await host.stop())
    seen = await asyncio.to_thread(host.footprint)
    for difference in seen.differences(serving=False):
        model.violated("leftovers", "machine", "after the stop", "nothing", difference)
    for name in FOLDERS:
        model.check("leftovers", name, "after the stop", [], names_in(host.base / name))
    await asyncio.to_thread(audit, model, host.base / "data")
    for line in host.log().splitlines():
        if any(complaint in line for complaint in COMPLAINTS):
            model.violated("log", "server", "a line", "no complaint", line)


async def nothing_is_left(model: Model, host: Machine, watcher: Client) -> None:
    """Clients have deleted what they made; sandboxes may be of a create that nobody answered."""
    for id in await host.listed():
        await watcher.delete(id)
    for kind in ("snapshots", "volumes"):
        answer = await watcher.insist("GET", f"/v1/{kind}", on=kind)
        left = [each["name"] for each in answer.json()[kind]]
        model.check("leftovers", kind, "after all were deleted", [], left)
        for name in left:
            await watcher.insist("DELETE", f"/v1/{kind}/{name}", on=name)
    with suppress(AssertionError):
        await host.agree()
        return
    for difference in (await asyncio.to_thread(host.footprint)).differences():
        model.violated("leftovers", "machine", "after all was deleted", "nothing", difference)


def audit(model: Model, data: Path) -> None:
    """Both chains hold, and every change that was answered is in the trail."""
    for verdict in (verify_file(data / "audit.db"), verify_sessions(data / "storage/sessions.db")):
        model.check("audit", "chain", "broken entries", (), verdict.broken)
    with closing(sqlite3.connect(data / "audit.db")) as db:
        bodies = db.execute("SELECT body FROM trail").fetchall()
    logged = {msgspec.json.decode(body)["request"] for (body,) in bodies}
    for request, (what, at) in model.requests.items():
        if model.surely(at):
            model.counts["audited"] += 1
            if request not in logged:
                model.violated("audit", request, "its entry", what, "none")
