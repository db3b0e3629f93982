"""Fills a table in a moment with what looks like random fingerprints: 10^8 of them, added, would take minutes."""

from __future__ import annotations

import random
from typing import Any

from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

AT_ONCE = 1 << 16
"""Bytes; little, so that the memory of those on their way is used again."""


def fill(table: OppositeBloomFilter) -> None:
    """Put a random tag into every slot, so that each bucket is full and each page of memory is there."""
    private: Any = table
    for memory, fresh in ((private._tags, random.randbytes), (private._cursors, bytes)):  # noqa: SLF001 - no other way
        for start in range(0, len(memory), AT_ONCE):
            count = min(AT_ONCE, len(memory) - start)
            memory[start : start + count] = fresh(count)
