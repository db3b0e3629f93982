"""The table at the size it is made for: ten million operations, and the memory it really takes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from table_process import grow, process, told

from nsqdedupe import sizing
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table_header import Shape

BATCH = 1000


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
    with process(grow, Shape(slots, ways, tag_bytes), 600_000) as (_, connection):
        assert told(connection) == pytest.approx(expected, rel=0.1)
