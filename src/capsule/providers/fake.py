"""Crooked providers, for tests of what must hold when one misbehaves. Each wraps a real one.

    SlowLaunch      takes its time, then works
    NeverReady      its boxes start, and launch never returns
    DiesAtLaunch    the box is gone before launch could return it
    DiesMidExec     the box dies under a running program, after so many bytes of its output
    LiesAboutExit   the end of a program is kept back, or made up of nonsense
    RefusesDestroy  cannot get rid of a box, for the first few times

All of them keep the contract where they do not misbehave on purpose: whatever they launched is in
`owned()` until it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from capsule.errors import UnavailableError
from capsule.link.protocol import Decoder, Frame, FrameType, encode
from capsule.model import Handle, SandboxId, SandboxSpec
from capsule.providers.contract import Box, ByteStream, Capabilities, Provider

WrapStream = Callable[["CrookedBox", ByteStream], ByteStream]


class Crooked(Provider):
    """Passes everything on; the crooked ones change one thing each."""

    name: ClassVar[str] = "crooked"

    def __init__(self, inner: Provider) -> None:
        self.inner = inner
        # Handles carry the inner one's name, and a service finds their provider by it.
        self.name = inner.name  # type: ignore[misc]

    async def open(self) -> None:
        await self.inner.open()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def probe(self) -> Capabilities:
        return await self.inner.probe()

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        return self.wrap(await self.inner.launch(sandbox_id, spec))

    async def adopt(self, handle: Handle) -> Box | None:
        box = await self.inner.adopt(handle)
        return None if box is None else self.wrap(box)

    async def owned(self) -> AsyncIterator[Handle]:
        async for handle in self.inner.owned():
            yield handle

    async def discard(self, handle: Handle) -> None:
        await self.inner.discard(handle)

    def wrap(self, box: Box) -> Box:
        return box


class SlowLaunch(Crooked):
    def __init__(self, inner: Provider, *, delay: float = 1.0) -> None:
        super().__init__(inner)
        self.delay = delay

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        await asyncio.sleep(self.delay)
        return await super().launch(sandbox_id, spec)


class NeverReady(Crooked):
    """The box is there, its agent never answers. Only cancelling ends the wait, and the box."""

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        box = await super().launch(sandbox_id, spec)
        try:
            await asyncio.get_running_loop().create_future()
            return box
        finally:
            await box.destroy()


class DiesAtLaunch(Crooked):
    """As when the kernel kills it between start and answer. `times` limits it; then it works."""

    def __init__(self, inner: Provider, *, times: int = 1_000_000) -> None:
        super().__init__(inner)
        self.times = times

    async def launch(self, sandbox_id: SandboxId, spec: SandboxSpec) -> Box:
        box = await super().launch(sandbox_id, spec)
        if self.times <= 0:
            return box
        self.times -= 1
        await box.destroy()
        raise UnavailableError(f"the sandbox ended before it was ready: {sandbox_id}")


class DiesMidExec(Crooked):
    """Ends the box once a connection has carried `after` bytes towards the host."""

    def __init__(self, inner: Provider, *, after: int = 200) -> None:
        super().__init__(inner)
        self.after = after

    def wrap(self, box: Box) -> Box:
        return CrookedBox(box, lambda crooked, stream: _Severed(crooked, stream, self.after))


class LiesAboutExit(Crooked):
    """With `made_up`, EXIT says nonsense; without, the connection ends where EXIT should be."""

    def __init__(self, inner: Provider, *, made_up: bool = False) -> None:
        super().__init__(inner)
        self.made_up = made_up

    def wrap(self, box: Box) -> Box:
        return CrookedBox(box, lambda _, stream: _Forged(stream, self.made_up))


class RefusesDestroy(Crooked):
    """Neither `destroy` nor `discard` works for the first `times` calls; the box goes on living."""

    def __init__(self, inner: Provider, *, times: int = 3) -> None:
        super().__init__(inner)
        self.times = times

    def wrap(self, box: Box) -> Box:
        return CrookedBox(box, before_destroy=self.refuse)

    async def discard(self, handle: Handle) -> None:
        self.refuse()
        await super().discard(handle)

    def refuse(self) -> None:
        if self.times > 0:
            self.times -= 1
            raise UnavailableError("the sandbox cannot be removed right now")


class CrookedBox(Box):
    def __init__(
        self,
        inner: Box,
        wrap: WrapStream | None = None,
        *,
        before_destroy: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner = inner
        self.handle = inner.handle
        self.isolation = inner.isolation
        self.unenforced = inner.unenforced
        self._wrap = wrap
        self._before_destroy = before_destroy

    async def connect(self) -> ByteStream:
        stream = await self.inner.connect()
        return stream if self._wrap is None else self._wrap(self, stream)

    async def destroy(self) -> None:
        self._before_destroy()
        await self.inner.destroy()


class _Passing:
    """A stream between the link and the box."""

    def __init__(self, inner: ByteStream) -> None:
        self.inner = inner

    async def send(self, data: bytes) -> None:
        await self.inner.send(data)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _Severed(_Passing):
    def __init__(self, box: CrookedBox, inner: ByteStream, after: int) -> None:
        super().__init__(inner)
        self._box = box
        self._left = after

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._left > 0:
            data = await self.inner.receive(min(max_bytes, self._left))
            self._left -= len(data)
            return data
        await self._box.inner.destroy()
        return b""


class _Forged(_Passing):
    def __init__(self, inner: ByteStream, made_up: bool) -> None:
        super().__init__(inner)
        self._made_up = made_up
        self._decoder = Decoder()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Frames come one at a time here, so that the one to forge is never missed."""
        while (frame := self._decoder.pop()) is None:
            data = await self.inner.receive(max_bytes)
            if not data:
                return b""
            self._decoder.push(data)
        if frame.type is not FrameType.EXIT:
            return encode(frame)
        return encode(Frame(FrameType.EXIT, payload=b'{"reason":"fine"}')) if self._made_up else b""
