"""One class for each part of the API: what a client does there, and what must hold afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar, TypeVar

import httpx

from tests.api.client import SseEvent, events
from tests.chaos.client import GONE, Client, HomeLost
from tests.chaos.model import Cell

SIZE = {"size": 16 * 1024 * 1024}
DEFAULT = "default-python"
Answer = TypeVar("Answer", httpx.Response, httpx.Response | None)


class Surface:
    kind: ClassVar[str]

    def __init__(self, client: Client) -> None:
        self.client = client
        self.model = client.model
        self.dice = client.dice
        self.name = ""  # what requests are about; the client's home otherwise
        self.forget()

    def forget(self) -> None:
        """The home is gone, and what was in it."""

    async def step(self) -> None:
        raise NotImplementedError

    async def verify(self) -> None:
        """Everything that was answered holds."""

    async def leave(self) -> None:
        """The client leaves its home."""

    async def clear(self) -> None:
        """Delete what is left at the end."""

    @property
    def on(self) -> str:
        return self.name or self.client.home

    def cell(self, what: str, value: Any = None) -> Cell:
        return Cell(self.model, self.kind, self.on, what, value)

    def check(self, what: str, expected: object, seen: object) -> None:
        self.model.check(self.kind, self.on, what, expected, seen)

    def expect(self, answer: httpx.Response, *statuses: int) -> bool:
        return self.client.expect(answer, self.kind, self.on, *statuses)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """A path without a slash at its front is one of the client's home."""
        return self._at_home(
            path, await self.client.ask(method, self._full(path), on=self.on, **options)
        )

    async def insist(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = await self.client.insist(method, self._full(path), on=self.on, **options)
        return self._at_home(path, answer)

    def _full(self, path: str) -> str:
        return path if path.startswith("/") else f"/v1/sandboxes/{self.client.home}/{path}"

    def _at_home(self, path: str, answer: Answer) -> Answer:
        if not path.startswith("/") and self.client.home in self.model.doomed:
            raise HomeLost
        return answer

    async def make(self, path: str, body: dict[str, Any]) -> bool:
        """Whether what has this name is there: certainly, if its making was answered."""
        made = await self.ask("POST", path, json=body)
        found = await self.insist("GET", f"{path}/{self.name}")
        if made is not None:
            self.expect(made, 200, 201)
        return self.expect(found, 200, *(() if made else (404,))) and found.is_success

    async def delete(self, path: str) -> None:
        """Until it is answered. What is asked for again may be gone."""
        answer = await self.ask("DELETE", path)
        if answer is not None:
            self.expect(answer, 200)
        else:
            self.expect(await self.insist("DELETE", path), 200, *GONE)

    async def change(
        self, cell: Cell, value: Any, method: str, path: str, *also: int, **options: Any
    ) -> bool:
        """Whether it was answered: then the cell has this value, else it may have it."""
        cell.tried(value)
        answer = await self.ask(method, path, **options)
        if answer is None or not self.expect(answer, 200, 201, *also):
            return False
        if cell.certain:
            cell.answered(value)
        return True

    async def look(self, cell: Cell, path: str, **options: Any) -> None:
        """What a file is; None: it is not there."""
        answer = await self.ask("GET", path, **options)
        if answer is not None and self.expect(answer, 200, 404):
            cell.seen(answer.content if answer.is_success else None)


class Execs(Surface):
    """An exec with a key runs at most once, and has one answer."""

    kind = "execs"

    def forget(self) -> None:
        self.answers: dict[str, Any] = {}  # by key; None: not answered
        self.cramped: set[str] = set()  # ran while the disk was full

    async def step(self) -> None:
        known = list(self.answers)[-20:]
        again = known and self.dice.random() < 0.4
        await self.run(self.dice.choice(known) if again else self.client.new("exec"))

    async def run(self, key: str) -> None:
        again = key in self.answers
        before, full = self.answers.setdefault(key, None), self.model.full
        if full:
            self.cramped.add(key)
        pause = sum(key.encode()) % 20 / 100
        body = {"cmd": f"echo {key} >> log; sleep {pause}; echo {key}; exit 7"}
        answer = await self.ask("POST", "execs", key=key, json=body)
        if answer is None:
            return
        if before is None and again and answer.status_code == 410:
            lost = answer.json()["error"]["details"].get("lost")
            self.check("what is said of a lost result", True, lost)
        elif self.expect(answer, 200):
            said = answer.json()
            result = tuple(said[name] for name in ("stdout", "exit_code", "reason", "exec_id"))
            if key in self.cramped:
                self.model.retold.add(said["exec_id"])
            if before is not None:
                self.check("an exec's answer, asked for again", before, result)
                return
            if key not in self.cramped:
                self.check("an exec's answer", (f"{key}\n", 7, "exited"), result[:3])
            self.answers[key] = self.model.acknowledged(self.kind, result)
            if not again:
                self.model.owe("exec.finished", self.client.home, result[3])

    async def verify(self) -> None:
        if self.answers:
            answer = await self.insist("GET", "files/workspace/log")
            ran = Counter(answer.text.split() if answer.is_success else [])
            for key, known in self.answers.items():
                certain = known and key not in self.cramped
                may_be = 1 if certain else min(ran[key], 1)
                self.check("runs of an exec with a key", may_be, ran[key])
            for key in list(self.answers)[-3:]:
                await self.run(key)


class Streams(Surface):
    """Output that is read in parts, from offset to offset: no gap, no repeat."""

    kind = "streams"

    def forget(self) -> None:
        self.key, self.id, self.offset, self.event, self.text = "", "", 0, "", ""

    async def step(self) -> None:
        if self.id:
            await self.read(self.dice.uniform(0.02, 0.5))
            return
        if not self.key:
            self.key, lines = self.client.new("stream"), self.dice.randrange(50, 500)
            self.text = "".join(f"{n}\n" for n in range(lines))
        lines = self.text.count("\n")
        script = f"n=0; while [ $n -lt {lines} ]; do echo $n; n=$((n+1)); sleep 0.01; done"
        body = {"cmd": script, "timeout_ms": 600_000}
        answer = await self.ask("POST", "execs?wait=false", key=self.key, json=body)
        if answer is not None and self.expect(answer, 202):
            self.id = answer.json()["exec_id"]
            if self.model.full:
                self.model.retold.add(self.id)
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
                        self.expect(answer, 200)
                    self.forget()
        except (TimeoutError, httpx.TransportError):
            self.model.counts["streams cut"] += 1
        if self.client.home in self.model.doomed:
            raise HomeLost

    def take(self, event: SseEvent) -> None:
        if event.name == "stdout":
            offset, data = event.data["offset"], event.data["data"]
            wanted = self.text[self.offset :][: len(data)]
            self.check("the next output of a stream", (self.offset, wanted), (offset, data))
            self.offset, self.event = offset + len(data), event.id
        elif event.name == "exit":
            seen = (self.offset, event.data["exit_code"])
            self.check("length and end of a stream", (len(self.text), 0), seen)
            self.forget()
        else:
            self.check("an event of a stream", False, event.name == "gap")

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
        if not self.cells or (len(self.cells) < 4 and self.dice.random() < 0.1):
            answer = await self.ask("POST", "contexts", json={"language": "python"})
            if answer is not None and self.expect(answer, 200, 201):
                self.cells[answer.json()["id"]] = self.cell("v of a context", "None")
            self.cells.setdefault(DEFAULT, self.cell("v of the default context", "None"))
        id, chance = self.dice.choice(list(self.cells)), self.dice.random()
        cell = self.cells[id]
        if chance < 0.5:
            cell.tried(value := self.client.new("v"))
            if await self.run(id, f"v = {value!r}; print(v)") is not None:
                cell.answered(value)
        elif chance < 0.85:
            await self.read(id)
        elif chance < 0.95 or id == DEFAULT:
            # The default one is made by its first run, which may not have come.
            await self.change(cell, "None", "POST", f"contexts/{id}/restart", 404)
        else:
            await self.ask("DELETE", f"contexts/{id}")
            del self.cells[id]

    async def run(self, id: str, code: str) -> str | None:
        path = "contexts/run" if id == DEFAULT else f"contexts/{id}/run"
        answer = await self.ask("POST", path, json={"code": code})
        if answer is None or not self.expect(answer, 200):
            return None
        if not self.model.full:
            self.check("status of a run", "ok", answer.json()["status"])
        return str(answer.json()["stdout"])

    async def read(self, id: str) -> None:
        if (said := await self.run(id, "print(globals().get('v'))")) is not None:
            self.cells[id].seen(said.strip())

    async def verify(self) -> None:
        for id in self.cells:
            await self.read(id)


class Files(Surface):
    """A file is the old one or the new one."""

    kind = "files"

    def forget(self) -> None:
        self.cells: dict[str, Cell] = {}  # by path

    async def step(self) -> None:
        path, chance = f"files/workspace/f{self.dice.randrange(4)}", self.dice.random()
        cell = self.cells.setdefault(path, self.cell("a file"))
        if chance < 0.4:
            content = self.dice.randbytes(self.dice.choice((10, 5_000, 2_000_000)))
            await self.change(cell, content, "PUT", path, content=content)
        elif chance < 0.5:
            await self.change(cell, None, "DELETE", path, 404)
        else:
            await self.look(cell, path)

    async def verify(self) -> None:
        for path, cell in self.cells.items():
            await self.look(cell, path)
        if self.cells:
            entries = (await self.insist("GET", "dirs/workspace")).json().get("entries", [])
            known = {"f0", "f1", "f2", "f3", "log", "marker"}
            self.check("halves of files", set(), {each["name"] for each in entries} - known)


class Kept(Surface):
    """Of a sandbox's files, by a marker that is written before."""

    async def mark(self, marker: str) -> bool:
        """False: the disk is full, so nothing is certain."""
        answer = await self.insist("PUT", "files/workspace/marker", content=marker.encode())
        return self.expect(answer, 200) and not self.model.full

    async def marker(self, id: str) -> str:
        path = f"/v1/sandboxes/{id}/files/workspace/marker"
        return (await self.client.insist("GET", path, on=id)).text


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
            if await self.mark(name):
                cell = self.cells[name] = self.cell(f"the marker of {name}")
                await self.change(cell, name, "POST", "snapshots", json={"name": name})
        elif chance < 0.7:
            await self.begin(self.dice.choice(names))
        else:
            await self.remove(self.dice.choice(names))

    async def begin(self, name: str) -> None:
        """Begin a sandbox from it."""
        answer = await self.insist("GET", f"/v1/snapshots/{name}")
        if self.expect(answer, 200, 404):
            seen = None
            if answer.is_success:
                id = await self.client.create(self.client.new("copy"), snapshot=name)
                seen = await self.marker(id)
                await self.client.delete(id)
            self.cells[name].seen(seen)

    async def remove(self, name: str) -> None:
        await self.begin(name)
        if self.cells[name].may_be != [None]:
            await self.delete(f"/v1/snapshots/{name}")
            self.cells[name].answered(None)
        await self.begin(name)
        del self.cells[name]

    async def verify(self) -> None:
        for name in self.cells:
            await self.begin(name)

    async def clear(self) -> None:
        for name in list(self.cells):
            await self.remove(name)


class Forks(Kept):
    """All of them, or none."""

    kind = "forks"

    async def step(self) -> None:
        count, marker = self.dice.randint(1, 5), self.client.new("fork")
        if not await self.mark(marker):
            return
        answer = await self.ask("POST", "fork", json={"count": count})
        if answer is not None and not self.expect(answer, 200, 201):
            return
        recorded = self.model.acknowledged(self.kind, count) if answer is not None else 0
        others = await self.settled({recorded, count})
        if answer is not None:
            self.check("forks", recorded, len(others))
            for id in others:
                self.model.owe("sandbox.created", id)
        elif others:
            self.check("forks without an answer, if there are any", count, len(others))
        for id in others[:1]:
            self.check("a fork's file", marker, await self.marker(id))
        for id in others:
            await self.client.delete(id)

    async def settled(self, counts: set[int]) -> list[str]:
        """Those that there are. While they are not so many, it may not be over yet."""
        for _ in range(50):
            labelled = await self.client.labelled(self.client.label)
            others = [id for id in labelled if id != self.client.home]
            if len(others) in counts:
                break
            await asyncio.sleep(0.1)
        return others


class Resets(Kept):
    """One box or the other: as it was, or as new."""

    kind = "resets"

    async def step(self) -> None:
        marker = self.client.new("reset")
        if self.dice.random() > 0.3 or not await self.mark(marker):
            return
        answer = await self.ask("POST", "reset")
        if answer is not None and not self.expect(answer, 200):
            return
        found = await self.insist("GET", "files/workspace/marker")
        was_reset = self.model.acknowledged(self.kind, found.status_code == 404)
        if answer is not None:
            self.check("whether a reset was one", True, was_reset)
        if found.status_code == 404:
            for surface in self.client.surfaces:
                surface.forget()
        else:
            self.check("a file after no answer", marker, found.text)


class Volumes(Surface):
    """What was written into a volume outlives sandboxes, kills, and a full disk."""

    kind = "volumes"
    sized: ClassVar[bool] = True  # False: an ordinary user runs the server

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.box = ""
        self.unsure: list[str] = []  # deleted while that could not be recorded: they may come back
        self.content = self.cell("")

    @property
    def path(self) -> str:
        return f"/v1/volumes/{self.name}"

    @property
    def file(self) -> str:
        return f"/v1/sandboxes/{self.box}/files/mnt/v/data"

    async def step(self) -> None:
        chance = self.dice.random()
        if not self.name:
            await self.begin()
        elif not self.box:
            await (self.clear() if chance < 0.2 else self.mount())
        elif chance < 0.4:
            content = self.dice.randbytes(self.dice.choice((10, 100_000)))
            await self.change(self.content, content, "PUT", self.file, content=content)
        elif chance < 0.8:
            await self.look(self.content, self.file)
        elif chance < 0.9:
            if (answer := await self.ask("DELETE", self.path)) is not None:
                self.expect(answer, 409)
        else:
            await self.leave()

    async def begin(self) -> None:
        self.name = self.client.new("volume")
        sized = self.sized and self.dice.random() < 0.5
        self.content = self.cell("a volume's file")
        if not await self.make("/v1/volumes", {"name": self.name, **(SIZE if sized else {})}):
            self.name = ""

    async def mount(self) -> None:
        volumes = [{"name": self.name, "path": "/mnt/v"}]
        self.box = await self.client.create(self.client.new("mount"), volumes=volumes)

    async def verify(self) -> None:
        if self.name:
            if not self.box:
                await self.mount()
            await self.look(self.content, self.file)

    async def leave(self) -> None:
        if self.box:
            box, self.box = self.box, ""
            await self.client.delete(box)
            if box in self.model.retold:
                self.unsure.append(box)

    async def clear(self) -> None:
        await self.leave()
        while self.unsure:
            path = f"/v1/sandboxes/{self.unsure.pop()}"
            self.expect(await self.insist("DELETE", path), 200, *GONE)
        if self.name:
            await self.delete(self.path)
            self.expect(await self.insist("GET", self.path), 404)
            self.name = ""


class Sessions(Surface):
    """A session's variables, files and log outlive the server; its files also its sandbox."""

    kind = "sessions"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.fresh()

    def fresh(self) -> None:
        self.open = False  # as far as we know
        self.variable, self.file = (
            self.cell("v of a session", "None"),
            self.cell("a session's file"),
        )
        self.log: dict[str, bool] = {}  # what was run, and whether it was answered
        self.artifacts: dict[str, str] = {}  # content by path

    @property
    def path(self) -> str:
        return f"/api/sessions/{self.name}"

    async def step(self) -> None:
        chance = self.dice.random()
        if not self.name:
            await self.begin()
        elif len(self.log) > 40 or chance < 0.03:
            await self.verify()
            await self.clear()
        elif not self.open:  # to reopen one that is open changes nothing
            answer = await self.ask("POST", f"{self.path}/reopen")
            self.open = answer is not None and self.expect(answer, 200)
        elif chance < 0.3:
            self.variable.tried(value := self.client.new("v"))
            kept = "with open('artifacts/v', 'w') as f: f.write(v)\nprint(v)"
            if await self.execute(f"v = {value!r}\n{kept}", value) is not None:
                self.variable.answered(value)
        elif chance < 0.55:
            await self.read()
        elif chance < 0.75:
            content = self.client.new("content")
            body = {"session_id": self.name, "path": "f", "content": content}
            await self.change(self.file, content, "POST", "/api/e2b/files", json=body)
        elif chance < 0.92:
            await self.read_file()
        else:
            self.open = False
            await self.change(self.variable, "None", "POST", f"{self.path}/close")

    async def begin(self) -> None:
        self.name = self.client.new("session")
        self.fresh()
        body = {"session_id": self.name, "environment": "Python3", "provider": "local"}
        if not await self.make("/api/sessions", body):
            self.name = ""

    async def execute(self, code: str, artifact: str = "") -> str | None:
        self.log[mark := self.client.new("mark")] = False
        body = {"session_id": self.name, "code": f"{code}  # {mark}"}
        answer = await self.ask("POST", "/api/e2b/execute", json=body)
        if answer is None:
            return None
        if not self.expect(answer, 200):
            await self.clear()  # and complain once, not with every step
            return None
        if not self.model.full:
            self.check("status of a run", "ok", answer.json()["status"])
            self.log[mark] = True
            if artifact:
                (kept,) = answer.json()["artifacts"]
                self.artifacts[httpx.URL(kept["url"]).path] = artifact
        return str(answer.json()["stdout"])

    async def read(self) -> None:
        if (said := await self.execute("print(globals().get('v'))")) is not None:
            self.variable.seen(said.strip())

    async def read_file(self) -> None:
        path = f"/api/e2b/files/{self.name}"
        answer = await self.ask("GET", path, params={"path": "f"})
        if answer is not None and self.expect(answer, 200, 404):
            self.file.seen(answer.json()["content"] if answer.is_success else None)

    async def verify(self) -> None:
        if not self.name:
            return
        for path, content in self.artifacts.items():
            self.check("an artifact", content, (await self.insist("GET", path)).text)
        answer = await self.insist("GET", f"{self.path}/executions?limit=1000")
        if self.expect(answer, 200):
            logged = answer.json()["executions"]
            for mark, answered in self.log.items():
                found = [each["status"] for each in logged if each["command"].endswith(f"# {mark}")]
                may_be = [["ok"]] if answered else [[], ["ok"], ["lost"]]
                self.check("a run in the log", found if found in may_be else may_be, found)
        if self.open:
            await self.read()
        if self.open and self.name:
            await self.read_file()

    async def leave(self) -> None:
        if self.client.worn:
            await self.clear()

    async def clear(self) -> None:
        if self.name:
            await self.delete(self.path)
            self.name = ""


ALL: tuple[type[Surface], ...] = (
    Execs, Streams, Contexts, Files, Snapshots, Forks, Resets, Volumes, Sessions,
)  # fmt: skip
