"""Sandboxes, execs, files, terminals, templates: states, limits and records. No HTTP in here."""

from capsule.providers.images import Fetch, Image, Log, Recipe, Step
from capsule.service.context import ContextInfo
from capsule.service.context_calls import ContextCall, ContextRun
from capsule.service.files import Files
from capsule.service.happenings import Happening, Kind
from capsule.service.live import LiveExec
from capsule.service.live_run import LiveRun, RunResult
from capsule.service.pool import PoolStatus
from capsule.service.service import Service
from capsule.service.shelf import ShelfStatus
from capsule.service.tally import Spread, Tally
from capsule.service.templates import Built, Tail, spool
from capsule.service.terminal import Closing, TerminalSession
from capsule.service.usages import SandboxUsage
from capsule.service.values import (
    CreateRequest,
    ExecCall,
    ExecResult,
    RunCall,
    Sandbox,
    Snapshot,
    Stats,
    TarResult,
    Terminal,
    Volume,
    VolumeWish,
)

__all__ = [
    "Built",
    "Closing",
    "ContextCall",
    "ContextInfo",
    "ContextRun",
    "CreateRequest",
    "ExecCall",
    "ExecResult",
    "Fetch",
    "Files",
    "Happening",
    "Image",
    "Kind",
    "LiveExec",
    "LiveRun",
    "Log",
    "PoolStatus",
    "Recipe",
    "RunCall",
    "RunResult",
    "Sandbox",
    "SandboxUsage",
    "Service",
    "ShelfStatus",
    "Snapshot",
    "Spread",
    "Stats",
    "Step",
    "Tail",
    "Tally",
    "TarResult",
    "Terminal",
    "TerminalSession",
    "Volume",
    "VolumeWish",
    "spool",
]
