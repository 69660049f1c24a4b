"""The methods of JSON-RPC: which name takes what and does what. `sandbox.v1.*`, `context.v1.*`,
`template.v1.*`, `key.v1.*` and the others are the interface; `sandbox.*` the older one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from capsule.edge import contexts as c
from capsule.edge import keys as k
from capsule.edge import shapes as s
from capsule.edge import tenants as t
from capsule.edge import views as v
from capsule.edge import webhooks as w
from capsule.edge.files import FileVerbs
from capsule.edge.rpc import Method
from capsule.edge.template_views import BuiltView, TemplateInfoView, TemplatesView
from capsule.edge.trail import ListTrail, TrailView
from capsule.edge.verbs import Verbs
from capsule.model import Usage
from capsule.service import PoolStatus
from capsule.service.caller import Caller


def build_methods(verbs: Verbs, files: FileVerbs) -> dict[str, Method]:
    templates, snapshots, contexts = verbs.templates, verbs.snapshots, verbs.contexts
    volumes, keys, hooks = verbs.volumes, verbs.keys, verbs.webhooks
    tenants = verbs.tenants
    on_sandbox = functools.partial(_on_sandbox, verbs)
    return {
        "sandbox.v1.create": Method(s.Create, verbs.create, v.SandboxView),
        "sandbox.v1.get": on_sandbox(s.Nothing, verbs.get, v.SandboxView),
        "sandbox.v1.list": Method(s.ListSandboxes, verbs.list, v.SandboxesView),
        "sandbox.v1.delete": on_sandbox(s.Nothing, verbs.delete, v.DeletedView),
        "sandbox.v1.setTimeout": on_sandbox(s.SetTimeout, verbs.set_timeout, v.SandboxView),
        "sandbox.v1.keepAlive": on_sandbox(s.Nothing, verbs.keep_alive, v.SandboxView),
        "sandbox.v1.pause": on_sandbox(s.Nothing, verbs.pause, v.SandboxView),
        "sandbox.v1.resume": on_sandbox(s.Nothing, verbs.resume, v.SandboxView),
        "sandbox.v1.reset": on_sandbox(s.Nothing, verbs.reset, v.SandboxView),
        "sandbox.v1.snapshot": on_sandbox(s.MakeSnapshot, snapshots.make, v.SnapshotView),
        "sandbox.v1.fork": on_sandbox(s.Fork, snapshots.fork, v.ForkView),
        "sandbox.v1.steps": on_sandbox(s.Nothing, snapshots.steps, v.StepsView),
        "sandbox.v1.diff": on_sandbox(s.Diff, snapshots.diff, v.DiffView),
        "sandbox.v1.undo": on_sandbox(s.Undo, snapshots.undo, v.SandboxView),
        "sandbox.v1.metrics": on_sandbox(s.Nothing, verbs.metrics, Usage),
        "sandbox.v1.exec": on_sandbox(s.Exec, verbs.exec, v.ExecView),
        "sandbox.v1.run": on_sandbox(s.Run, verbs.run, v.ExecView),
        "sandbox.v1.batch": on_sandbox(s.Batch, verbs.batch, v.BatchView),
        "sandbox.v1.start": on_sandbox(s.Start, verbs.start, v.StartedView),
        "sandbox.v1.execs": on_sandbox(s.Nothing, verbs.execs, v.ExecsView),
        "sandbox.v1.attach": on_sandbox(s.Attach, verbs.attach, v.AttachView),
        "sandbox.v1.kill": on_sandbox(s.Kill, verbs.kill, v.KilledView),
        "sandbox.v1.sendInput": on_sandbox(s.SendInput, verbs.send_input, v.SentView),
        "sandbox.v1.resize": on_sandbox(s.Resize, verbs.resize, v.DoneView),
        "sandbox.v1.writeFile": on_sandbox(s.WriteFile, files.write, v.WrittenView),
        "sandbox.v1.readFile": on_sandbox(s.ReadFile, files.read, v.ContentView),
        "sandbox.v1.listDir": on_sandbox(s.ListDir, files.list, v.ListingView),
        "sandbox.v1.stat": on_sandbox(s.Stat, files.stat, v.FileView),
        "sandbox.v1.mkdir": on_sandbox(s.Mkdir, files.mkdir, v.DoneView),
        "sandbox.v1.move": on_sandbox(s.Move, files.move, v.DoneView),
        "sandbox.v1.remove": on_sandbox(s.Remove, files.remove, v.DoneView),
        "sandbox.v1.chmod": on_sandbox(s.Chmod, files.chmod, v.DoneView),
        "snapshot.v1.list": Method(s.Nothing, snapshots.list, v.SnapshotsView),
        "snapshot.v1.get": Method(s.OfSnapshot, snapshots.get, v.SnapshotView),
        "snapshot.v1.delete": Method(s.OfSnapshot, snapshots.delete, v.DeletedView),
        "context.v1.create": on_sandbox(s.CreateContext, contexts.create, c.ContextView),
        "context.v1.run": on_sandbox(s.RunInContext, contexts.run, c.RunView),
        "context.v1.interrupt": on_sandbox(s.OfContext, contexts.interrupt, c.InterruptedView),
        "context.v1.restart": on_sandbox(s.OfContext, contexts.restart, c.ContextView),
        "context.v1.list": on_sandbox(s.Nothing, contexts.list, c.ContextsView),
        "context.v1.delete": on_sandbox(s.OfContext, contexts.delete, v.DeletedView),
        "volume.v1.create": Method(s.MakeVolume, volumes.create, v.VolumeView),
        "volume.v1.list": Method(s.Nothing, volumes.list, v.VolumesView),
        "volume.v1.get": Method(s.OfVolume, volumes.get, v.VolumeView),
        "volume.v1.delete": Method(s.OfVolume, volumes.delete, v.DeletedView),
        "template.v1.list": Method(s.Nothing, templates.list, TemplatesView),
        "template.v1.get": Method(s.OfTemplate, templates.get, TemplateInfoView),
        "template.v1.build": Method(s.BuildTemplate, templates.build, BuiltView),
        "template.v1.delete": Method(s.OfTemplate, templates.delete, v.DeletedView),
        "webhook.v1.create": Method(w.CreateWebhook, hooks.create, w.WebhookView),
        "webhook.v1.list": Method(s.Nothing, hooks.list, w.WebhooksView),
        "webhook.v1.get": Method(w.OfWebhook, hooks.get, w.WebhookView),
        "webhook.v1.delete": Method(w.OfWebhook, hooks.delete, v.DeletedView),
        "webhook.v1.deliveries": Method(w.ListDeliveries, hooks.deliveries, w.DeliveriesView),
        "webhook.v1.redeliver": Method(w.OfDelivery, hooks.redeliver, w.DeliveryView),
        "tenant.v1.get": Method(t.OfTenant, tenants.get, t.TenantView),
        "tenant.v1.list": Method(s.Nothing, tenants.list, t.TenantsView),
        "tenant.v1.set": Method(t.SetTenant, tenants.set, t.TenantView),
        "audit.v1.list": Method(ListTrail, verbs.trail.list, TrailView),
        "key.v1.create": Method(k.CreateKey, keys.create, k.KeyView),
        "key.v1.list": Method(k.ListKeys, keys.list, k.KeysView),
        "key.v1.revoke": Method(k.OfKey, keys.revoke, k.KeyView),
        "pool.v1.status": Method(s.Nothing, verbs.pool, PoolStatus),
        "sandbox.create": Method(s.Create, verbs.create_old, v.SandboxView),
        "sandbox.exec": on_sandbox(s.RunOld, verbs.run_old, v.OldExecView),
        "sandbox.delete": on_sandbox(s.Nothing, verbs.delete, v.DeletedView),
    }


def _on_sandbox(
    verbs: Verbs, shape: type[s.Shape], verb: Callable[[str, Any], Awaitable[Any]], returns: Any
) -> Method:
    """A method on one sandbox of the caller's: its params are the shape's fields, and `id`."""
    params = msgspec.defstruct(
        f"{shape.__name__}Params",
        [("id", s.Id)],
        bases=(shape,),
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
    )

    async def run(caller: Caller, p: Any) -> Any:
        verbs.service.own(caller, p.id)
        return await verb(p.id, p)

    return Method(params, run, returns, lane=lambda p: p.id)
