"""Runs real sandboxes for the tests, as whichever user starts it: one JSON object per line.

The suite hands this file's text to a Python of that user, so it imports nothing but Capsule. Each
request {"n", "op", …} is answered by {"n", …} when it is done; several may be under way at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from capsule import agentbin
from capsule.errors import CapsuleError, NotFoundError
from capsule.link.link import AgentLink
from capsule.model import ExecId, ExecRequest, Isolation, Limits, SandboxId, SandboxSpec, Template
from capsule.providers.contract import Box, Provider
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings

TEMPLATE = Template("escape", needs=("python3",), sudo=True)
TIDY = "exec rm -rf " + " ".join(
    f"{place}/{names}"
    for place in ("/workspace", "/tmp", "/var/tmp", "/dev/shm")
    for names in ("*", ".[!.]*", "..?*")
)


class Driver:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.providers: dict[str, Provider] = {}
        self.engines: dict[str, str] = {}
        self.templates: dict[str, Template] = {}
        self.boxes: dict[str, Box] = {}
        self.execs: dict[str, set[ExecId]] = {}

    async def open(self, level: str, image: str = "", **engine: Any) -> dict[str, Any]:
        """Where the level is missing: the reason, as an error. `engine` makes containers."""
        if level not in self.providers:
            home = self.base / level
            provider = _docker(home, engine) if engine else _local(home, level)
            await provider.open()
            self.providers[level] = provider
            self.engines[level] = engine.get("host", "")
            self.templates[level] = replace(TEMPLATE, image=image)
        return {}

    async def create(
        self, level: str, name: str, limits: dict[str, Any], image: str = ""
    ) -> dict[str, Any]:
        template = self.templates[level]
        spec = SandboxSpec(replace(template, image=image or template.image), Limits(**limits))
        box = await self.providers[level].launch(SandboxId(name), spec)
        self.boxes[name] = box
        unenforced = [each.what for each in box.unenforced]
        more = {"dir": str(self.base), "engine": self.engines.get(level)}
        if more["engine"]:
            more |= await _container(box)
        return {"unenforced": unenforced, **box.handle.data, **more}

    async def destroy(self, name: str) -> dict[str, Any]:
        await self.boxes.pop(name).destroy()
        return {}

    async def tidy(self, name: str, renamed: str) -> dict[str, Any]:
        """End what runs in it, remove what was written: as new, under another name."""
        link = self._link(name)
        for id in self.execs.pop(name, ()):
            with contextlib.suppress(NotFoundError):
                await link.kill(id)
        request = ExecRequest(("/bin/sh", "-c", TIDY), ExecId(f"{name}-tidy"), timeout=5.0, cwd="/")
        exit, out, err, _ = await link.collect(request)
        self.boxes[renamed] = self.boxes.pop(name)
        return {"clean": exit.exit_code == 0, "said": _text(out + err)}

    async def exec(
        self, name: str, argv: list[str], id: str, input: str | None = None, **options: Any
    ) -> dict[str, Any]:
        request = ExecRequest(
            tuple(argv), self._id(name, id), stdin=input is not None, **{"timeout": 15.0, **options}
        )
        exit, out, err, carry = await self._link(name).collect(
            request, input=(input or "").encode()
        )
        return {**asdict(exit), "out": _text(out), "err": _text(err), "carry": len(carry)}

    async def start(self, name: str, argv: list[str], id: str, **options: Any) -> dict[str, Any]:
        """The program runs on by itself; `wait` tells how it ended."""
        request = ExecRequest(tuple(argv), self._id(name, id), **{"timeout": 15.0, **options})
        async with await self._link(name).exec(request) as stream:
            return {"pid": stream.pid}

    async def wait(self, name: str, id: str) -> dict[str, Any]:
        async with await self._link(name).attach(self._id(name, id)) as stream:
            out = b"".join([item.data async for item in stream if hasattr(item, "data")])
            assert stream.exit is not None
            return {**asdict(stream.exit), "out": _text(out)}

    async def kill(self, name: str, id: str) -> dict[str, Any]:
        return {"running": await self._link(name).kill(self._id(name, id))}

    async def write(self, name: str, path: str, data: str, **options: Any) -> dict[str, Any]:
        return asdict(await self._link(name).write(path, base64.b64decode(data), **options))

    async def read(self, name: str, path: str, limit: int = 1 << 20) -> dict[str, Any]:
        async with self._link(name).read(path, length=limit) as reader:
            return {"data": _text(b"".join([chunk async for chunk in reader]))}

    async def list(self, name: str, path: str, **options: Any) -> dict[str, Any]:
        listing = await self._link(name).list(path, **options)
        return {"names": [entry.path for entry in listing.entries]}

    async def call(self, name: str, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Any other operation of the link that takes and gives plain values."""
        result = await getattr(self._link(name), method)(*arguments, **options)
        return {"result": asdict(result) if hasattr(result, "__dataclass_fields__") else result}

    async def names_seen(self, name: str, path: str, seconds: float) -> dict[str, Any]:
        """What `watch` reports about `path` within that time."""
        seen: list[str] = []
        async with self._link(name).watch(path) as changes:
            try:
                async with asyncio.timeout(seconds):
                    async for change in changes:
                        seen.append(change.path)  # noqa: PERF401 - what came before the end counts
            except TimeoutError:
                pass
        return {"names": seen}

    async def aclose(self) -> None:
        await asyncio.gather(*(_clear(provider) for provider in self.providers.values()))

    def _link(self, name: str) -> AgentLink:
        return AgentLink(self.boxes[name].connect)

    def _id(self, name: str, id: str) -> ExecId:
        """Unlike those that the same box had under another name."""
        unique = ExecId(f"{name}-{id}")
        self.execs.setdefault(name, set()).add(unique)
        return unique


async def _clear(provider: Provider) -> None:
    left = [handle async for handle in provider.owned()]
    await asyncio.gather(*(provider.discard(handle) for handle in left))
    await provider.aclose()


def _local(home: Path, level: str) -> Provider:
    isolation = Isolation(level)
    return LocalProvider(
        LocalSettings(home / "data", home / "run", agentbin.find(), isolation=isolation)
    )


def _docker(home: Path, engine: dict[str, Any]) -> Provider:
    from capsule.providers.docker.provider import DockerProvider
    from capsule.providers.docker.settings import DockerSettings

    places = home / "data", home / "run", agentbin.find()
    return DockerProvider(DockerSettings(*places, patience=4.0, pull="never", **engine))


async def _container(box: Box) -> dict[str, Any]:
    """What local boxes record. The keeper is pid 1, or the kernel it runs on."""
    from capsule.providers.docker.box import DockerBox

    assert isinstance(box, DockerBox)
    pid = (await box.state())["Pid"]
    return {"keeper": pid, "cgroups": await asyncio.to_thread(_cgroups, pid)}


def _cgroups(pid: int) -> list[str]:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    paths = [f"/sys/fs/cgroup/{names}{path}" for _, names, path in lines if path != "/"]
    return [path for path in paths if os.path.isdir(path)]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


async def answer(
    driver: Driver, line: bytes, say: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    request = json.loads(line)
    number = request.pop("n")
    arguments = request.pop("arguments", [])
    try:
        done = await getattr(driver, request.pop("op"))(*arguments, **request)
    except CapsuleError as error:
        done = {"error": type(error).__name__, "message": error.message}
    except Exception as error:
        done = {"error": type(error).__name__, "message": str(error), "broken": True}
    await say({"n": number, **done})


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    lock = asyncio.Lock()

    async def say(message: dict[str, Any]) -> None:
        async with lock:
            await asyncio.to_thread(_print, json.dumps(message))

    driver = Driver(Path(sys.argv[1]))
    tasks = set()
    try:
        while line := await reader.readline():
            task = asyncio.create_task(answer(driver, line, say))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        await driver.aclose()


# Whatever else is printed, as by a logger, is no answer.
ANSWERS = os.fdopen(os.dup(1), "w")


def _print(text: str) -> None:
    ANSWERS.write(text + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    os.dup2(2, 1)
    asyncio.run(main())
