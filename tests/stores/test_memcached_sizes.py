"""What docs/memcached.md says of memory is what memcached takes."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Servers

from nsqdedupe import Claim, MemcachedStore, Release
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.memcached.items import WAYS
from nsqdedupe.sizing import slots_for

DOCS = (Path(__file__).parents[2] / "docs" / "memcached.md").read_text()
LONGEST_NAMESPACE = 24


def said(what: str) -> float:
    """The bytes that the table says."""
    row = re.search(rf"^\| {what} \| ([\d.]+) \|", DOCS, re.MULTILINE)
    assert row, what
    return float(row[1])


def chunks(memcached: Memcached) -> dict[int, int]:
    """How many chunks are taken, by size."""
    slabs = memcached.stats("slabs")
    numbers = [name.partition(":")[0] for name in slabs if name.endswith(":chunk_size")]
    used = {int(slabs[f"{number}:chunk_size"]): int(slabs[f"{number}:used_chunks"]) for number in numbers}
    return {size: count for size, count in used.items() if count}


def of_one_bucket(count: int) -> list[Claim]:
    owner = b"127.0.0.1:4150 0123456789abcdef"
    return [Claim(os.urandom(8) + bytes(8), owner, uuid.uuid4().bytes, lease=62) for _ in range(count)]


@pytest.fixture
def memcached(servers: Servers) -> Memcached:
    return servers.memcached()


@pytest.fixture
def store(memcached: Memcached) -> Iterator[MemcachedStore]:
    with contextlib.closing(
        MemcachedStore(memcached.tcp_address, namespace="n" * LONGEST_NAMESPACE, timeout=30)
    ) as store:
        yield store


def growth(memcached: Memcached, before: dict[int, int]) -> dict[int, int]:
    after = chunks(memcached)
    change = {size: after.get(size, 0) - before.get(size, 0) for size in {*after, *before}}
    return {size: count for size, count in change.items() if count}


@pytest.mark.parametrize("count", [1, WAYS])
def test_a_message_that_is_being_handled_and_one_that_was(
    memcached: Memcached, store: MemcachedStore, count: int
) -> None:
    """A bucket takes as much with one message in it as with all: else it would leave chunks of all sizes behind."""
    empty = chunks(memcached)
    claims = of_one_bucket(count)
    store.claim(claims)
    claimed = int(said("messages being handled"))
    assert growth(memcached, empty) == {claimed: count}
    store.confirm(claims)
    marked = int(said("messages handled in the last 10 s"))
    assert growth(memcached, empty) == {marked: count, bucket_bytes(): 1}


def test_a_message_that_failed(memcached: Memcached, store: MemcachedStore) -> None:
    empty = chunks(memcached)
    claims = of_one_bucket(3)
    store.claim(claims)
    store.release([Release(claim, failed=True, hold=90) for claim in claims])
    assert growth(memcached, empty) == {int(said("messages that failed in the last hour")): 3}


def bucket_bytes() -> int:
    found = re.search(r"an item of (\d+) bytes for 32 messages", DOCS)
    assert found
    return int(found[1])


@pytest.mark.parametrize(("recall", "percent"), [(0.99, "99"), (0.999, "99.9")])
def test_a_message_that_is_remembered(recall: float, percent: str) -> None:
    window = 10_000_000
    each = bucket_bytes() * slots_for(window, recall) / WAYS / window
    assert round(each, 1) == said(f"remembered messages, at {percent} % recall")
