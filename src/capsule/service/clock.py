"""Time, injected, so that tests can turn it.

`now` is for people: it jumps when somebody sets the clock. `monotonic` decides: it counts
suspended time too (a ten-minute sandbox on a laptop that slept for a night is over), and means
the same across restarts of the server as long as `boot_id` is the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since some point in the past that is fixed for one boot."""

    def boot_id(self) -> str:
        """Names the boot; "" when unknown. Monotonic times of two boots cannot be compared."""


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return ""
