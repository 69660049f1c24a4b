"""Capsule's sandboxes in containers, beside what the Engine's own API takes for the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError

import httpx

from bench.capsule import clock
from bench.pool import QUICKER, TARGET
from bench.rivals import Rival, compile_raw, timed_ms
from bench.server import capsule_server
from bench.stats import Measure
from capsule_sdk import AsyncCapsuleClient, Capsule, CapsuleClient, CapsuleError
from tests.support import supervisor
from tests.support.engine import EngineApi, EngineError, EngineMissing

# As the template has them: gVisor's kernel runs under its sandbox's share of the CPU.
PERIOD = 100_000  # microseconds, of which a container may use its quota
LIMITS = {
    "Memory": 512 << 20,
    "MemorySwap": 512 << 20,
    "PidsLimit": 1024,
    "CpuPeriod": PERIOD,
    "CpuQuota": PERIOD // 2,
    "NetworkMode": "none",
}


READY = 2  # in the pool
CLAIMS = 3  # for each of what takes longer
NOT_SLOWER = 1.1  # times: so few samples of the same thing differ by a tenth


class Contained(Rival):
    """Create, exec and delete by the SDK and by the Engine, in turn, with one runtime.

    And creates that find a box ready, and what a program costs there whoever starts it: `fork +
    exec`, timed by another inside.
    """

    def __init__(self, runtime: str, *, faster: float = 0.0, burst: int = 0) -> None:
        """`faster`: how many times quicker than the Engine's an exec is to be."""
        self._runtime, self._burst = runtime, burst
        self._bare_create = Measure("Docker API: create + start", f"create on {runtime}")
        self._bare_exec = Measure("Docker API: exec `true`", f"exec on {runtime}")
        self._command = Measure("docker exec `true`", f"exec on {runtime}")
        self._bare_delete = Measure("Docker API: remove", f"delete on {runtime}")
        self._create = Measure(
            "Capsule SDK: create", f"create on {runtime}", bound=(self._bare_create, 1.3)
        )
        self._exec = Measure(
            "Capsule SDK: exec `true`",
            f"exec on {runtime}",
            bound=(self._bare_exec, 1 / faster) if faster else None,
        )
        self._delete = Measure(
            "Capsule SDK: delete", f"delete on {runtime}", bound=(self._bare_delete, NOT_SLOWER)
        )
        self._floor = Measure("inside it: fork + exec `true`", f"exec on {runtime}")
        self._run = Measure("Capsule SDK: run `print(1)`", f"run on {runtime}")
        self._warm = Measure("Capsule SDK: create, warm", f"create on {runtime}", target=TARGET)
        self._again = Measure("Capsule SDK: delete + create, warm", f"reset on {runtime}")
        self._reset = Measure(
            "Capsule SDK: reset", f"reset on {runtime}", bound=(self._again, QUICKER)
        )
        ours = [self._create, self._warm, self._exec, self._floor, self._run, self._delete]
        ours += [self._reset, self._again]
        bare = [self._bare_create, self._bare_exec, self._command, self._bare_delete]
        self.measures = [*ours, *bare]
        if burst:
            self._at_once = Measure(f"Capsule: {burst} at once", f"create on {runtime}")
            self.measures.append(self._at_once)
        self._begin()
        if self._api is not None:
            self._open_pool()

    def _begin(self) -> None:
        self._held = ExitStack()
        self._raw = b""  # bench/raw.c
        self._api: EngineApi | None = None
        try:
            self._open()
        except EngineMissing as missing:
            self.give_up(str(missing).splitlines()[0])

    def _open(self) -> None:
        shared = supervisor.acquire()
        api = EngineApi(shared.url)
        self._held.callback(api.close)
        if self._runtime not in api.runtimes():
            raise EngineMissing(f"the Engine at {shared.url} has no runtime {self._runtime}")
        self._image = shared.images(api).python
        settings = {
            "CAPSULE_PROVIDER": "docker",
            "CAPSULE_DOCKER_HOST": shared.url,
            "CAPSULE_DOCKER_RUNTIME": self._runtime,
            "CAPSULE_DOCKER_IMAGE": self._image,
        }
        self._settings = settings
        self._url = self._held.enter_context(capsule_server(self._burst + 16, **settings))
        self._client = self._held.enter_context(CapsuleClient(self._url))
        self._client.create("python").delete()  # the first looks at the image
        self._api = api
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="capsule-bench-"))
        os.chmod(folder, 0o755)
        self._program = Path(folder, "raw")
        self._floor.missing = compile_raw(self._program)
        self._raw = b"" if self._floor.missing else self._program.read_bytes()

    def _open_pool(self) -> None:
        pool = {"CAPSULE_POOL_MIN": str(READY), "CAPSULE_POOL_TEMPLATES": "python"}
        url = self._held.enter_context(capsule_server(16, **self._settings, **pool))
        self._pooled = self._held.enter_context(CapsuleClient(url))
        self._docker = shutil.which("docker") or ""
        self._command.missing = "" if self._docker else "docker's own command is not installed"

    def round(self, count: int) -> None:
        if self._api is None or self._create.missing:
            return
        try:
            for _ in range(max(1, count // 5)):  # each takes half a second
                self._ours()
                self._bare(self._api)
                self._claim()
            if self._burst and not self._at_once.samples:
                asyncio.run(self._many())
        except (httpx.HTTPError, EngineError, CapsuleError, CalledProcessError) as error:
            self.give_up(f"it failed: {error!r}")

    def _ours(self) -> None:
        with clock(self._create):
            sandbox = self._client.create("python")
        for _ in range(3):
            with clock(self._exec):
                sandbox.exec(["true"]).check()
        with clock(self._run):
            sandbox.run("print(1)").check()
        if self._raw:
            sandbox.write_file("raw", self._raw, mode=0o755)
            told = sandbox.exec(["./raw", "spawn", "3", "/bin/true"]).check()
            self._floor.samples += [float(line) for line in told.stdout.split()]
        with clock(self._delete):
            sandbox.delete()

    def _claim(self) -> None:
        """Returns when the pool is full again: to fill it is nobody else's time."""
        for _ in range(CLAIMS):
            self._filled()
            with clock(self._warm):
                sandbox = self._pooled.create("python")
            _only_warm(self._warm, sandbox)
            sandbox.delete()
        self._filled()
        sandbox = self._pooled.create("python")
        self._filled()
        with clock(self._reset):
            sandbox.reset()
        _only_warm(self._reset, sandbox)
        self._filled()
        with clock(self._again):
            sandbox.delete()
            sandbox = self._pooled.create("python")
        _only_warm(self._again, sandbox)
        sandbox.delete()
        self._filled()

    def _filled(self) -> None:
        deadline = time.monotonic() + 60
        while (shelf := self._pooled.pool().shelves[0]).ready < READY or shelf.launching:
            if time.monotonic() > deadline:
                raise EngineError(f"the pool has {shelf.ready} of {READY} after a minute")
            time.sleep(0.002)

    def _bare(self, api: EngineApi) -> None:
        with clock(self._bare_create):
            name = api.run(self._image, "sleep", "600", runtime=self._runtime, HostConfig=LIMITS)
        try:
            with clock(self._bare_exec):
                bare_exec(api, name)
            if self._docker:
                exec_true = [self._docker, "--host", api.url, "exec", name, "true"]
                self._command.samples.append(timed_ms(exec_true))
        finally:
            with clock(self._bare_delete):
                api.remove(name)

    async def _many(self) -> None:
        async with AsyncCapsuleClient(self._url) as client:
            start = time.perf_counter()

            async def one() -> float:
                sandbox = await client.create("python")
                took = (time.perf_counter() - start) * 1e3
                (await sandbox.exec(["true"])).check()
                await sandbox.delete()
                return took

            made = await asyncio.gather(*(one() for _ in range(self._burst)))
        self._at_once.samples = list(made)
        self._at_once.note = "100 % succeeded"

    def close(self) -> None:
        self._held.close()


def _only_warm(measure: Measure, sandbox: Capsule) -> None:
    if sandbox.info.started != "warm":
        measure.samples.pop()
        measure.note = "some started cold, and are left out"


class Roomy(Contained):
    """Exec in sandboxes that may use every core.

    For gVisor, whose own kernel runs on its sandbox's share: with half a core the scheduler takes
    the other half from whatever is measured, of us and of the Engine alike. And of a static binary:
    most of what a dynamic `true` takes there is its loader's page faults, whoever starts it.
    """

    def __init__(self, runtime: str, *, faster: float) -> None:
        self._runtime, self._burst = runtime, 0
        self._cores = os.cpu_count() or 1
        group = f"exec on {runtime}, all cores"
        self._bare_exec = Measure("Docker API: exec `true`", group)
        self._exec = Measure("Capsule SDK: exec `true`", group)
        self._floor = Measure("inside it: fork + exec `true`", group)
        static = f"{group}, static binary"
        self._bare_static = Measure("Docker API: exec static `true`", static)
        self._static = Measure(
            "Capsule SDK: exec static `true`", static, bound=(self._bare_static, 1 / faster)
        )
        self._static_floor = Measure("inside it: fork + exec static `true`", static)
        self.measures = [self._exec, self._floor, self._bare_exec]
        self.measures += [self._static, self._static_floor, self._bare_static]
        self._begin()

    def _open(self) -> None:
        super()._open()
        assert self._api is not None
        limits = {**LIMITS, "CpuQuota": self._cores * PERIOD, "Binds": [f"{self._program}:/raw:ro"]}
        command = ("sleep", "3600")
        api = self._api
        name = api.run(self._image, *command, runtime=self._runtime, HostConfig=limits)
        self._held.callback(api.remove, name)
        self._container = name
        self._sandbox = self._client.create("python", cpus=self._cores)
        self._held.callback(self._sandbox.delete)
        if self._raw:
            self._sandbox.write_file("raw", self._raw, mode=0o755)

    def round(self, count: int) -> None:
        if self._api is None or self._exec.missing:
            return
        try:
            for _ in range(count):
                with clock(self._exec):
                    self._sandbox.exec(["true"]).check()
            for _ in range(count):  # not in turn: each leaves its gVisor busy for a moment
                with clock(self._bare_exec):
                    bare_exec(self._api, self._container)
            if self._raw:
                self._inside(self._floor, "/bin/true")
                self._round_static(self._api, count)
        except (httpx.HTTPError, EngineError, CapsuleError) as error:
            self.give_up(f"it failed: {error!r}")

    def _round_static(self, api: EngineApi, count: int) -> None:
        for _ in range(count):
            with clock(self._static):
                self._sandbox.exec(["./raw", "true"]).check()
        for _ in range(count):
            with clock(self._bare_static):
                bare_exec(api, self._container, "/raw", "true")
        self._inside(self._static_floor)

    def _inside(self, measure: Measure, *program: str) -> None:
        told = self._sandbox.exec(["./raw", "spawn", "3", *program]).check()
        measure.samples += [float(line) for line in told.stdout.split()]


def bare_exec(api: EngineApi, container: str, *cmd: str) -> None:
    asked = {"Cmd": cmd or ["true"], "AttachStdout": True}
    made = api.call("POST", f"/containers/{container}/exec", asked)
    api.client.post(f"/exec/{made['Id']}/start", json={}).read()
