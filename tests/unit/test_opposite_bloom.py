"""The opposite of a Bloom filter: remembers the latest of each bucket, never takes a new one for an old one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsqdedupe import sizing
from nsqdedupe.errors import ConfigError, StoreError
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table import Table

ZERO = bytes(16)


def fingerprint(tag: bytes, bucket: int = 0) -> bytes:
    """A fingerprint with this tag (or its beginning) that falls into this bucket."""
    return tag.ljust(8, b"\0") + bucket.to_bytes(8, "little")


def numbered(number: int, bucket: int = 0) -> bytes:
    return fingerprint(number.to_bytes(8, "big"), bucket)


def test_the_first_time_is_new_and_every_other_time_is_known() -> None:
    table = OppositeBloomFilter(slots=1000)
    fp = numbered(7)
    assert not table.contains(fp)
    assert not table.check_and_set(fp)
    assert table.contains(fp)
    assert table.check_and_set(fp)
    table.discard(fp)
    assert not table.contains(fp)


def test_a_batch_answers_in_order_and_knows_what_came_earlier_in_it() -> None:
    table = OppositeBloomFilter(slots=1000)
    one, two, three = map(numbered, (1, 2, 3))
    assert table.check_and_set_many([one, two, one]) == [False, False, True]
    assert table.contains_many([three, two, one]) == [False, True, True]
    table.discard_many([two, three])
    assert table.contains_many([one, two]) == [True, False]
    assert table.contains_many([]) == []


def test_the_size_is_rounded_up_to_whole_buckets_and_is_what_sizing_says() -> None:
    table = OppositeBloomFilter(slots=100, ways=32, tag_bytes=16)
    assert (table.slots, table.ways, table.tag_bytes) == (128, 32, 16)
    assert table.nbytes == sizing.bytes_for(100, 32, 16) == 128 * 16 + 4
    default = OppositeBloomFilter()
    assert (default.slots, default.ways, default.tag_bytes) == (1 << 20, 32, 8)
    assert OppositeBloomFilter(slots=7, ways=1).slots == 7


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize("ways", [1, 2, 32, 64])
def test_what_is_known_to_be_new_is_added_as_any_other(ways: int, tag_bytes: int) -> None:
    one, other = (OppositeBloomFilter(2 * ways, ways, tag_bytes) for _ in range(2))
    fps = [ZERO, *(numbered(n, bucket=n) for n in range(1, 3 * ways))]
    for fp in fps:
        changes = one.changes()
        (place,) = one.places([fp])
        one.add_new(fp, place)
        assert one.changes() != changes
        other.add(fp)
        assert one.places([fp]) == [-1]
    assert bytes(one._tags) == bytes(other._tags)
    assert bytes(one._cursors) == bytes(other._cursors)
    assert one.contains(fps[-1])


def test_a_place_of_a_table_that_is_closed_is_none() -> None:
    table = OppositeBloomFilter(slots=64)
    (place,) = table.places([numbered(1)])
    table.close()
    with pytest.raises(StoreError, match="closed"):
        table.places([numbered(1)])
    with pytest.raises(StoreError, match="closed"):
        table.add_new(numbered(1), place)


@pytest.mark.parametrize("verb", ["add", "check_and_set", "add_many"])
def test_it_tells_that_something_was_added(verb: str) -> None:
    table = OppositeBloomFilter(slots=64)
    changes = table.changes()
    table.contains(numbered(1))
    assert table.changes() == changes
    getattr(table, verb)([numbered(1)] if verb == "add_many" else numbered(1))
    assert table.changes() != changes


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize("ways", [1, 2, 32, 64])
def test_the_oldest_of_a_bucket_goes_first_and_a_hit_does_not_renew_it(ways: int, tag_bytes: int) -> None:
    table = OppositeBloomFilter(2 * ways, ways, tag_bytes)
    fps = [numbered(n) for n in range(1, ways + 2)]
    table.add_many(fps[:ways])
    assert all(table.check_and_set_many(fps[:ways]))
    table.add(fps[0])
    table.add(fps[ways])
    assert table.contains_many(fps) == [False] + [True] * ways


def test_other_buckets_do_not_wear_a_bucket_out() -> None:
    table = OppositeBloomFilter(slots=64)
    table.add(numbered(1, bucket=0))
    table.add_many([numbered(n, bucket=1) for n in range(2, 1000)])
    assert table.contains(numbered(1, bucket=0))


def test_the_bucket_is_the_last_half_little_endian_modulo_any_number() -> None:
    table = OppositeBloomFilter(slots=3 * 32)
    table.add_many([numbered(1, bucket=2**64 - 1), numbered(2, bucket=2**63 + 5)])
    assert table.contains(numbered(1, bucket=(2**64 - 1) % 3))
    assert table.contains(numbered(2, bucket=(2**63 + 5) % 3))
    assert not table.contains(numbered(1, bucket=(2**64 - 1) % 3 + 1))


def test_eight_byte_tags_are_the_first_half_and_sixteen_all_of_it() -> None:
    one, other = numbered(1, bucket=0), numbered(1, bucket=1)
    halves = OppositeBloomFilter(slots=32, tag_bytes=8)
    halves.add(one)
    assert halves.contains(other), "one bucket, one tag: not told apart"
    whole = OppositeBloomFilter(slots=32, tag_bytes=16)
    whole.add(one)
    assert not whole.contains(other)


def test_a_tag_that_lies_across_two_slots_is_not_there() -> None:
    table = OppositeBloomFilter(slots=32)
    table.add_many([fingerprint(b"abcdefgh"), fingerprint(b"ijklmnop")])
    assert not table.contains(fingerprint(b"efghijkl"))
    assert not table.check_and_set(fingerprint(b"efghijkl"))
    assert table.contains(fingerprint(b"efghijkl"))


LOOKUPS: dict[str, Callable[[OppositeBloomFilter, bytes], bool]] = {
    "contains": lambda table, fp: table.contains(fp),
    "contains_many": lambda table, fp: table.contains_many([fp])[0],
    "places": lambda table, fp: table.places([fp]) == [-1],
    "check_and_set": lambda table, fp: table.check_and_set(fp),
    "check_and_set_many": lambda table, fp: table.check_and_set_many([fp])[0],
}


@pytest.mark.parametrize("known", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("offset", range(1, 8))
def test_a_tag_that_lies_across_two_slots_is_not_there_however_little(
    known: Callable[[OppositeBloomFilter, bytes], bool], offset: int
) -> None:
    table = OppositeBloomFilter(slots=2, ways=2)
    table.add_many([fingerprint(b"abcdefgh"), fingerprint(b"ijklmnop")])
    assert not known(table, fingerprint(b"abcdefghijklmnop"[offset : offset + 8]))


@pytest.mark.parametrize("known", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_who_looks_on_beyond_a_tag_across_two_slots_stays_in_its_bucket(
    known: Callable[[OppositeBloomFilter, bytes], bool], bucket: int
) -> None:
    """Else a new message would be taken for one that is done, of another bucket."""
    table = OppositeBloomFilter(slots=6, ways=2)
    table.add_many([fingerprint(b"abcdefgh", bucket), fingerprint(b"ijklmnop", bucket)])
    table.add_many([fingerprint(b"efghijkl", other) for other in {0, 1, 2} - {bucket}])
    assert not known(table, fingerprint(b"efghijkl", bucket))


def test_a_tag_across_two_slots_does_not_hide_the_one_on_the_grid() -> None:
    table = OppositeBloomFilter(slots=32)
    ahead = [fingerprint(b"abcdefgh"), fingerprint(b"ijklmnop"), fingerprint(b"efghijkl")]
    assert not any(table.check_and_set_many(ahead))
    assert table.contains(fingerprint(b"efghijkl"))
    assert table.contains_many(ahead) == [True, True, True]
    assert table.places(ahead) == [-1, -1, -1]
    assert table.check_and_set_many(ahead) == [True, True, True]
    assert table.check_and_set(fingerprint(b"efghijkl"))
    table.discard(fingerprint(b"efghijkl"))
    assert table.contains_many(ahead) == [True, True, False]


def test_a_tag_across_two_buckets_is_not_there() -> None:
    table = OppositeBloomFilter(slots=2, ways=1)
    table.add_many([fingerprint(b"abcdefgh", 0), fingerprint(b"ijklmnop", 1)])
    assert not table.contains(fingerprint(b"efghijkl", 0))
    assert not table.contains(fingerprint(b"efghijkl", 1))


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize("fp", [ZERO, numbered(0, bucket=5)], ids=["all zero", "zero tag"])
def test_a_zero_tag_is_not_found_in_empty_slots(fp: bytes, tag_bytes: int) -> None:
    """murmur3 of an empty key under seed 0 is all zero: it must be new like any other."""
    table = OppositeBloomFilter(slots=64, tag_bytes=tag_bytes)
    assert not table.contains(fp)
    assert table.contains_many([fp]) == [False]
    assert not table.check_and_set(fp)
    assert table.contains(fp)
    assert table.check_and_set_many([fp]) == [True]
    table.discard(fp)
    assert table.check_and_set_many([fp]) == [False]
    table.add_many([numbered(n, bucket) for n in range(1, 33) for bucket in (0, 1)])
    assert not table.contains(fp), "it is overwritten in its turn"


def test_discard_clears_every_equal_tag_of_its_bucket_alone() -> None:
    table = OppositeBloomFilter(slots=96)
    table._tags[256:512] = b"abcdefgh" * 32
    table.add(fingerprint(b"abcdefgh", bucket=2))
    table.discard(fingerprint(b"abcdefgh", bucket=1))
    assert bytes(table._tags[256:512]) == bytes(256)
    assert table.contains(fingerprint(b"abcdefgh", bucket=2))


def test_a_discarded_slot_waits_for_its_turn() -> None:
    table = OppositeBloomFilter(slots=3, ways=3)
    one, two, three, four = map(numbered, (1, 2, 3, 4))
    table.add_many([one, two, three])
    table.discard(two)
    table.add(four)
    assert table.contains_many([one, two, three, four]) == [False, False, True, True]


def test_fingerprints_may_come_in_any_form_of_bytes() -> None:
    for tag_bytes in (8, 16):
        table = OppositeBloomFilter(slots=32, tag_bytes=tag_bytes)
        reused = bytearray(numbered(1))
        table.check_and_set(reused)
        table.add_many([memoryview(numbered(2))])
        reused[0] = 9
        assert table.contains_many([numbered(1), numbered(2)]) == [True, True]


CALLS: dict[str, Callable[[OppositeBloomFilter, bytes], object]] = {
    "contains": lambda table, fp: table.contains(fp),
    "contains_many": lambda table, fp: table.contains_many([numbered(1), fp]),
    "check_and_set": lambda table, fp: table.check_and_set(fp),
    "check_and_set_many": lambda table, fp: table.check_and_set_many([numbered(1), fp]),
    "add": lambda table, fp: table.add(fp),
    "add_many": lambda table, fp: table.add_many([numbered(1), fp]),
    "discard": lambda table, fp: table.discard(fp),
    "discard_many": lambda table, fp: table.discard_many([numbered(1), fp]),
}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(b"", "0 bytes"), (b"secretkey", "9 bytes"), (b"x" * 17, "17 bytes"), ("x" * 16, "str"), (None, "NoneType")],
)
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("tag_bytes", [8, 16])
def test_what_is_no_fingerprint_is_refused_and_not_shown(verb: str, wrong: bytes, what: str, tag_bytes: int) -> None:
    table = OppositeBloomFilter(slots=32, tag_bytes=tag_bytes)
    with pytest.raises(ConfigError, match=f"fingerprint: must be 16 bytes, not {what}; hash the key") as caught:
        CALLS[verb](table, wrong)
    assert "secretkey" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": (1 << 36) + 1}, "slots="),
        ({"slots": 1e6}, "slots=1000000.0"),
        ({"ways": 0}, "ways=0"),
        ({"ways": 65}, "ways=65"),
        ({"tag_bytes": 4}, "tag_bytes=4"),
        ({"tag_bytes": 12}, "tag_bytes=12"),
        ({"tag_bytes": 16.0}, "tag_bytes=16.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        OppositeBloomFilter(**options)


def test_it_is_what_a_store_asks_of_a_table() -> None:
    table: Table = OppositeBloomFilter(slots=32)
    table.add_many([numbered(1)])
    table.discard_many([numbered(2)])
    assert table.contains_many([numbered(1), numbered(2)]) == [True, False]
