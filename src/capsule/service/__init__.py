"""Sandboxes, execs, files, terminals: states, limits, timeouts and records. No HTTP in here."""

from capsule.service.files import Files
from capsule.service.live import LiveExec
from capsule.service.service import Service
from capsule.service.terminal import Closing, TerminalSession
from capsule.service.values import (
    CreateRequest,
    ExecCall,
    ExecResult,
    RunCall,
    Sandbox,
    Stats,
    TarResult,
    Terminal,
)

__all__ = [
    "Closing",
    "CreateRequest",
    "ExecCall",
    "ExecResult",
    "Files",
    "LiveExec",
    "RunCall",
    "Sandbox",
    "Service",
    "Stats",
    "TarResult",
    "Terminal",
    "TerminalSession",
]
