"""The host's end of the agent's wire: everything a user can do to a box, one method each.

A link holds no connection and no task. Every call opens a fresh connection, and whatever it
returns that stays open (an ExecStream, a reader, a watch) owns that connection and is closed by
its `async with`.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from capsule.link import collect, files, network, save
from capsule.link import watch as watching
from capsule.link.collect import Collected
from capsule.link.conversation import (
    PIECE,
    Connect,
    Conversation,
    Explain,
    call,
    request_bytes,
    silence,
)
from capsule.link.errors_map import to_error
from capsule.link.exec_stream import ExecStream
from capsule.link.files import FileReader, Listing, explain_path
from capsule.link.parse import exec_info, field, file_stat, usage
from capsule.link.protocol import Channel, FrameType, pack
from capsule.link.requests import exec_body, explain_exec
from capsule.link.stream import ByteStream
from capsule.link.watch import Watch
from capsule.model import Detail, ExecId, ExecInfo, ExecRequest, FileStat, Stream, Usage
from capsule.tracing import span

_INLINE_INPUT = 64 * 1024


class AgentLink:
    """Every method raises UnavailableError when the agent is gone, or silent for too long.

    `timeout` bounds the answer to a request, `idle` each step of a transfer and of long file work.
    """

    def __init__(self, connect: Connect, *, timeout: float = 10.0, idle: float = 60.0) -> None:
        self._connect = connect
        self._timeout = timeout
        self._idle = idle

    async def exec(self, request: ExecRequest, *, deadline: float | None = None) -> ExecStream:
        """Returns when the program runs; by `deadline` (on the loop's clock) at the latest.

        Raises InvalidError, NotFoundError (program, cwd), ForbiddenError (not executable),
        ConflictError (the id is taken), CapacityError (no process left in the box).
        """
        wire = request_bytes(exec_body(request))
        talk, reply = await self._begin(wire, explain_exec(request), deadline, request.id)
        return ExecStream(
            talk,
            request.id,
            field(reply, "pid", int),
            alive=self.ping,
            tty=request.tty,
            timeout=request.timeout,
        )

    async def attach(
        self, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0, input: bool = False
    ) -> ExecStream:
        """The exec's output from these offsets on, and its exit; also when it ended long ago.

        For a terminal `stdout` is the offset in its one stream. Raises NotFoundError, GoneError
        (its output was dropped), InvalidError (an offset beyond what exists).
        """
        body = {"op": "attach", "id": exec_id, "stdout": stdout, "stderr": stderr, "input": input}
        talk, reply = await self._begin(request_bytes(body), _explain_id(exec_id), None, exec_id)
        return ExecStream(
            talk,
            exec_id,
            field(reply, "pid", int),
            alive=self.ping,
            tty=reply.get("tty") is True,
            start={Stream.STDOUT: stdout, Stream.STDERR: stderr, Stream.PTY: stdout},
        )

    async def _begin(
        self, wire: bytes, explain: Explain, deadline: float | None, exec_id: ExecId
    ) -> tuple[Conversation, dict[str, Any]]:
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                with span("agent exec: begin", exec=exec_id):
                    return await self._talk(wire, explain)
        except TimeoutError:
            raise silence(f"exec {exec_id}", self._timeout) from None

    async def _talk(self, wire: bytes, explain: Explain) -> tuple[Conversation, dict[str, Any]]:
        talk = await Conversation.begin(self._connect, wire, explain)
        try:
            return talk, await talk.reply()
        except BaseException:
            await talk.aclose()
            raise

    async def _collect(
        self, request: ExecRequest, input: bytes, room: collect.Room | None
    ) -> Collected:
        if request.timeout > 0:
            return await collect.collect(
                self._connect,
                request,
                explain_exec(request),
                input=input,
                start_timeout=self._timeout,
                room=room,
            )
        async with await self.exec(request) as stream:
            return await collect.collect_patiently(stream, request, input, room)

    async def collect(
        self, request: ExecRequest, *, input: bytes = b"", room: collect.Room | None = None
    ) -> Collected:
        """Runs it to its end. `input` is its stdin (if `request.stdin`), closed behind it.

        `room` is asked before much output is taken in; until it returns, the agent keeps it.
        """
        with span("agent exec", exec=request.id):
            return await self._collect(request, input, room)

    async def execs(self) -> builtins.list[ExecInfo]:
        reply = await self._call({"op": "execs"})
        return [exec_info(item) for item in field(reply, "execs", builtins.list)]

    async def kill(self, exec_id: ExecId, *, signal: str = "KILL", grace: float = 0.0) -> bool:
        """Whether it was still running. After KILL, nothing that it started is left."""
        body = {"op": "kill", "id": exec_id, "signal": signal, "grace": grace}
        reply = await self._call(body, explain=_explain_id(exec_id), more_time=grace)
        return field(reply, "running", bool)

    async def send_input(self, exec_id: ExecId, data: bytes, *, eof: bool = False) -> None:
        """Raises GoneError once it has ended, ConflictError while it does not read its stdin."""
        explain = _explain_id(exec_id)
        if len(data) > _INLINE_INPUT:
            wire = request_bytes({"op": "input", "id": exec_id})
            async with await Conversation.begin_within(
                self._timeout, self._connect, wire, what="input", explain=explain
            ) as talk:
                await _send_input_frames(talk, data, self._idle)
            data = b""
            if not eof:
                return
        text = data.decode("utf-8", "surrogateescape")
        body = {"op": "input", "id": exec_id, "data": text, "eof": eof}
        await self._call(body, explain=explain)

    async def resize(self, exec_id: ExecId, rows: int, cols: int) -> None:
        body = {"op": "resize", "id": exec_id, "rows": rows, "cols": cols}
        await self._call(body, explain=_explain_id(exec_id))

    def read(
        self, path: str, *, offset: int = 0, length: int = -1
    ) -> AbstractAsyncContextManager[FileReader]:
        return files.read(
            self._connect,
            path,
            offset=offset,
            length=length,
            timeout=self._timeout,
            idle=self._idle,
        )

    async def write(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        append: bool = False,
        exclusive: bool = False,
        in_place: bool = False,
        metadata: Mapping[str, str] | None = None,
        detail: Detail | None = None,
    ) -> FileStat:
        """All or nothing (except with `append`): until it is complete the old file stays; with
        `in_place` it is then written over, if its folder has room for the new one beside it.

        `metadata` takes the place of all that it had under the prefix of `detail`. Raises
        NotSupportedError where the file system has none.
        """
        options = {
            "mode": mode,
            "parents": parents,
            "append": append,
            "exclusive": exclusive,
            **({"in_place": True} if in_place else {}),
            **files.asked(detail),
        }
        if metadata is not None:
            options["metadata"] = dict(metadata)
        return await files.write(
            self._connect, path, data, options, timeout=self._timeout, idle=self._idle
        )

    async def list(
        self,
        path: str,
        *,
        recursive: bool = False,
        depth: int | None = None,
        limit: int = 100_000,
        detail: Detail | None = None,
    ) -> Listing:
        """`depth`: how many levels of folders, if recursive; None: all of them."""
        options = {"recursive": recursive, **({} if depth is None else {"depth": depth})}
        return await files.list_entries(
            self._connect,
            path,
            options | files.asked(detail),
            limit=limit,
            timeout=self._timeout,
            idle=self._idle,
        )

    async def stat(
        self, path: str, *, follow: bool = False, detail: Detail | None = None
    ) -> FileStat:
        body = {"op": "stat", "path": path, "follow": follow, **files.asked(detail)}
        return file_stat(await self._on_path(body))

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> bool:
        """Whether it was made: False if it was there already, which is fine with `parents`.

        Raises ConflictError when there is something else than a folder.
        """
        body = {"op": "mkdir", "path": path, "parents": parents, "mode": mode}
        return (await self._on_path(body)).get("made") is not False

    async def move(
        self, source: str, target: str, *, overwrite: bool = True, parents: bool = False
    ) -> None:
        """All or nothing. Between two disks the content is copied, which takes its time."""
        body = {"op": "move", "from": source, "to": target, "overwrite": overwrite}
        body |= {"parents": True} if parents else {}
        await self._call(
            body,
            explain=lambda body: to_error(body, path=source, target=target),
            more_time=self._idle,
        )

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        body = {"op": "remove", "path": path, "recursive": recursive}
        # A million files take their time, and nothing is said until they are gone.
        await self._on_path(body, more_time=self._idle if recursive else 0.0)

    async def chmod(self, path: str, mode: int) -> None:
        await self._on_path({"op": "chmod", "path": path, "mode": mode})

    async def symlink(self, path: str, target: str) -> None:
        await self._on_path({"op": "symlink", "path": path, "target": target})

    def watch(self, path: str, *, recursive: bool = False) -> AbstractAsyncContextManager[Watch]:
        return watching.watch(
            self._connect, path, recursive=recursive, alive=self.ping, timeout=self._timeout
        )

    async def dial(self, port: int, host: str = "127.0.0.1") -> ByteStream:
        """Raises UnavailableError when nobody listens there."""
        body = {"op": "dial", "port": port, "host": host}
        return await network.open_raw(
            self._connect,
            body,
            explain=lambda body: to_error(body, port=port),
            timeout=self._timeout,
        )

    def listen(self, port: int) -> AbstractAsyncContextManager[AsyncIterator[ByteStream]]:
        return network.listen(self._connect, port, alive=self.ping, timeout=self._timeout)

    async def usage(self) -> Usage:
        return usage(await self._call({"op": "usage"}))

    async def ping(self) -> dict[str, Any]:
        return await self._call({"op": "ping"})

    def save(
        self,
        about: dict[str, Any],
        *,
        full: bool = False,
        since: float = 0.0,
        difference: bool = False,
        row: bool = False,
        watch: bool = True,
    ) -> AsyncGenerator[bytes, None]:
        """`row`: others will follow, each with the time of the one before as `since`, until when
        the agent may `watch` folders."""
        request: dict[str, Any] = {"full": full, "since": since, "difference": difference}
        request |= {"row": row, "watch": watch}
        return save.save(self._connect, about, request, timeout=self._timeout, idle=self._idle)

    async def fill(self, pieces: AsyncIterable[bytes]) -> None:
        """Give a box the files that another's `save` has told, before its first program runs.

        Raises NoSpaceError, UnavailableError.
        """
        await save.fill(self._connect, pieces, timeout=self._timeout, idle=self._idle)

    async def adjust(self, *, open_files: int) -> None:
        """For programs that begin later. Raises NotSupportedError."""
        await self._call({"op": "adjust", "open_files": open_files})

    async def freeze(self) -> None:
        """Returns when no program moves. Raises NotSupportedError, ConflictError (busy)."""
        await self._call({"op": "freeze"})

    async def thaw(self) -> None:
        await self._call({"op": "thaw"})

    async def shutdown(self) -> None:
        """Returns when every process of the box is dead."""
        await self._call({"op": "shutdown"}, more_time=self._idle)

    async def _on_path(self, body: dict[str, Any], *, more_time: float = 0.0) -> dict[str, Any]:
        return await self._call(body, explain=explain_path(body["path"]), more_time=more_time)

    async def _call(
        self, body: dict[str, Any], *, explain: Explain = to_error, more_time: float = 0.0
    ) -> dict[str, Any]:
        return await call(self._connect, body, timeout=self._timeout + more_time, explain=explain)


def _explain_id(exec_id: ExecId) -> Explain:
    return lambda body: to_error(body, exec_id=exec_id)


async def _send_input_frames(talk: Conversation, data: bytes, idle: float) -> None:
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        frame = pack(FrameType.DATA, piece, stream=Channel.STDIN, offset=start)
        await talk.send_within(frame, idle, "input")
    end = pack(FrameType.EOF, stream=Channel.FILE, offset=len(data))
    await talk.send_within(end, idle, "input")
    await talk.next_within(idle, "input")
