"""The table against the plainest form of its promise: a list of first-in-first-out queues."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

SINGLE_VERBS = ["contains", "check_and_set", "add", "discard"]
VERBS = SINGLE_VERBS + [f"{verb}_many" for verb in SINGLE_VERBS]

Step = tuple[str, list[bytes]]


class ListOfFifos:
    """A bucket is a queue of tags; None stands where one was discarded or none has been."""

    def __init__(self, buckets: int, ways: int, tag_bytes: int) -> None:
        self.buckets = [deque[bytes | None]([None] * ways, maxlen=ways) for _ in range(buckets)]
        self.tag_bytes = tag_bytes

    def split(self, fp: bytes) -> tuple[deque[bytes | None], bytes]:
        tag = fp[: self.tag_bytes]
        bucket = self.buckets[int.from_bytes(fp[8:], "little") % len(self.buckets)]
        return bucket, tag if any(tag) else b"\xff" * self.tag_bytes

    def contains(self, fp: bytes) -> bool:
        bucket, tag = self.split(fp)
        return tag in bucket

    def check_and_set(self, fp: bytes) -> bool:
        bucket, tag = self.split(fp)
        if tag in bucket:
            return True
        bucket.append(tag)
        return False

    def add(self, fp: bytes) -> None:
        self.check_and_set(fp)

    def discard(self, fp: bytes) -> None:
        bucket, tag = self.split(fp)
        for place, held in enumerate(bucket):
            if held == tag:
                bucket[place] = None


def run_both(buckets: int, ways: int, tag_bytes: int, steps: Iterable[Step], path: Path | None = None) -> None:
    """Take each step on a table and on the model, and compare what they answer."""
    table = OppositeBloomFilter(buckets * ways, ways, tag_bytes, path)
    model = ListOfFifos(buckets, ways, tag_bytes)
    for verb, fps in steps:
        expected = [getattr(model, verb.removesuffix("_many"))(fp) for fp in fps]
        if verb in SINGLE_VERBS:
            assert [getattr(table, verb)(fp) for fp in fps] == expected
        elif verb in ("add_many", "discard_many"):
            assert getattr(table, verb)(fps) is None
        else:
            assert getattr(table, verb)(fps) == expected
    table.close()


# Few byte values, so that tags meet across slots, are zero, or equal the tag that stands for zero.
heads = st.lists(st.sampled_from(b"\0\0\0\1\xff"), min_size=8, max_size=8).map(bytes) | st.sampled_from(
    [b"\0" * 8, b"\1" * 8, b"\xff" * 8]
)
tails = st.sampled_from([b"\0" * 8, b"\1" + b"\0" * 7, b"\2" + b"\0" * 7, b"\1" * 8, b"\xff" * 8])


steps_on_tags_that_look_alike = st.lists(
    st.tuples(st.sampled_from(VERBS), st.lists(st.builds(bytes.__add__, heads, tails), max_size=8)), max_size=40
)


@settings(deadline=None, max_examples=300)
@given(
    buckets=st.integers(1, 3),
    ways=st.integers(1, 64),
    tag_bytes=st.sampled_from([8, 16]),
    steps=steps_on_tags_that_look_alike,
)
def test_it_behaves_as_a_list_of_queues_on_tags_that_look_alike(
    buckets: int, ways: int, tag_bytes: int, steps: list[Step]
) -> None:
    run_both(buckets, ways, tag_bytes, steps)


@settings(deadline=None, max_examples=50)
@given(
    buckets=st.integers(1, 3),
    ways=st.integers(1, 64),
    tag_bytes=st.sampled_from([8, 16]),
    steps=steps_on_tags_that_look_alike,
)
def test_it_behaves_so_in_a_file_too(buckets: int, ways: int, tag_bytes: int, steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_both(buckets, ways, tag_bytes, steps, Path(folder) / "seen.table")


@pytest.mark.parametrize("tag_bytes", [8, 16])
def test_it_behaves_as_a_list_of_queues_at_every_number_of_ways(tag_bytes: int) -> None:
    """Long runs, in which every bucket overflows many times and few slots are discarded."""
    for ways in range(1, 65):
        chance = random.Random(ways)
        known = [chance.randbytes(16) for _ in range(6 * ways)]
        verbs = [verb for verb in VERBS if verb != "discard_many"]
        run_both(3, ways, tag_bytes, [(chance.choice(verbs), chance.choices(known, k=5)) for _ in range(20 * ways)])


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize("ways", [1, 3, 32, 64])
def test_it_behaves_as_a_list_of_queues_in_a_file(tmp_path: Path, ways: int, tag_bytes: int) -> None:
    """The buckets of some of these lie across the pages of the file."""
    chance = random.Random(ways)
    known = [chance.randbytes(16) for _ in range(200 * ways)]
    verbs = [verb for verb in VERBS if not verb.startswith("discard")]
    steps = [(chance.choice(verbs), chance.choices(known, k=5)) for _ in range(3000)]
    run_both(100, ways, tag_bytes, steps, tmp_path / "seen.table")
