"""Sandboxes, execs, files and terminals: states, limits, timeouts, records. No HTTP, no provider's words."""

from capsule.service.service import Service
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
    "CreateRequest",
    "ExecCall",
    "ExecResult",
    "RunCall",
    "Sandbox",
    "Service",
    "Stats",
    "TarResult",
    "Terminal",
]
