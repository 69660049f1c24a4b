"""Capsule's own numbers, through plain HTTP and through the Python SDK."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import uvloop

from bench.plain import Plain
from bench.rivals import Rival
from bench.server import in_memory
from bench.stats import Measure
from capsule.app import open_service
from capsule.config import load_config
from capsule.edge.logs import configure_logging
from capsule.service import CreateRequest, ExecCall, Service
from capsule_sdk import AsyncCapsuleClient, CapsuleClient

TEMPLATE = "bash"


@contextmanager
def clock(measure: Measure) -> Iterator[None]:
    start = time.perf_counter()
    yield
    measure.samples.append((time.perf_counter() - start) * 1e3)


class Sdk(Rival):
    """create, exec, run, delete with `CapsuleClient`, one after the other."""

    def __init__(self, url: str) -> None:
        self._create = Measure("Capsule SDK: create", "create", target=8.0)
        self._exec = Measure("Capsule SDK: exec `true`", "exec", target=2.5)
        self._rested = Measure("Capsule SDK: exec `true`, now and then", "exec")
        self._run = Measure("Capsule SDK: run `print(1)`", "run")
        self._delete = Measure("Capsule SDK: delete", "delete", target=3.0)
        self._whole = Measure("Capsule SDK: create + exec + delete", "one-shot")
        lives = [self._create, self._exec, self._rested, self._run, self._delete]
        self.measures = [*lives, self._whole]
        self._client = CapsuleClient(url)
        self._kept = self._client.create(TEMPLATE)

    def round(self, count: int) -> None:
        for _ in range(count):
            self._lifetime()
            self._one_shot()
            self._now_and_then()

    def _lifetime(self) -> None:
        with clock(self._create):
            sandbox = self._client.create("python")
        for _ in range(3):
            with clock(self._exec):
                sandbox.exec(["true"]).check()
        with clock(self._run):
            sandbox.run("print(1)").check()
        with clock(self._delete):
            sandbox.delete()

    def _one_shot(self) -> None:
        with clock(self._whole):
            sandbox = self._client.create(TEMPLATE)
            sandbox.exec(["true"]).check()
            sandbox.delete()

    def _now_and_then(self) -> None:
        """As a person or a model would: the machine has gone to rest since the last one."""
        time.sleep(0.1)
        with clock(self._rested):
            self._kept.exec(["true"]).check()

    def close(self) -> None:
        self._kept.delete()
        self._client.close()


class Http(Rival):
    """The same by JSON-RPC over one kept connection, without the SDK."""

    def __init__(self, url: str) -> None:
        self._create = Measure("Capsule HTTP: sandbox.v1.create", "create", target=8.0)
        self._exec = Measure("Capsule HTTP: sandbox.v1.exec `true`", "exec", target=2.5)
        self._delete = Measure("Capsule HTTP: sandbox.v1.delete", "delete", target=3.0)
        self._health = Measure("Capsule HTTP: GET /health", "exec")
        self.measures = [self._create, self._exec, self._health, self._delete]
        self._client = Plain(url)

    def round(self, count: int) -> None:
        for _ in range(count):
            with clock(self._create):
                sandbox = self._client.rpc("create", template=TEMPLATE)
            for _ in range(3):
                with clock(self._exec):
                    self._client.rpc("exec", id=sandbox["id"], cmd=["true"])
            with clock(self._health):
                self._client.get("/health")
            with clock(self._delete):
                self._client.rpc("delete", id=sandbox["id"])

    def close(self) -> None:
        self._client.close()


class Inside(Rival):
    """The service in this process, without HTTP: what is left of the above is the way there."""

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self._create = Measure("Capsule inside: service.create", "create")
        self._exec = Measure("Capsule inside: service.exec `true`", "exec")
        self._delete = Measure("Capsule inside: service.delete", "delete")
        self.measures = [self._create, self._exec, self._delete]
        self._base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
        self._base.chmod(0o755)
        self._run_dir = in_memory()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        config = load_config(
            {},
            data_dir=self._base / "data",
            run_dir=self._run_dir,
            drain="delete",
            log_level="warning",
            **self.settings,
        )
        configure_logging(config)
        self._open = open_service(config)
        self._service: Service = self._runner.run(self._open.__aenter__())

    def round(self, count: int) -> None:
        self._runner.run(self._round(count))

    async def _round(self, count: int) -> None:
        for _ in range(count):
            with clock(self._create):
                sandbox = await self._service.create(CreateRequest(template=TEMPLATE))
            for _ in range(3):
                with clock(self._exec):
                    await self._service.exec(sandbox.id, ExecCall(cmd=("true",)))
            with clock(self._delete):
                await self._service.delete(sandbox.id)

    def close(self) -> None:
        self._runner.run(self._open.__aexit__(None, None, None))
        self._runner.close()
        for folder in (self._base, self._run_dir):
            shutil.rmtree(folder, ignore_errors=True)


async def burst(url: str, count: int) -> list[Measure]:
    """`count` creates at once, each followed by one exec: how many succeed, how late the last."""
    whole = Measure(f"Capsule: {count} at once, create + exec", "scale")
    slowest = Measure(f"Capsule: {count} at once, p99", "scale", target=500.0)
    failed: list[str] = []
    async with AsyncCapsuleClient(url) as client:

        async def one() -> None:
            try:
                with clock(whole):
                    sandbox = await client.create(TEMPLATE)
                    (await sandbox.exec(["true"])).check()
            except Exception as error:  # counted and shown, whatever it is
                failed.append(repr(error))
                return
            made.append(sandbox)

        made: list[Any] = []
        await asyncio.gather(*(one() for _ in range(count)))
        await asyncio.gather(*(sandbox.delete() for sandbox in made))
    if whole.samples:
        slowest.samples = [whole.p99]
    share = 100 * len(made) / count
    whole.note = f"{share:.0f} % succeeded" + (f"; first failure: {failed[0]}" if failed else "")
    return [whole, slowest]
