"""Sandboxes, execs, files, terminals, templates: states, limits and records. No HTTP in here."""

from capsule.providers.images import Fetch, Image, Log, Recipe, Step
from capsule.service.files import Files
from capsule.service.live import LiveExec
from capsule.service.pool import PoolStatus
from capsule.service.service import Service
from capsule.service.shelf import ShelfStatus
from capsule.service.templates import Built, Tail, spool
from capsule.service.terminal import Closing, TerminalSession
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
)

__all__ = [
    "Built",
    "Closing",
    "CreateRequest",
    "ExecCall",
    "ExecResult",
    "Fetch",
    "Files",
    "Image",
    "LiveExec",
    "Log",
    "PoolStatus",
    "Recipe",
    "RunCall",
    "Sandbox",
    "Service",
    "ShelfStatus",
    "Snapshot",
    "Stats",
    "Step",
    "Tail",
    "TarResult",
    "Terminal",
    "TerminalSession",
    "spool",
]
