"""The cloud, as one key sees it: every call of E2B's SDK that is made is made here.

A `Machine` is one of its sandboxes. The SDK's own object for it is had from `create` or `connect`
and kept; a paused one is woken by `connect`, so that is never called just to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from e2b import AsyncSandbox, CommandExitException, SandboxQuery, SandboxState

from capsule.errors import CapsuleError, NotFoundError
from capsule.providers.e2b.errors import LostError, cloud_errors
from capsule.providers.e2b.settings import E2bSettings

PAGE = 100
OWNER, ID = "capsule-owner", "capsule-id"  # in a sandbox's metadata

OnText = Callable[[str], None] | Callable[[str], Awaitable[None]]


class Ended(NamedTuple):
    """A program of a machine's that is over."""

    code: int
    stdout: str = ""
    stderr: str = ""


class Seen(NamedTuple):
    """A sandbox in a list, or looked at."""

    id: str
    sandbox_id: str  # ours
    paused: bool


class Cloud:
    def __init__(self, settings: E2bSettings, key: str) -> None:
        self._patience = settings.patience
        self._timeout = settings.timeout
        self._options: dict[str, Any] = {
            "api_key": key,
            "api_url": settings.api_url,
            "sandbox_url": settings.sandbox_url,
            "domain": settings.domain,
            "debug": False,
            "request_timeout": settings.patience,
        }

    async def create(self, template: str, metadata: dict[str, str]) -> Machine:
        with cloud_errors(f"a sandbox of template {template} cannot be created"):
            try:
                made = await AsyncSandbox.create(
                    template,
                    timeout=self._timeout,
                    metadata=metadata,
                    allow_internet_access=False,
                    retries=0,  # that a cloud is full is told at once
                    **self._options,
                )
            except Exception as exc:
                raise template_error(template, exc) or exc from None
        return Machine(self, made.sandbox_id, made)

    async def connect(self, id: str) -> AsyncSandbox:
        """Wakes it, if it is paused."""
        with cloud_errors(f"sandbox {id} cannot be connected to"):
            return await AsyncSandbox.connect(id, timeout=self._timeout, **self._options)

    async def look(self, id: str) -> Seen:
        """Raises LostError."""
        with cloud_errors(f"sandbox {id} cannot be looked at"):
            return _seen(await AsyncSandbox.get_info(id, **self._options))

    async def list(self, metadata: dict[str, str]) -> AsyncIterator[Seen]:
        with cloud_errors("sandboxes cannot be listed"):
            query = SandboxQuery(metadata=metadata)
            pages = AsyncSandbox.list(query=query, limit=PAGE, **self._options)
        while pages.has_next:
            with cloud_errors("sandboxes cannot be listed"):
                found = await pages.next_items()
            for each in found:
                yield _seen(each)

    async def extend(self, id: str) -> None:
        """It lives for the usual time from now on."""
        with cloud_errors(f"the time of sandbox {id} cannot be extended"):
            await AsyncSandbox.set_timeout(id, self._timeout, **self._options)

    async def pause(self, id: str) -> None:
        """Fine if it is paused already."""
        with cloud_errors(f"sandbox {id} cannot be paused"):
            await AsyncSandbox.pause(id, **self._options)

    async def kill(self, id: str) -> None:
        """Fine if it never was."""
        with cloud_errors(f"sandbox {id} cannot be ended"):
            await AsyncSandbox.kill(id, **self._options)


def template_error(template: str, exc: Exception) -> CapsuleError | None:
    """An unknown template is told by 400, 403 or 404, as the cloud likes."""
    status = getattr(exc, "status_code", None)
    if status not in (400, 403, 404) or "template" not in str(exc).lower():
        return None
    return NotFoundError(
        f"E2B has no template {template}, or not for this key: {exc}",
        hint="CAPSULE_E2B_TEMPLATE names the one to use",
    )


def _seen(info: Any) -> Seen:
    paused = info.state == SandboxState.PAUSED
    return Seen(info.sandbox_id, (info.metadata or {}).get(ID, ""), paused)


class Machine:
    """One sandbox of the cloud's."""

    def __init__(self, cloud: Cloud, id: str, sandbox: AsyncSandbox | None = None) -> None:
        self.cloud = cloud
        self.id = id
        self.gone = False  # ended by us: nothing more is asked of it
        self._sandbox = sandbox
        self._connecting = asyncio.Lock()

    async def sandbox(self) -> AsyncSandbox:
        if self.gone:
            raise LostError(f"sandbox {self.id} is gone")
        async with self._connecting:
            if self._sandbox is None:
                self._sandbox = await self.cloud.connect(self.id)
        return self._sandbox

    async def wake(self) -> None:
        self._sandbox = await self.cloud.connect(self.id)

    async def write(self, path: str, data: bytes, user: str | None) -> None:
        sandbox = await self.sandbox()
        with cloud_errors(f"{path} cannot be written"):
            await sandbox.files.write(path, data, user=user)

    async def run(self, script: str, user: str | None, *, within: float) -> Ended:
        """A program that ends by itself."""
        sandbox = await self.sandbox()
        with cloud_errors("a program cannot be run"):
            try:
                done = await sandbox.commands.run(script, user=user, timeout=within)
            except CommandExitException as exc:
                return Ended(exc.exit_code, exc.stdout, exc.stderr)
        return Ended(done.exit_code, done.stdout, done.stderr)

    async def start(
        self,
        script: str,
        user: str | None,
        *,
        envs: dict[str, str] | None = None,
        stdin: bool = False,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> Running:
        """A program that goes on, also when we let go of it."""
        sandbox = await self.sandbox()
        with cloud_errors("a program cannot be started"):
            handle = await sandbox.commands.run(
                script,
                background=True,
                user=user,
                envs=envs,
                stdin=stdin,
                timeout=0,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                retain_output=False,
            )
        return Running(self, sandbox, handle)


class Running:
    """A program of a machine's, and the stream of what it says."""

    def __init__(self, machine: Machine, sandbox: AsyncSandbox, handle: Any) -> None:
        self._machine = machine
        self._sandbox = sandbox
        self._handle = handle

    async def send(self, data: bytes) -> None:
        with cloud_errors("input cannot be sent"):
            await self._sandbox.commands.send_stdin(self._handle.pid, data)

    async def ended(self) -> Ended:
        """Waits for it. Raises what keeps us from knowing."""
        with cloud_errors("the stream of a program broke"):
            try:
                await self._handle.wait()
            except CommandExitException as exc:
                return Ended(exc.exit_code)
        return Ended(0)

    async def let_go(self) -> None:
        """It goes on; we hear no more of it."""
        await self._handle.disconnect()

    async def kill(self, *, within: float) -> None:
        """As far as that can be done in this time."""
        await self._handle.disconnect()
        if self._machine.gone:
            return
        try:
            async with asyncio.timeout(within):
                with cloud_errors("a program cannot be ended"):
                    await self._handle.kill()
        except (CapsuleError, TimeoutError):
            pass  # who comes next ends it
