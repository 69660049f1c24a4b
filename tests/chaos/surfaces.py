"""One class for each part of the API: what a client does there, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any, ClassVar

import httpx

from tests.api.client import SseEvent, events
from tests.chaos.client import GONE, Client, HomeLost
from tests.chaos.model import Cell

MIB = 1024 * 1024


class Surface:
    kind: ClassVar[str]

    def __init__(self, client: Client) -> None:
        self.client = client
        self.model = client.model
        self.dice = client.dice
        self.forget()

    def forget(self) -> None:
        """The home is gone, and what was in it."""

    async def step(self) -> None:
        raise NotImplementedError

    async def verify(self) -> None:
        """Everything that was answered holds."""

    async def moved(self) -> None:
        """The client leaves its home."""

    async def clear(self) -> None:
        """Delete what is left at the end."""

    def cell(self, of: str, what: str, value: Any = None) -> Cell:
        return Cell(self.model, self.kind, of, what, value)

    async def home(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """A request about the client's sandbox."""
        home = self.client.home
        answer = await self.client.ask(method, f"/v1/sandboxes/{home}/{path}", on=home, **options)
        if home in self.model.doomed:
            raise HomeLost
        return answer

    async def insist_home(self, method: str, path: str, **options: Any) -> httpx.Response:
        home = self.client.home
        answer = await self.client.insist(
            method, f"/v1/sandboxes/{home}/{path}", on=home, **options
        )
        if home in self.model.doomed:
            raise HomeLost
        return answer

    def expect(self, answer: httpx.Response, on: str, *statuses: int) -> bool:
        return self.client.expect(answer, self.kind, on, *statuses)


class Execs(Surface):
    """An exec with a key runs at most once, and has one answer."""

    kind = "execs"

    def forget(self) -> None:
        self.answers: dict[str, Any] = {}  # by key; None: not answered
        self.cramped: set[str] = set()  # ran while the disk was full

    async def step(self) -> None:
        known = list(self.answers)[-20:]
        again = known and self.dice.random() < 0.4
        key = self.dice.choice(known) if again else self.client.new("exec")
        is_new, full = key not in self.answers, self.model.full
        self.answers.setdefault(key, None)
        if full:
            self.cramped.add(key)
        pause = sum(key.encode()) % 20 / 100
        body = {"cmd": f"echo {key} >> log; sleep {pause}; echo {key}; exit 7"}
        answer = await self.home("POST", "execs", key=key, json=body)
        if answer is None:
            return
        before = self.answers[key]
        if before is None and not is_new and answer.status_code == 410:
            lost = answer.json()["error"]["details"].get("lost")
            self.model.check(self.kind, key, "an exec whose result is lost says so", True, lost)
        elif self.expect(answer, self.client.home, 200):
            body = answer.json()
            result = tuple(body[name] for name in ("stdout", "exit_code", "reason", "exec_id"))
            if before is not None:
                what = "the answer of an exec, asked for again with its key"
                self.model.check(self.kind, self.client.home, what, before, result)
                return
            if key not in self.cramped:
                wanted = (f"{key}\n", 7, "exited")
                what = "the answer of an exec"
                self.model.check(self.kind, self.client.home, what, wanted, result[:3])
            self.answers[key] = self.model.acknowledged(self.kind, result)
            if is_new:
                self.model.owe("exec.finished", self.client.home, result[3])

    async def verify(self) -> None:
        if not self.answers:
            return
        answer = await self.insist_home("GET", "files/workspace/log")
        ran = Counter(answer.text.split() if answer.is_success else [])
        for key, known in self.answers.items():
            may_be = (1,) if known and key not in self.cramped else (0, 1)
            times = ran[key] if ran[key] not in may_be else may_be[0]
            self.model.check(self.kind, self.client.home, f"runs of {key}", may_be[0], times)


class Streams(Surface):
    """Output that is read in parts, from offset to offset: no gap, no repeat."""

    kind = "streams"

    def forget(self) -> None:
        self.key, self.id, self.offset, self.event = "", "", 0, ""
        self.text = ""

    async def step(self) -> None:
        if not self.key:
            self.key, count = self.client.new("stream"), self.dice.randrange(50, 500)
            self.text = "".join(f"{n}\n" for n in range(count))
        if self.id:
            await self.read(self.dice.uniform(0.02, 0.5))
            return
        script = f"n=0; while [ $n -lt {self.text.count(chr(10))} ]; do echo $n; n=$((n+1)); "
        body = {"cmd": script + "sleep 0.01; done", "timeout_ms": 600_000}
        answer = await self.home("POST", "execs?wait=false", key=self.key, json=body)
        if answer is not None and self.expect(answer, self.client.home, 202):
            self.id = answer.json()["exec_id"]
            self.text = self.model.acknowledged(self.kind, self.text)
        elif answer is not None:
            self.forget()

    async def read(self, seconds: float) -> None:
        path = f"/v1/sandboxes/{self.client.home}/execs/{self.id}/stream?stdout={self.offset}"
        headers = {"Accept": "text/event-stream"}
        if self.event and self.dice.random() < 0.5:
            headers["Last-Event-ID"] = self.event
        try:
            async with (
                asyncio.timeout(seconds),
                self.client.http.stream("GET", path, headers=headers) as answer,
            ):
                if answer.status_code == 200:
                    async for event in events(answer):
                        self.take(event)
                elif answer.status_code not in (429, 503):
                    await answer.aread()
                    if self.client.home not in self.model.doomed:
                        self.expect(answer, self.client.home, 200)
                    self.forget()
        except (TimeoutError, httpx.TransportError):
            self.model.counts["streams cut"] += 1
        if self.client.home in self.model.doomed:
            raise HomeLost

    def take(self, event: SseEvent) -> None:
        home = self.client.home
        if event.name == "stdout":
            data = event.data["data"]
            wanted = (self.offset, self.text[self.offset :][: len(data)])
            seen = (event.data["offset"], data)
            self.model.check(self.kind, home, f"output of {self.id}", wanted, seen)
            self.offset, self.event = event.data["offset"] + len(data), event.id
        elif event.name == "exit":
            wanted, seen = (len(self.text), 0), (self.offset, event.data["exit_code"])
            self.model.check(self.kind, home, f"length and end of {self.id}", wanted, seen)
            self.forget()
        elif event.name == "gap":
            self.model.violated(self.kind, home, f"output of {self.id}", "no gap", event.data)

    async def verify(self) -> None:
        for _ in range(20):
            if self.id:
                await self.read(5.0)


class Contexts(Surface):
    """Variables are kept, and a context that nobody broke answers."""

    kind = "contexts"

    def forget(self) -> None:
        self.cells: dict[str, Cell] = {}  # what `v` is in each, by its id

    async def step(self) -> None:
        if not self.cells or self.dice.random() < 0.1:
            await self.begin()
            return
        id = self.dice.choice(list(self.cells))
        chance = self.dice.random()
        if chance < 0.5:
            await self.write(id, self.client.new("v"))
        elif chance < 0.85:
            await self.read(id)
        elif chance < 0.95:
            await self.restart(id)
        else:
            await self.home("DELETE", f"contexts/{id}")
            del self.cells[id]

    async def begin(self) -> None:
        if len(self.cells) < 4:
            answer = await self.home("POST", "contexts", json={"language": "python"})
            if answer is not None and self.expect(answer, self.client.home, 200, 201):
                id = answer.json()["id"]
                self.cells[id] = self.cell(self.client.home, f"v in {id}", "None")
        id = "default-python"
        if id not in self.cells:
            self.cells[id] = self.cell(self.client.home, f"v in {id}", "None")

    async def run(self, id: str, code: str) -> str | None:
        path = "contexts/run" if id == "default-python" else f"contexts/{id}/run"
        answer = await self.home("POST", path, json={"code": code})
        if answer is None:
            return None
        if not self.expect(answer, self.client.home, 200):
            self.client.worn = True  # and complain once, not with every step
            return None
        body = answer.json()
        if not self.model.full:
            what = f"status of a run in {id}"
            self.model.check(self.kind, self.client.home, what, "ok", body["status"])
        return str(body["stdout"])

    async def write(self, id: str, value: str) -> None:
        cell = self.cells[id]
        cell.tried(value)
        if await self.run(id, f"v = {value!r}; print(v)") is not None:
            cell.answered(value)

    async def read(self, id: str) -> None:
        cell = self.cells[id]
        if (said := await self.run(id, "print(globals().get('v'))")) is not None:
            cell.seen(said.strip())

    async def restart(self, id: str) -> None:
        cell = self.cells[id]
        cell.tried("None")
        answer = await self.home("POST", f"contexts/{id}/restart")
        # The default one is made by its first run, which may not have come.
        if answer is not None and self.expect(answer, self.client.home, 200, 404):
            cell.answered("None")

    async def verify(self) -> None:
        for id in list(self.cells):
            await self.read(id)


class Files(Surface):
    """A file is the old one or the new one."""

    kind = "files"

    def forget(self) -> None:
        self.cells: dict[str, Cell] = {}

    async def step(self) -> None:
        name, chance = f"f{self.dice.randrange(4)}", self.dice.random()
        path, cell = f"files/workspace/{name}", self.cells.get(name)
        if cell is None:
            cell = self.cells[name] = self.cell(self.client.home, f"content of {name}")
        if chance < 0.4:
            content = self.dice.randbytes(self.dice.choice((10, 5_000, 300_000)))
            cell.tried(content)
            answer = await self.home("PUT", path, content=content)
            if answer is not None and self.expect(answer, self.client.home, 200):
                self.settle(cell, content)
        elif chance < 0.5:
            cell.tried(None)
            answer = await self.home("DELETE", path)
            if answer is not None and self.expect(answer, self.client.home, 200, 404):
                self.settle(cell, None)
        else:
            await self.read(name)

    def settle(self, cell: Cell, value: Any) -> None:
        """A sandbox's disk is sparse: what is written while the server's is full may be lost."""
        if not self.model.full:
            cell.answered(value)

    async def read(self, name: str) -> None:
        answer = await self.home("GET", f"files/workspace/{name}")
        if answer is not None and self.expect(answer, self.client.home, 200, 404):
            self.cells[name].seen(answer.content if answer.is_success else None)

    async def verify(self) -> None:
        for name in self.cells:
            await self.read(name)


class Kept(Surface):
    """Of a sandbox's files, by a marker that is written before."""

    async def mark(self, content: str) -> bool:
        """False: the disk is full, so nothing is certain."""
        answer = await self.insist_home("PUT", "files/workspace/marker", content=content.encode())
        return self.expect(answer, self.client.home, 200) and not self.model.full

    async def marker(self, id: str) -> str:
        answer = await self.client.insist("GET", f"/v1/sandboxes/{id}/files/workspace/marker", on=id)
        return answer.text


class Snapshots(Kept):
    """A snapshot is there with all of its files, or not at all."""

    kind = "snapshots"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.cells: dict[str, Cell] = {}  # what its marker is, by name

    async def step(self) -> None:
        chance, names = self.dice.random(), list(self.cells)
        if not names or (chance < 0.4 and len(names) < 5):
            name = self.client.new("snapshot")
            if not await self.mark(name):
                return
            cell = self.cells[name] = self.cell(name, "its marker")
            cell.tried(name)
            answer = await self.home("POST", "snapshots", json={"name": name})
            if answer is not None and self.expect(answer, name, 200, 201):
                cell.answered(name)
        elif chance < 0.7:
            await self.look(self.dice.choice(names))
        else:
            await self.remove(self.dice.choice(names))

    async def look(self, name: str) -> None:
        answer = await self.client.insist("GET", f"/v1/snapshots/{name}", on=name)
        if not self.expect(answer, name, 200, 404):
            return
        seen = None
        if answer.is_success:
            id = await self.client.create(self.client.new("copy"), snapshot=name)
            seen = await self.marker(id)
            await self.client.delete(id)
        self.cells[name].seen(seen)

    async def remove(self, name: str) -> None:
        await self.look(name)
        answer = await self.client.ask("DELETE", f"/v1/snapshots/{name}", on=name)
        if answer is None:
            answer = await self.client.insist("DELETE", f"/v1/snapshots/{name}", on=name)
        if self.expect(answer, name, 200, 404):
            self.cells[name].answered(None)
        await self.look(name)
        del self.cells[name]

    async def verify(self) -> None:
        for name in self.cells:
            await self.look(name)

    async def clear(self) -> None:
        for name in list(self.cells):
            await self.remove(name)


class Forks(Kept):
    """All of them, or none."""

    kind = "forks"

    async def step(self) -> None:
        home, count = self.client.home, self.dice.randint(1, 5)
        marker = self.client.new("fork")
        if not await self.mark(marker):
            return
        answer = await self.home("POST", "fork", json={"count": count})
        if answer is not None and not self.expect(answer, home, 200, 201):
            return
        recorded = self.model.acknowledged(self.kind, count) if answer is not None else 0
        others = await self.settled(recorded, count)
        if answer is not None:
            self.model.check(self.kind, home, f"forks of {count}", recorded, len(others))
            for id in others:
                self.model.owe("sandbox.created", id)
        elif len(others) not in (0, count):
            what = "forks after no answer"
            self.model.violated(self.kind, home, what, f"0 or {count}", len(others))
        for id in others[:1]:
            self.model.check(self.kind, home, "a fork's file", marker, await self.marker(id))
        for id in others:
            await self.client.delete(id)
        if home in self.model.doomed:
            raise HomeLost

    async def settled(self, *counts: int) -> list[str]:
        """Those that there are; while there are others than these, it may not be over yet."""
        others: list[str] = []
        for _ in range(50):
            labelled = await self.client.labelled(self.client.label)
            others = [id for id in labelled if id != self.client.home]
            if len(others) in counts:
                break
            await asyncio.sleep(0.1)
        return others


class Volumes(Surface):
    """What was written into a volume outlives sandboxes, kills, and a full disk."""

    kind = "volumes"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.name, self.box = "", ""
        self.content = self.cell("", "")

    @property
    def path(self) -> str:
        return f"/v1/sandboxes/{self.box}/files/mnt/v/data"

    async def step(self) -> None:
        chance = self.dice.random()
        if not self.name:
            await self.make()
        elif not self.box:
            if chance < 0.2:
                await self.remove()
            else:
                await self.mount()
        elif chance < 0.4:
            content = self.dice.randbytes(self.dice.choice((10, 100_000)))
            self.content.tried(content)
            answer = await self.client.ask("PUT", self.path, on=self.name, content=content)
            if answer is not None and self.expect(answer, self.name, 200):
                self.content.answered(content)
        elif chance < 0.8:
            await self.read()
        elif chance < 0.9:
            answer = await self.client.ask("DELETE", f"/v1/volumes/{self.name}", on=self.name)
            if answer is not None:
                self.expect(answer, self.name, 409)
        else:
            await self.moved()

    async def make(self) -> None:
        name = self.client.new("volume")
        sized = os.getuid() == 0 and self.can_size and self.dice.random() < 0.5
        body = {"name": name, **({"size": 16 * MIB} if sized else {})}
        answer = await self.client.ask("POST", "/v1/volumes", on=name, json=body)
        if answer is not None and not self.expect(answer, name, 200, 201):
            return
        found = await self.client.insist("GET", f"/v1/volumes/{name}", on=name)
        if self.expect(found, name, 200, *(() if answer is not None else (404,))):
            if found.is_success:
                self.name, self.content = name, self.cell(name, "its file")

    can_size: ClassVar[bool] = True  # False: an ordinary user runs the server

    async def mount(self) -> None:
        volumes = [{"name": self.name, "path": "/mnt/v"}]
        self.box = await self.client.create(self.client.new("mount"), volumes=volumes)

    async def read(self) -> None:
        answer = await self.client.insist("GET", self.path, on=self.name)
        if self.expect(answer, self.name, 200, 404):
            self.content.seen(answer.content if answer.is_success else None)

    async def verify(self) -> None:
        if self.name:
            if not self.box:
                await self.mount()
            await self.read()

    async def moved(self) -> None:
        if self.box:
            box, self.box = self.box, ""
            await self.client.delete(box)

    async def remove(self) -> None:
        path = f"/v1/volumes/{self.name}"
        answer = await self.client.ask("DELETE", path, on=self.name)
        statuses = (200,)
        if answer is None:
            answer, statuses = await self.client.insist("DELETE", path, on=self.name), (200, 404)
        self.expect(answer, self.name, *statuses)
        self.expect(await self.client.insist("GET", path, on=self.name), self.name, 404)
        self.name = ""

    async def clear(self) -> None:
        await self.moved()
        if self.name:
            await self.remove()


class Sessions(Surface):
    """A session's variables, files and log outlive the server; its files also its sandbox."""

    kind = "sessions"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.id, self.open = "", False
        self.begin("")

    def begin(self, id: str) -> None:
        self.id, self.open = id, True
        self.variable = self.cell(id, "v", "None")
        self.file = self.cell(id, "its file")
        self.log: dict[str, bool] = {}  # what was run, and whether it was answered

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        return await self.client.ask(method, f"/api/{path}", on=self.id, **options)

    async def step(self) -> None:
        chance = self.dice.random()
        if not self.id:
            await self.make()
        elif len(self.log) > 40 or chance < 0.03:
            await self.verify()
            await self.clear()
        elif not self.open:
            await self.reopen()
        elif chance < 0.3:
            value = self.client.new("v")
            self.variable.tried(value)
            if await self.execute(f"v = {value!r}; print(v)") is not None:
                self.variable.answered(value)
        elif chance < 0.55:
            await self.read()
        elif chance < 0.75:
            content = self.client.new("content")
            self.file.tried(content)
            body = {"session_id": self.id, "path": "f", "content": content}
            answer = await self.ask("POST", "e2b/files", json=body)
            if answer is not None and self.expect(answer, self.id, 200) and not self.model.full:
                self.file.answered(content)
        elif chance < 0.92:
            await self.read_file()
        else:
            await self.close()

    async def make(self) -> None:
        id = self.client.new("session")
        body = {"session_id": id, "environment": "Python3", "provider": "local"}
        answer = await self.client.ask("POST", "/api/sessions", on=id, json=body)
        if answer is not None and not self.expect(answer, id, 200, 201):
            return
        found = await self.client.insist("GET", f"/api/sessions/{id}", on=id)
        if self.expect(found, id, 200, *(() if answer is not None else (404,))):
            if found.is_success:
                self.begin(id)
                self.open = False  # as far as we know: to reopen an open one changes nothing

    async def execute(self, code: str) -> str | None:
        mark = self.client.new("mark")
        self.log[mark] = False
        body = {"session_id": self.id, "code": f"{code}  # {mark}"}
        answer = await self.ask("POST", "e2b/execute", json=body)
        if answer is None:
            return None
        if not self.expect(answer, self.id, 200):
            await self.clear()  # and complain once, not with every step
            return None
        said = answer.json()
        if not self.model.full:
            self.model.check(self.kind, self.id, "status of a run", "ok", said["status"])
            self.log[mark] = True
        return str(said["stdout"])

    async def read(self) -> None:
        if (said := await self.execute("print(globals().get('v'))")) is not None:
            self.variable.seen(said.strip())

    async def read_file(self) -> None:
        answer = await self.ask("GET", f"e2b/files/{self.id}", params={"path": "f"})
        if answer is not None and self.expect(answer, self.id, 200, 404):
            self.file.seen(answer.json()["content"] if answer.is_success else None)

    async def close(self) -> None:
        self.variable.tried("None")
        self.open = False
        answer = await self.ask("POST", f"sessions/{self.id}/close")
        if answer is not None and self.expect(answer, self.id, 200):
            self.variable.answered("None")

    async def reopen(self) -> None:
        answer = await self.ask("POST", f"sessions/{self.id}/reopen")
        if answer is not None:
            self.open = self.expect(answer, self.id, 200)

    async def verify(self) -> None:
        if not self.id:
            return
        answer = await self.client.insist(
            "GET", f"/api/sessions/{self.id}/executions", on=self.id, params={"limit": 1000}
        )
        if not self.expect(answer, self.id, 200):
            return
        logged = answer.json()["executions"]
        for mark, answered in self.log.items():
            found = [each["status"] for each in logged if each["command"].endswith(f"# {mark}")]
            if answered or len(found) > 1:
                self.model.check(self.kind, self.id, f"in the log of {mark}", ["ok"], found)
        if self.open and not self.client.worn:
            await self.read()
            await self.read_file()

    async def moved(self) -> None:
        if self.client.worn:
            await self.clear()

    async def clear(self) -> None:
        if self.id:
            id, self.id = self.id, ""
            await self.client.insist("DELETE", f"/api/sessions/{id}", on=id)


ALL: tuple[type[Surface], ...] = (
    Execs, Streams, Contexts, Files, Snapshots, Forks, Volumes, Sessions,
)  # fmt: skip
