"""A client: its requests, its sandbox (its home), and the surfaces that it uses in turn."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from tests.chaos.model import Model

if TYPE_CHECKING:
    from tests.chaos.surfaces import Surface

LATEST = 30.0  # seconds in which an answer comes
PATIENCE = 45.0  # and in which one comes that is no "try again later", faults included
TRY_LATER = (429, 503, 507)
GONE = (404, 410)
DAY_MS = 86_400_000


class HomeLost(Exception):
    """A fault has killed the client's sandbox."""


class Stuck(Exception):
    """No usable answer came; it is among the violations."""


class Client:
    def __init__(self, model: Model, http: httpx.AsyncClient, number: int) -> None:
        self.model = model
        self.http = http
        self.name = f"c{number}"
        self.dice = random.Random(f"{model.seed}-{number}")
        self.home = ""
        self.label = ""  # of the home, and of its forks
        self.worn = False  # it lived through a full disk, or something in it is broken
        self.surfaces: Sequence[Surface] = ()
        self._count = 0

    def new(self, what: str) -> str:
        self._count += 1
        return f"{self.name}-{what}-{self._count}"

    async def ask(
        self, method: str, path: str, *, on: str, key: str = "", **options: Any
    ) -> httpx.Response | None:
        """None: no answer, or one that says to come again."""
        model, id, began = self.model, self.new("r"), time.monotonic()
        headers = {"X-Request-Id": id, **({"Idempotency-Key": key} if key else {})}
        asked = f"{id} {method} {path}"
        try:
            answer = await self.http.request(method, path, headers=headers, **options)
        except httpx.TimeoutException:
            model.violated("answers", on, "time", f"at most {LATEST:g} s", asked)
            return None
        except httpx.TransportError as error:
            model.counts["unanswered"] += 1
            model.note(on, f"{asked} → {type(error).__name__}")
            return None
        model.slowest = max(model.slowest, time.monotonic() - began)
        model.note(on, f"{asked} → {answer.status_code} {answer.text[:160]!r}")
        if answer.status_code == 500:
            model.violated("answers", on, "a status", "no 500", f"{asked}: {answer.text}")
        elif answer.status_code in TRY_LATER:
            model.counts["refused"] += 1
        else:
            model.counts["answered"] += 1
            if answer.is_success and method != "GET":
                model.changed(id, asked)
            return answer
        return None

    async def insist(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The same until it is answered: for what may be asked twice."""
        deadline = time.monotonic() + PATIENCE
        while (answer := await self.ask(method, path, **options)) is None:
            if time.monotonic() > deadline:
                wanted = f"one of use within {PATIENCE:g} s"
                self.model.violated(
                    "answers", options["on"], "the last", wanted, f"{method} {path}"
                )
                raise Stuck
            await asyncio.sleep(0.05)
        return answer

    def expect(self, answer: httpx.Response, kind: str, on: str, *statuses: int) -> bool:
        if answer.status_code in statuses:
            return True
        if not (self.model.full or self.worn):
            asked = f"{answer.request.method} {answer.request.url.path}"
            seen = f"{answer.status_code} to {asked}: {answer.text}"
            self.model.violated(kind, on, "a status", statuses, seen)
        return False

    async def create(self, label: str, **body: Any) -> str:
        """A sandbox, one for its key however often it is asked for."""
        options = {"on": label, "key": label}
        body = {"template": "python", "metadata": {"label": label}, "ttl_ms": DAY_MS, **body}
        answer = await self.ask("POST", "/v1/sandboxes", json=body, **options)
        at_once = answer is not None
        if answer is None:
            answer = await self.insist("POST", "/v1/sandboxes", json=body, **options)
        if not self.expect(answer, "sandboxes", label, 201):
            raise Stuck
        id = str(answer.json()["id"])
        if at_once:
            self.model.owe("sandbox.created", id)
        self.model.check("sandboxes", label, "sandboxes of a key", [id], await self.labelled(label))
        return id

    async def labelled(self, label: str) -> list[str]:
        params = {"metadata": f"label={label}"}
        answer = await self.insist("GET", "/v1/sandboxes", on=label, params=params)
        return [each["id"] for each in answer.json()["sandboxes"]]

    async def delete(self, id: str) -> None:
        path = f"/v1/sandboxes/{id}"
        answer = await self.ask("DELETE", path, on=id)
        if self.model.full:
            self.model.retold.add(id)
        if answer is not None and self.expect(answer, "sandboxes", id, 200):
            self.model.owe("sandbox.deleted", id)
        elif answer is None:
            answer = await self.insist("DELETE", path, on=id)
            self.expect(answer, "sandboxes", id, 200, *GONE)
        answer = await self.insist("GET", path, on=id)
        there = answer.is_success and answer.json()["state"]
        there = self.model.acknowledged("sandboxes", there)
        self.model.check("sandboxes", id, "its state, after its delete", False, there)

    async def work(self, until: float) -> None:
        while time.monotonic() < until and not self.model.lied_enough:
            await self.guarded(self.step)

    async def finish(self) -> None:
        """Look at everything once more, then delete it."""
        for surface in self.surfaces:
            await self.guarded(surface.verify)
        for surface in self.surfaces:
            await self.guarded(surface.clear)
        await self.guarded(self.leave)

    async def guarded(self, act: Any) -> None:
        try:
            await act()
        except HomeLost:
            self.forget()
        except Stuck:
            self.worn = True

    async def step(self) -> None:
        if not self.home:
            label = self.new("home")
            self.home, self.label = await self.create(label), label
        elif self.worn or self.dice.random() < 0.01:
            for surface in self.surfaces:
                await surface.verify()
            await self.leave()
        else:
            due = [surface for surface in self.surfaces if self.model.due(surface.kind)]
            await self.dice.choice(due or self.surfaces).step()

    async def leave(self) -> None:
        """Delete the home; the next step makes another one."""
        for surface in self.surfaces:
            await surface.leave()
        home = self.home
        self.forget()
        if home and home not in self.model.doomed:
            await self.delete(home)

    def forget(self) -> None:
        self.home, self.worn = "", False
        for surface in self.surfaces:
            surface.forget()
