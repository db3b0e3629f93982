"""The memory of a table that is in no file: taken where it is written to, given back at once, never shared."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from resident import resident
from table_process import fork_in_memory, made_within, process, told

from nsqdedupe import sizing
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table_header import Shape

SHAPE = Shape(slots=1 << 21, ways=32, tag_bytes=8)
BYTES = sizing.bytes_for(*SHAPE)
SLACK = 2 << 20
IN_A_PAGE = 16
"""Buckets of 32 tags of 8 bytes; in a larger page there are more, and the table has fewer pages."""


def one_in_each_page(buckets: range) -> list[bytes]:
    """Fingerprints with which each page that has some of these buckets is met."""
    return [b"tagtagta" + bucket.to_bytes(8, "little") for bucket in buckets[::IN_A_PAGE]]


@pytest.mark.parametrize("end", [OppositeBloomFilter.close, lambda _: None], ids=["closed", "dropped"])
def test_memory_is_taken_where_it_is_written_to_and_given_back(end: Callable[[OppositeBloomFilter], None]) -> None:
    before = resident()
    table = OppositeBloomFilter(*SHAPE)
    assert table.nbytes == BYTES
    buckets = range(SHAPE.slots // SHAPE.ways)
    half = buckets[: len(buckets) // 2]
    assert not any(table.contains_many(one_in_each_page(buckets)))
    assert resident() - before < SLACK, "neither making it nor looking up takes any"
    table.add_many(one_in_each_page(half))
    assert resident() - before == pytest.approx(BYTES / 2, abs=SLACK)
    table.add_many(one_in_each_page(buckets))
    assert resident() - before == pytest.approx(BYTES, abs=SLACK)
    end(table)
    del table
    assert resident() - before < SLACK


def test_after_a_fork_each_has_a_table_of_its_own() -> None:
    before, by_child, by_parent = (bytes([n]) * 16 for n in (1, 2, 3))
    with process(fork_in_memory, SHAPE, before, by_child, by_parent) as (_, connection):
        assert told(connection) == ("parent", [True, False, True])
        assert told(connection) == ("child", [True, True, False])


def test_a_system_that_refuses_the_memory_is_told_of_as_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match=r"room in memory for the \d+ bytes .* allocate memory; ask for"):
        OppositeBloomFilter(slots=32)


def test_where_there_is_no_room_it_cannot_be_made() -> None:
    with process(made_within, Shape(1 << 32, 32, 8), 1 << 30) as (_, connection):
        kind, text = told(connection)
        assert kind == "MemoryError"
        assert text.startswith("no room in memory for the 34359738368 bytes of a table: ")
        assert text.endswith("; ask for fewer slots")
