"""The arithmetic of window, recall, slots and bytes: against the published figures, and against real tables."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqdedupe import sizing
from nsqdedupe.errors import ConfigError
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

WINDOW = 1_000_000
SECONDS_PER_YEAR = 365.25 * 24 * 3600

ways_of_all_kinds = st.integers(1, 64)
windows = st.integers(1, 10_000_000)
recalls = st.floats(0.001, 0.999)


@pytest.mark.parametrize(
    ("ways", "tag_bytes", "recall", "bytes_of_tags"),
    [
        (1, 16, 0.99, 1592),
        (1, 16, 0.999, 15_992),
        (32, 8, 0.99, 12.6),
        (32, 8, 0.999, 14.8),
        (32, 16, 0.99, 25.2),
        (32, 16, 0.999, 29.6),
    ],
)
def test_bytes_per_message_of_the_window_are_the_published_ones(
    ways: int, tag_bytes: int, recall: float, bytes_of_tags: float
) -> None:
    slots = sizing.slots_for(WINDOW, recall, ways)
    digits = 0 if bytes_of_tags > 1000 else 1
    assert round(slots * tag_bytes / WINDOW, digits) == bytes_of_tags
    cursors = sizing.bytes_for(slots, ways, tag_bytes) - slots * tag_bytes
    assert cursors * ways == slots


def test_the_default_needs_a_cursor_byte_per_256_bytes_of_tags() -> None:
    assert sizing.bytes_for(slots=32_000, ways=32, tag_bytes=8) == 257_000
    assert sizing.bytes_for(slots=1, ways=32, tag_bytes=8) == 257


def test_a_false_drop_is_as_rare_as_published() -> None:
    slots = sizing.slots_for(WINDOW, 0.999)
    per_message = sizing.false_drop_probability(slots, ways=32, tag_bytes=8)
    assert per_message == 32 * 2.0**-64
    assert f"{per_message:.1e}" == "1.7e-18"
    years_at_a_million_a_second = 1 / (per_message * 1e6 * SECONDS_PER_YEAR)
    assert 18_000 < years_at_a_million_a_second < 18_500
    assert sizing.false_drop_probability(slots, ways=32, tag_bytes=16) == slots * 2.0**-128
    assert sizing.false_drop_probability(slots=33, ways=32, tag_bytes=16) == 64 * 2.0**-128


def test_the_articles_worked_example_sizes_for_forgetting() -> None:
    """ "Stream de-duplication" derives N = 1,563,461 slots for 90 % and 3.6 million further messages.

    That is the table in which 90 % are forgotten; for 90 % remembered it takes 22 times as many slots.
    """
    further = 3_600_000
    assert sizing.slots_for(further, recall=0.1, ways=1) == 1_563_461
    assert sizing.recall_of(1_563_461, ways=1, further=further) == pytest.approx(0.1, abs=1e-6)
    remembered = sizing.slots_for(further, recall=0.9, ways=1)
    assert remembered == pytest.approx(34.2e6, rel=0.002)
    assert remembered / 1_563_461 == pytest.approx(21.85, abs=0.01)
    assert sizing.slots_for(further, recall=0.9) < 5_000_000


@given(window=windows, recall=recalls, ways=ways_of_all_kinds)
def test_slots_for_gives_the_smallest_table_that_is_large_enough(window: int, recall: float, ways: int) -> None:
    slots = sizing.slots_for(window, recall, ways)
    assert slots % ways == 0
    assert sizing.recall_of(slots, ways, window) >= recall
    if slots > ways:
        assert sizing.recall_of(slots - ways, ways, window) < recall


@given(slots=st.integers(1, 1 << 30), recall=recalls, ways=ways_of_all_kinds)
def test_window_for_gives_the_longest_window_that_keeps_the_recall(slots: int, recall: float, ways: int) -> None:
    window = sizing.window_for(slots, recall, ways)
    assert sizing.recall_of(slots, ways, window) >= recall
    assert sizing.recall_of(slots, ways, window + 1) < recall


@pytest.mark.parametrize("ways", [1, 2, 32, 64])
def test_what_a_table_just_does_is_enough(ways: int) -> None:
    recall = sizing.recall_of(100 * ways, ways, 50 * ways)
    assert sizing.slots_for(50 * ways, recall, ways) == 100 * ways
    assert sizing.window_for(100 * ways, recall, ways) == 50 * ways


def test_32_ways_are_the_default() -> None:
    assert sizing.slots_for(1000, 0.99) == sizing.slots_for(1000, 0.99, 32)
    assert sizing.window_for(3200, 0.99) == sizing.window_for(3200, 0.99, 32)


@given(window=windows, recall=recalls, ways=ways_of_all_kinds)
def test_window_for_undoes_slots_for(window: int, recall: float, ways: int) -> None:
    slots = sizing.slots_for(window, recall, ways)
    assert sizing.window_for(slots, recall, ways) >= window
    if slots > ways:
        assert sizing.window_for(slots - ways, recall, ways) < window


@given(slots=st.integers(1, 1 << 36), further=st.integers(0, 1 << 40))
def test_one_way_forgets_exponentially(slots: int, further: int) -> None:
    assert sizing.recall_of(slots, 1, further) == pytest.approx(math.exp(-further / slots), abs=1e-13)


@settings(max_examples=200)
@given(buckets=st.integers(1, 1000), ways=ways_of_all_kinds, further=st.integers(1, 200_000))
def test_recall_is_exact_to_thirteen_digits(buckets: int, ways: int, further: int) -> None:
    assert sizing.recall_of(buckets * ways, ways, further) == pytest.approx(
        poisson_below(Decimal(further) / buckets, ways), abs=1e-13
    )


def poisson_below(mean: Decimal, ways: int) -> float:
    """P[Poisson(mean) < ways] by the plain formula, with digits to spare."""
    with localcontext() as context:
        context.prec = 60
        return float((-mean).exp() * sum(mean**count / math.factorial(count) for count in range(ways)))


def test_recall_is_sound_at_both_ends() -> None:
    assert sizing.recall_of(slots=1, ways=1, further=0) == 1.0
    assert sizing.recall_of(slots=1, ways=64, further=1 << 50) == 0.0
    assert sizing.recall_of(slots=1 << 36, ways=64, further=1) == 1.0
    forgotten = 1.0 - sizing.recall_of(slots=10**9, ways=1, further=1)
    assert forgotten == pytest.approx(1e-9, rel=1e-6)
    assert sizing.slots_for(1, recall=1 - 1e-9, ways=1) == pytest.approx(1e9, rel=1e-6)


def test_a_table_can_be_too_small_for_any_window() -> None:
    assert sizing.window_for(slots=1, recall=0.999, ways=1) == 0


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize(("ways", "recall"), [(1, 0.5), (1, 0.9), (4, 0.9), (32, 0.5), (32, 0.99), (64, 0.9)])
def test_real_tables_remember_what_the_formula_says(ways: int, recall: float, tag_bytes: int) -> None:
    window = 6_000
    table = OppositeBloomFilter(sizing.slots_for(window, recall, ways), ways, tag_bytes)
    batch = 100
    expected = sizing.recall_of(table.slots, ways, window + batch // 2)
    assert measured_recall(table, window // batch, batch, samples=60_000) == pytest.approx(expected, abs=0.01)


def measured_recall(table: OppositeBloomFilter, batches_between: int, batch: int, samples: int) -> float:
    """The share of messages found after ``batches_between`` further batches, once the table is full."""
    digests = random.Random(20_12)
    recent: deque[list[bytes]] = deque(maxlen=batches_between + 1)
    found = asked = 0
    warm_up = 3 * batches_between
    for number in range(warm_up + samples // batch):
        recent.append([digests.randbytes(16) for _ in range(batch)])
        table.add_many(recent[-1])
        if number >= warm_up:
            found += sum(table.contains_many(recent[0]))
            asked += batch
    return found / asked


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: sizing.slots_for(0, 0.9), "window=0: must be a whole number from 1 to"),
    (lambda: sizing.slots_for(1 << 51, 0.9), "window=.*; it is counted in messages"),
    (lambda: sizing.slots_for(1.5, 0.9), "window=1.5: must be a whole number"),  # type: ignore[arg-type]
    (lambda: sizing.slots_for(1, 0), "recall=0: must be a number greater than 0"),
    (lambda: sizing.slots_for(1, 1), "recall=1: .*no table that forgets recognises every duplicate"),
    (lambda: sizing.slots_for(1, 99.9), "recall=99.9"),
    (lambda: sizing.slots_for(1, math.nan), "recall=nan"),
    (lambda: sizing.slots_for(1, 0.9, 0), "ways=0: must be a whole number from 1 to 64"),
    (lambda: sizing.slots_for(1, 0.9, 65), "ways=65"),
    (lambda: sizing.window_for(1, 1), "recall=1"),
    (lambda: sizing.window_for(0, 0.9), "slots=0: must be a whole number from 1 to"),
    (lambda: sizing.recall_of((1 << 36) + 1, 32, 1), "slots=.*8 or 16 bytes per slot"),
    (lambda: sizing.recall_of(1, True, 1), "ways=True"),
    (lambda: sizing.recall_of(1, 1, -1), "further=-1: must be a whole number from 0"),
    (lambda: sizing.bytes_for(1, 1, 12), "tag_bytes=12: must be one of 8, 16; 16 stores whole fingerprints"),
    (lambda: sizing.bytes_for(1, 1, 8.0), "tag_bytes=8.0"),  # type: ignore[arg-type]
    (lambda: sizing.bytes_for(0, 1, 8), "slots=0"),
    (lambda: sizing.false_drop_probability(1, 1, 0), "tag_bytes=0"),
    (lambda: sizing.false_drop_probability(1, 65, 8), "ways=65"),
    (lambda: sizing.buckets_for(0, 1), "slots=0"),
]


@pytest.mark.parametrize(("ask", "text"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_what_is_out_of_range_is_refused(ask: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ask()
