"""Creates that find a box ready, and resets: through the SDK, plain HTTP and the service itself.

The server has a pool of its own. Before each sample it is given the time to fill it: what is
measured is a claim, and what fills the pool meanwhile competes with nothing but the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, ClassVar

from bench.capsule import TEMPLATE, Inside, clock
from bench.plain import Plain
from bench.rivals import Rival
from bench.server import capsule_server
from bench.stats import Measure
from capsule.service import CreateRequest
from capsule_sdk import CapsuleClient

READY = 4
SETTINGS = {"CAPSULE_POOL_MIN": str(READY), "CAPSULE_POOL_TEMPLATES": TEMPLATE}
TARGET = 2.5  # DESIGN §6
QUICKER = 1.0  # times: a reset is to be faster than what it saves


class Warm(Rival):
    def __init__(self) -> None:
        self._sdk = Measure("Capsule SDK: create, warm", "warm", target=TARGET)
        self._http = Measure("Capsule HTTP: sandbox.v1.create, warm", "warm", target=TARGET)
        self._adjusted = Measure("Capsule SDK: create, warm, with other limits", "warm")
        self._again = Measure("Capsule SDK: delete + create, warm", "reset")
        self._cold_again = Measure("Capsule SDK: delete + create, no pool", "reset")
        self._reset = Measure("Capsule SDK: reset", "reset", bound=(self._again, QUICKER))
        self.measures = [self._sdk, self._http, self._adjusted]
        self.measures += [self._reset, self._again, self._cold_again]
        self._stack = ExitStack()
        url = self._stack.enter_context(capsule_server(64, **SETTINGS))
        cold = self._stack.enter_context(capsule_server(64))
        self._client = self._stack.enter_context(CapsuleClient(url))
        self._cold = self._stack.enter_context(CapsuleClient(cold))
        self._plain = self._stack.enter_context(closing(Plain(url)))
        self._kept = self._client.create(TEMPLATE)
        self._replaced = self._client.create(TEMPLATE)
        self._cold_replaced = self._cold.create(TEMPLATE)

    def round(self, count: int) -> None:
        for _ in range(count):
            self._create(self._sdk)
            self._create(self._adjusted, memory=300 << 20, processes=77)
            self._create_by_http()
            self._filled()
            with clock(self._reset):
                self._kept.reset()
            self._filled()
            with clock(self._again):
                self._replaced.delete()
                self._replaced = self._client.create(TEMPLATE)
            with clock(self._cold_again):
                self._cold_replaced.delete()
                self._cold_replaced = self._cold.create(TEMPLATE)

    def _create(self, measure: Measure, **limits: Any) -> None:
        self._filled()
        with clock(measure):
            sandbox = self._client.create(TEMPLATE, **limits)
        if sandbox.info.started != "warm":
            measure.samples.pop()
            measure.note = "some started cold, and are left out"
        sandbox.delete()

    def _create_by_http(self) -> None:
        self._filled()
        with clock(self._http):
            made = self._plain.rpc("create", template=TEMPLATE)
        self._plain.rpc("delete", id=made["id"])

    def _filled(self) -> None:
        while (shelf := self._client.pool().shelves[0]).ready < READY or shelf.launching:
            time.sleep(0.002)

    def close(self) -> None:
        self._kept.delete()
        self._replaced.delete()
        self._cold_replaced.delete()
        self._stack.close()


class WarmInside(Inside):
    """The service in this process: what is left of the above is the way there."""

    settings: ClassVar[Mapping[str, Any]] = {"pool_min": READY, "pool_templates": (TEMPLATE,)}

    def __init__(self) -> None:
        super().__init__()
        self._warm = Measure("Capsule inside: service.create, warm", "warm")
        self.measures = [self._warm]

    async def _round(self, count: int) -> None:
        service = self._service
        for _ in range(count):
            while (shelf := service.pool().shelves[0]).ready < READY or shelf.launching:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            with clock(self._warm):
                sandbox = await service.create(CreateRequest(template=TEMPLATE))
            await service.delete(sandbox.id)
