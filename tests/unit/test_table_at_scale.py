"""The table at the size it is made for: ten million operations, and the memory it really takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqdedupe import sizing
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

BATCH = 1000

# Fills a table in a process of its own, and prints by how many bytes its resident memory grew.
MEASURE_RSS = """
import os, random, sys
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

slots, ways, tag_bytes = map(int, sys.argv[1:])
OppositeBloomFilter(slots=1).check_and_set_many([bytes(16)] * 1000)
before = resident()
table = OppositeBloomFilter(slots, ways, tag_bytes)
chance = random.Random(1)
for _ in range(600):
    table.add_many([chance.randbytes(16) for _ in range(1000)])
print(resident() - before)
"""


def fresh_batches(seed: int) -> Iterator[list[bytes]]:
    digests = random.Random(seed)
    while True:
        several = digests.randbytes(16 * BATCH)
        yield [several[at : at + 16] for at in range(0, 16 * BATCH, 16)]


def test_ten_million_operations_drop_nothing_and_remember_what_sizing_says() -> None:
    """Five million new messages, and as many duplicates that come a whole window later: the worst case."""
    window, recall = 100_000, 0.99
    table = OppositeBloomFilter(sizing.slots_for(window, recall))
    batches = fresh_batches(seed=7)
    recent: deque[list[bytes]] = deque(maxlen=window // BATCH + 1)
    false_drops = operations = found = asked = 0
    while operations < 10_000_000:
        recent.append(next(batches))
        false_drops += sum(table.check_and_set_many(recent[-1]))
        operations += BATCH
        if len(recent) == recent.maxlen:
            found += sum(table.contains_many(recent[0]))
            asked += BATCH
            operations += BATCH
    assert false_drops == 0
    # Within a batch the last one is exactly a window back, the first one almost a batch further.
    expected = sizing.recall_of(table.slots, table.ways, window + BATCH // 2)
    assert expected == pytest.approx(recall, abs=0.001)
    assert asked > 4_900_000
    assert found / asked == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize(("slots", "ways", "tag_bytes"), [(1 << 23, 32, 8), (1 << 22, 1, 16)])
def test_resident_memory_is_what_sizing_says(slots: int, ways: int, tag_bytes: int) -> None:
    expected = sizing.bytes_for(slots, ways, tag_bytes)
    assert expected > 64_000_000
    run = subprocess.run(
        [sys.executable, "-c", MEASURE_RSS, str(slots), str(ways), str(tag_bytes)],
        env=os.environ | {"PYTHONPATH": str(Path(sizing.__file__).parents[1])},
        capture_output=True,
        check=True,
        text=True,
    )
    assert int(run.stdout) == pytest.approx(expected, rel=0.1)
