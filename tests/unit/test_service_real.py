"""The service over real boxes: what only a kernel and a real agent can show."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capsule.config import Config
from capsule.errors import (
    UnavailableError,
)
from capsule.service import CreateRequest, ExecCall, RunCall, Service
from tests.support import backends, component_missing, eventually
from tests.support.backends import LEVEL
from tests.support.folders import server_folder

pytestmark = pytest.mark.real


@pytest.fixture
def folder(agent_binary: Path) -> Iterator[Path]:
    """Short, for Unix sockets, and open to the users that boxes run as."""
    with server_folder("cs-") as path:
        yield path


@asynccontextmanager
async def serving(
    folder: Path, *, drain: str = "delete", **settings: Any
) -> AsyncIterator[Service]:
    backend = backends.of(folder)
    config = Config(
        data_dir=folder / "d",
        run_dir=folder / "r",
        drain=drain,
        isolation=backend.level,
        provider=backend.name,
        **settings,
    )
    provider = await asyncio.to_thread(backend.make, config)
    service = Service(config, {backend.name: provider}, backend.catalog)
    try:
        await service.open()
    except UnavailableError as error:
        component_missing(f"no {LEVEL} for the service's tests: {error.message}")
    try:
        yield service
    finally:
        await service.aclose()


def boxes(folder: Path) -> list[str]:
    return backends.of(folder).boxes(folder)


def keeper(folder: Path, id: str) -> int:
    return int(json.loads((folder / "r" / "boxes" / id / "box.json").read_bytes())["keeper"])


async def test_code_larger_than_an_argument_runs_and_leaves_no_file(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        await service.files(id).write("mod.py", b"x = 1")
        code = "import mod\n" + "#" * 300_000 + "\nprint(mod.x + 1)"
        for session in (None, "s"):
            result = await service.run(id, RunCall(code, session=session))
            assert (result.stdout, result.stderr) == (b"2\n", b"")
        shell = await service.run(id, RunCall("#" * 300_000 + "\necho $((1+2))", language="bash"))
        assert shell.stdout == b"3\n"
        listing = await service.files(id).list("/workspace")
        assert {entry.name for entry in listing.entries} <= {"mod.py", "__pycache__"}


SESSION: list[tuple[ExecCall | RunCall, int]] = [
    (ExecCall(("bash", "-c", "cd /tmp; export A='x y'$'\\n'z; B=not-exported; exit 3")), 3),
    (ExecCall(("sh", "-c", 'test "$PWD" = /tmp && test "$A" = "x y\nz" && test -z "${B-}"')), 0),
    (RunCall("import os; os.environ['C'] = 'ü'; os.chdir('/'); del os.environ['A']"), 0),
    (RunCall("import os; assert os.environ['C'] == 'ü' and 'A' not in os.environ"), 0),
    (RunCall('test "$PWD" = / && test "$C" = ü && unset C', language="bash"), 0),
    (ExecCall(("env",), env={"ONCE": "1"}), 0),
    (RunCall("import os, sys; sys.exit('C' in os.environ or 'ONCE' in os.environ)"), 0),
    (RunCall("from __future__ import annotations\nimport sys; sys.exit(len(sys.argv) - 1)"), 0),
    (ExecCall(("bash", "-c", "mkdir /tmp/d; cd /tmp/d")), 0),
    (ExecCall(("bash", "-c", "rmdir /tmp/d")), 0),
    (ExecCall(("bash", "-c", 'test "$PWD" = /workspace')), 0),
]


async def test_a_session_carries_over_between_languages(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest())).id
        for number, (call, code) in enumerate(SESSION):
            (result,) = await service.batch(id, [replace(call, session="s")])
            assert result.exit.exit_code == code, (number, result.stderr)


async def test_what_a_left_program_reports_reaches_its_session(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest("bash"))).id
        script = 'read word; export LEFT="$word"; cd /tmp; sleep 0.2'
        call = ExecCall(("bash", "-c", script), session="s", stdin=b"behind\n")
        async with await service.start(id, call):
            pass  # gone before the program was

        async def known() -> bool:
            show = ExecCall(("printenv", "LEFT"), session="s")  # reports nothing itself
            return (await service.exec(id, show)).stdout == b"behind\n"

        await eventually(known, what="the session knows what the program left")


@pytest.mark.needs("node")
async def test_node_code_runs_and_carries(folder: Path) -> None:
    async with serving(folder) as service:
        id = (await service.create(CreateRequest(template="node"))).id
        code = "process.env.N = 'ü'; process.chdir('/tmp'); console.log(6*7)"
        first = await service.run(id, RunCall(code, session="s"))
        assert (first.stdout, first.stderr) == (b"42\n", b"")
        code = "console.log(process.env.N, process.cwd())"
        second = await service.run(id, RunCall(code, session="s"))
        assert second.stdout == "ü /tmp\n".encode()


async def test_a_file_of_an_archive_takes_the_place_of_its_link(folder: Path) -> None:
    async with serving(folder) as service:
        files = service.files((await service.create(CreateRequest())).id)
        await files.write("/tmp/there", b"old")
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as made:
            link, file = tarfile.TarInfo("x"), tarfile.TarInfo("x")
            link.type, link.linkname, file.size = tarfile.SYMTYPE, "/tmp/there", 3
            made.addfile(link)
            made.addfile(file, io.BytesIO(b"new"))

        async def chunks() -> AsyncIterator[bytes]:
            yield out.getvalue()

        await files.tar_in("/workspace", chunks())
        assert (await files.stat("x")).type == "file"
        assert (await files.read_bytes("/tmp/there", limit=10)).data == b"old"
