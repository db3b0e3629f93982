"""What lies in memcached: claim items, buckets of seen fingerprints, and how long each lives.

A *claim item* is ``C`` (somebody has the message), ``F`` (given back; perhaps held) or ``D`` (it was handled: a marker
for as long as somebody may still act on what it read before). Its time to live is the lease, or the hold, and the
tail: so it tells by what is left of it whether the lease has ended, and keeps the tries when it has.

A *bucket* is up to 32 tags of 8 bytes, newest first, then zeros. Tag and bucket number come from different halves of
the fingerprint, as in `nsqdedupe.tables.opposite_bloom`.

Both are read as what a stranger may have written: anything that is not one of ours is nobody's claim, or no tag at all.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from mmh3 import mmh3_x64_128_digest

from nsqdedupe.checks import refuse

TAIL = 3600
"""Seconds that tries outlive their claim: nsqd's longest requeue delay."""

MARKER_SECONDS = 10
"""For how long a handled message is marked in its claim item. Its bucket says so for good; the marker stops who has
read the bucket before that."""

FOREVER = 60 * 60 * 24 * 30
"""Times to live above these seconds are dates to memcached: in 1970, so it stores nothing, and says that it did."""

LONGEST = FOREVER - TAIL - 1
"""Seconds, for a lease and for a hold."""

WAYS = 32
TAG_BYTES = 8
BUCKET_BYTES = WAYS * TAG_BYTES
_OFF_GRID = TAG_BYTES - 1
_ZERO_TAG = bytes(TAG_BYTES)
_STAND_IN = b"\xff" * TAG_BYTES

CLAIMED, FREE, DONE = b"C", b"F", b"D"
_LAYOUT = struct.Struct("<c16s8sIIB")
_MOST = (1 << 32) - 1

ITEM_BYTES = _LAYOUT.size
pack = _LAYOUT.pack
"""Kind, nonce, owner as `owner_of` gives it, tries, starts, and 1 if the claim has started a run, else 0."""

split = struct.Struct("<8sQ").unpack
"""A fingerprint into the bytes of its tag and the number that its bucket comes from."""


class Item(NamedTuple):
    """A claim item that is not the marker."""

    kind: bytes
    """`CLAIMED` or `FREE`."""

    nonce: bytes
    """Which delivery has it, or had it last."""

    owner: bytes
    """Which copy that was a delivery of."""

    tries: int
    starts: int
    """Runs that were started under earlier claims and never heard of again."""

    started: int
    """1 if this claim has started a run."""

    def packed(self) -> bytes:
        """As it lies in memcached."""
        kind, nonce, owner, tries, starts, started = self
        return pack(kind, nonce, owner, min(tries, _MOST), min(starts, _MOST), started)


def parse(value: bytes | None) -> Item | None:
    """The claim item that was packed so; None for anything else, the marker too."""
    if value is None or len(value) != ITEM_BYTES or value[:1] not in (CLAIMED, FREE):
        return None
    return Item(*_LAYOUT.unpack(value))


def owner_of(owner: bytes) -> bytes:
    """8 bytes by which a copy is recognised. Two that share them by chance end each other's holds, no more."""
    return mmh3_x64_128_digest(owner)[:8]


def lease_ttl(option: str, seconds: float) -> bytes:
    """The time to live of a claim or a hold that lasts this long: never shorter, two seconds longer at most.

    memcached counts in ticks of a second, the first of which may be nearly over: hence one more.

    Raises:
        ConfigError: it is not greater than 0, or so long that memcached takes it for a date.
    """
    if not 0 < seconds <= LONGEST:
        raise refuse(
            option, seconds, f"greater than 0, {LONGEST} seconds at most", "memcached takes more for a date in 1970"
        )
    return b"%d" % (math.ceil(seconds) + TAIL + 1)


def hold_ttl(seconds: float) -> bytes:
    """The time to live of what a release leaves: nothing to wait for if the hold is 0."""
    return b"%d" % TAIL if seconds <= 0 else lease_ttl("hold", min(seconds, LONGEST))


def tag_of(tag: bytes) -> bytes:
    """The tag as it is stored. Zero is what empty slots of an embedded table hold, so that another stands for it."""
    return _STAND_IN if tag == _ZERO_TAG else tag


def sound(bucket: bytes) -> bool:
    """Whether these bytes can be a bucket of ours."""
    return len(bucket) <= BUCKET_BYTES and not len(bucket) & _OFF_GRID


def holds(bucket: bytes, tag: bytes) -> bool:
    """Whether a sound bucket has this tag: a hit off the grid lies across two tags and is none."""
    position = bucket.find(tag)
    while position > 0 and position & _OFF_GRID:
        position = bucket.find(tag, (position | _OFF_GRID) + 1)
    return position >= 0


def with_tags(bucket: bytes, tags: Iterable[bytes]) -> bytes:
    """A sound bucket after these were confirmed, one after the other. One that is there keeps its place."""
    fresh = b""
    for tag in tags:
        if not holds(bucket, tag) and not holds(fresh, tag):
            fresh = tag + fresh
    return (fresh + bucket)[:BUCKET_BYTES]


def without_tags(bucket: bytes, tags: Iterable[bytes]) -> bytes:
    """A sound bucket after these were forgotten."""
    gone = set(tags)
    kept = (bucket[start : start + TAG_BYTES] for start in range(0, len(bucket), TAG_BYTES))
    return b"".join(tag for tag in kept if tag not in gone)
