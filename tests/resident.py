"""How much memory this process has."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def resident() -> int:
    """Bytes of its own that are in memory, after a garbage collection.

    Without pages of files: the system takes those away, and back, as it likes.
    """
    gc.collect()
    _, all_pages, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (all_pages - of_files) * os.sysconf("SC_PAGESIZE")
