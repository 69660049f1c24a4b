"""Sessions from Python, without a server and without asyncio."""

from capsule.orchestrator.lifecycle import Lifecycle
from capsule.orchestrator.unified_manager import UnifiedManager

__all__ = ["Lifecycle", "UnifiedManager"]
