"""How much memory this process has."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def resident() -> int:
    """Bytes of it that are in memory, without what the garbage collector finds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
