"""What a client can ask for, once for every surface: a shape in, a view out.

JSON-RPC and REST are two spellings of these methods. Nothing here knows of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, structs

from capsule.audit.trail import Trail
from capsule.config import Config
from capsule.edge import shapes as s
from capsule.edge import views as v
from capsule.edge.agents import AgentVerbs
from capsule.edge.contexts import ContextVerbs
from capsule.edge.drain import Gate
from capsule.edge.e2b.access import Access
from capsule.edge.e2b.control_calls import Control
from capsule.edge.e2b.template_calls import TemplateCalls
from capsule.edge.e2b.uploads import Uploads
from capsule.edge.e2b.volumes import VolumeCalls
from capsule.edge.errors import invalid_field
from capsule.edge.files import decoded
from capsule.edge.follow import Follower, poll
from capsule.edge.keys import KeyVerbs
from capsule.edge.observed import Observed
from capsule.edge.playground import PlaygroundVerbs
from capsule.edge.presence import LOOK_AFTER, while_there
from capsule.edge.snapshot_verbs import SnapshotVerbs
from capsule.edge.template_verbs import TemplateVerbs
from capsule.edge.tenants import TenantVerbs
from capsule.edge.trail import TrailVerbs
from capsule.edge.volume_verbs import VolumeVerbs
from capsule.edge.webhooks import WebhookVerbs
from capsule.errors import NotFoundError
from capsule.model import ExecInfo, State, Usage
from capsule.service import (
    CreateRequest,
    ExecCall,
    LiveExec,
    PoolStatus,
    RunCall,
    Sandbox,
    Service,
    Terminal,
    VolumeWish,
)
from capsule.service.caller import Caller, KeyScope
from capsule.service.template_names import resolve
from capsule.webhooks.hooks import Webhooks

ALL_TENANTS = "*"


class Verbs:
    def __init__(
        self,
        config: Config,
        service: Service,
        gate: Gate,
        webhooks: Webhooks,
        trail: Trail,
        access: Access,
    ) -> None:
        self.config = config
        self.service = service
        self.gate = gate
        self.observed = Observed(trail, log=config.log_requests == "yes")
        self.trail = TrailVerbs(trail)
        self.templates = TemplateVerbs(config, service, gate)
        self.snapshots = SnapshotVerbs(service, gate)
        self.volumes = VolumeVerbs(service, gate)
        self.contexts = ContextVerbs(service, gate)
        self.webhooks = WebhookVerbs(webhooks, gate)
        self.agents = AgentVerbs(config, service, gate)
        self.keys = KeyVerbs(service)
        self.tenants = TenantVerbs(service)
        self.playground = PlaygroundVerbs(config, service, gate)
        self.e2b = Control(config, service, gate, access)
        self.e2b_volumes = VolumeCalls(service, gate, access)
        self.vault = service.vault
        self.uploads = Uploads(config, access)
        self.e2b_templates = TemplateCalls(config, service, gate, self.uploads)

    async def create(self, caller: Caller, p: s.Create) -> v.SandboxView:
        return v.SandboxView.of(await self._create(caller, p))

    async def create_old(self, caller: Caller, p: s.Create) -> v.SandboxView:
        return v.SandboxView.of(await self._create(caller, p), old=True)

    async def _create(self, caller: Caller, p: s.Create) -> Sandbox:
        self.gate.admit()
        request = CreateRequest(
            template=p.template,
            ttl=_seconds(p.ttl_ms),
            idle_timeout=_seconds(p.idle_timeout_ms),
            limits=_given(p.limits) if p.limits else None,
            env=p.env,
            metadata=p.metadata,
            provider=p.provider,
            provider_key=p.provider_key or "",
            runtime=p.runtime,
            on_timeout=p.on_timeout,
            auto_resume=p.auto_resume,
            snapshot=p.snapshot,
            checkpoint=p.checkpoint,
            volumes=tuple(VolumeWish(x.name, x.path, x.read_only) for x in p.volumes),
            ports=p.ports,
            idempotency_key=p.idempotency_key,
        )
        return await while_there(self.service.create(request, caller), after=LOOK_AFTER)

    async def get(self, id: str, p: s.Nothing) -> v.SandboxView:
        return v.SandboxView.of(self.service.get(id))

    async def list(self, caller: Caller, p: s.ListSandboxes) -> v.SandboxesView:
        state = State(p.state) if p.state else None
        tenant = None if p.tenant == ALL_TENANTS else p.tenant or caller.tenant
        if tenant != caller.tenant:
            caller.require(KeyScope.ADMIN, "to list the sandboxes of other tenants")
        found = self.service.list(metadata=p.metadata or None, state=state, tenant=tenant)
        return v.SandboxesView(sandboxes=[v.SandboxView.of(sandbox) for sandbox in found])

    async def delete(self, id: str, p: s.Nothing) -> v.DeletedView:
        await self.service.delete(id)
        return v.DeletedView()

    async def set_timeout(self, id: str, p: s.SetTimeout) -> v.SandboxView:
        return v.SandboxView.of(await self.service.set_timeout(id, p.ttl_ms / 1000))

    async def keep_alive(self, id: str, p: s.Nothing) -> v.SandboxView:
        return v.SandboxView.of(await self.service.keep_alive(id))

    async def pause(self, id: str, p: s.Nothing) -> v.SandboxView:
        return v.SandboxView.of(await self.service.pause(id))

    async def resume(self, id: str, p: s.Nothing) -> v.SandboxView:
        return v.SandboxView.of(await self.service.resume(id))

    async def reset(self, id: str, p: s.Nothing) -> v.SandboxView:
        self.gate.admit()
        return v.SandboxView.of(await self.service.reset(id))

    async def pool(self, caller: Caller, p: s.Nothing) -> PoolStatus:
        return self.service.pool()

    async def metrics(self, id: str, p: s.Nothing) -> Usage:
        return await self.service.metrics(id)

    async def exec(self, id: str, p: s.Exec) -> v.ExecView:
        return await self.call(id, p)

    async def run(self, id: str, p: s.Run) -> v.ExecView:
        return await self.call(id, p)

    async def call(self, id: str, p: s.Options) -> v.ExecView:
        self.gate.admit()
        call = self.as_call(id, p)
        service = self.service
        result = await (
            service.exec(id, call) if isinstance(call, ExecCall) else service.run(id, call)
        )
        return v.ExecView.of(result, p.encoding)

    async def run_old(self, id: str, p: s.RunOld) -> v.OldExecView:
        run = s.Run(code=p.code, language=p.language, timeout_ms=p.timeout_ms)
        view = await self.call(id, run)
        return v.OldExecView(stdout=view.stdout, stderr=view.stderr, exit_code=view.exit_code)

    async def batch(self, id: str, p: s.Batch) -> v.BatchView:
        self.gate.admit()
        calls = [self.as_call(id, command) for command in p.commands]
        results = await self.service.batch(id, calls, stop_on_error=p.stop_on_error)
        encodings = [command.encoding for command in p.commands]
        views = [v.ExecView.of(r, e) for r, e in zip(results, encodings, strict=False)]
        return v.BatchView(results=views, stopped=len(views) < len(calls))

    async def open(self, id: str, p: s.Start) -> LiveExec:
        """Start an exec and stay with it; closing the stream leaves the program running."""
        self.gate.admit()
        tty = Terminal(p.tty.rows, p.tty.cols) if p.tty else None
        return await self.service.start(id, self.as_call(id, p), stdin_open=p.stdin_open, tty=tty)

    async def start(self, id: str, p: s.Start) -> v.StartedView:
        async with await self.open(id, p) as stream:
            return v.StartedView(exec_id=stream.exec_id, pid=stream.pid)

    async def execs(self, id: str, p: s.Nothing) -> v.ExecsView:
        found = await self.service.execs(id)
        return v.ExecsView(execs=[v.ExecInfoView.of(info) for info in found])

    async def attach(self, id: str, p: s.Attach) -> v.AttachView:
        stream = await self.service.attach(id, p.exec_id, stdout=p.stdout, stderr=p.stderr)
        async with stream:
            follower = Follower(stream, text=p.encoding == "text", stdout=p.stdout, stderr=p.stderr)
            return await poll(
                follower, wait=p.wait_ms / 1000, max_bytes=p.max_bytes, encoding=p.encoding
            )

    async def exec_info(self, id: str, exec_id: str, *, output: bool, encoding: str) -> Any:
        """One exec; with `output` also what it wrote so far, up to 8 MiB."""
        view = v.ExecInfoView.of(await self._find(id, exec_id))
        if not output:
            return view
        most = 8 * 1024 * 1024
        shape = s.Attach(exec_id=exec_id, max_bytes=most, encoding=encoding)  # type: ignore[arg-type]
        seen = await self.attach(id, shape)
        return structs.replace(
            view,
            stdout=seen.stdout,
            stderr=seen.stderr,
            stdout_offset=seen.stdout_offset,
            stderr_offset=seen.stderr_offset,
        )

    async def _find(self, id: str, exec_id: str) -> ExecInfo:
        for info in await self.service.execs(id):
            if info.id == exec_id:
                return info
        raise NotFoundError(f"no such exec: {exec_id}", hint="list the execs of this sandbox")

    async def kill(self, id: str, p: s.Kill) -> v.KilledView:
        running = await self.service.kill(
            id, p.exec_id, signal=p.signal.removeprefix("SIG"), grace=p.grace_ms / 1000
        )
        return v.KilledView(running=running)

    async def send_input(self, id: str, p: s.SendInput) -> v.SentView:
        data = decoded("data", p.data, p.encoding)
        await self.service.send_input(id, p.exec_id, data, eof=p.eof)
        return v.SentView(bytes=len(data))

    async def resize(self, id: str, p: s.Resize) -> v.DoneView:
        await self.service.resize(id, p.exec_id, p.rows, p.cols)
        return v.DoneView()

    def as_call(self, id: str, p: s.Options) -> ExecCall | RunCall:
        cmd: Any = getattr(p, "cmd", UNSET)
        code: Any = getattr(p, "code", UNSET)
        if (cmd is UNSET) == (code is UNSET):
            raise invalid_field("cmd", "give either cmd or code")
        if p.stdin and p.stdin_base64:
            raise invalid_field("stdin", "give either stdin or stdin_base64")
        options: dict[str, Any] = {
            "env": p.env,
            "cwd": p.cwd,
            "timeout": _seconds(p.timeout_ms),
            "stdin": p.stdin_base64 or p.stdin.encode(),
            "output_limit": p.output_limit,
            "on_limit": p.on_limit,
            "user": p.user,
            "session": p.session,
            "idempotency_key": p.idempotency_key,
        }
        if cmd is UNSET:
            return RunCall(code=code, language=getattr(p, "language", None), **options)
        return ExecCall(cmd=self._argv(id, cmd), **options)

    def _argv(self, id: str, cmd: str | Sequence[str]) -> tuple[str, ...]:
        """A string is a script for the shell of the sandbox's template."""
        if not isinstance(cmd, str):
            return tuple(cmd)
        sandbox = self.service.get(id)
        template = resolve(self.service.catalog, sandbox.template, sandbox.tenant)
        shell = template.shell[0] if template and template.shell else "/bin/sh"
        return (shell, "-c", cmd)


def _seconds(millis: int | None) -> float | None:
    return None if millis is None else millis / 1000


def _given(shape: s.LimitsShape) -> dict[str, Any]:
    return {name: x for name, x in structs.asdict(shape).items() if x is not UNSET}
