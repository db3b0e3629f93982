"""Time as this package sees it: a callable that returns seconds and never goes back."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment, never going back. `time.monotonic` is one."""

    def __call__(self) -> float:
        """The time now."""
        ...


monotonic: Clock = time.monotonic
