"""How large a table must be, and what a table of a given size promises. Arithmetic only.

A table is an array of buckets of ``ways`` slots; each slot holds one tag, and within a bucket the oldest
tag is overwritten first (`nsqdedupe.tables.opposite_bloom`). Fingerprints fall on buckets at random, so of
``x`` further messages a bucket gets a number that follows Poisson's law with mean ``x / buckets``. A
message is remembered as long as its bucket got fewer than ``ways`` of them:

    recall = P[Poisson(ways * x / slots) < ways]

Buckets beat single slots because that number scatters less about its mean the larger the mean is: for 99 %
recall one way needs 99.5 slots per message of the window, 32 ways need 1.57.

A false drop needs a new message whose tag is already in its bucket. That depends on the length of the tag
alone, not on the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nsqdedupe import checks

FINGERPRINT_BYTES = 16
MAX_WAYS = 64
TAG_BYTES = (8, FINGERPRINT_BYTES)
MAX_SLOTS = 1 << 36
"""Half a terabyte of 8-byte tags: above this an argument is a slip of the pen, not a wish."""

_MAX_MESSAGES = 1 << 50
_MAX_RECALL = 1 - 1e-9


def slots_for(window: int, recall: float, ways: int = 32) -> int:
    """The smallest number of slots that remembers a message for a whole window with probability ``recall``.

    Args:
        window: further messages after which a duplicate must still be recognised, 1 to 2**50.

        recall: share of the duplicates that come exactly that late which are recognised, greater than 0,
            at most 1 - 1e-9. Duplicates that come earlier fare better.

        ways: slots per bucket, 1 to 64.

    Returns:
        A whole number of buckets, times ``ways``. It may be more than a table can be built with.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check_window("window", window, low=1)
    _check_recall(recall)
    _check_ways(ways)
    return ways * _smallest(lambda buckets: _recall(window / buckets, ways) >= recall)


def window_for(slots: int, recall: float, ways: int = 32) -> int:
    """The longest window, in messages, over which a table of ``slots`` keeps ``recall``; may be 0.

    The inverse of `slots_for` for whoever starts from the memory there is. ``slots`` is rounded up to whole
    buckets.

    Raises:
        ConfigError: an argument is out of range.
    """
    buckets = buckets_for(slots, ways)
    _check_recall(recall)
    return _smallest(lambda further: _recall(further / buckets, ways) < recall) - 1


def recall_of(slots: int, ways: int, further: int) -> float:
    """The probability that a message is still remembered after ``further`` other ones, 0.0 to 1.0.

    Exact to about 1e-13 for tables of many buckets. In a table of a few buckets, messages scatter less
    than Poisson's law says, and recall above one half is better than this.

    Args:
        slots: slots of the table, 1 to 2**36, rounded up to whole buckets.

        ways: slots per bucket, 1 to 64.

        further: messages confirmed since, each of them new, 0 to 2**50.

    Raises:
        ConfigError: an argument is out of range.
    """
    buckets = buckets_for(slots, ways)
    _check_window("further", further, low=0)
    return _recall(further / buckets, ways)


def bytes_for(slots: int, ways: int, tag_bytes: int) -> int:
    """Bytes of memory that a table takes: its tags, and one cursor byte per bucket.

    Raises:
        ConfigError: an argument is out of range.
    """
    buckets = buckets_for(slots, ways)
    _check_tag_bytes(tag_bytes)
    return buckets * (ways * tag_bytes + 1)


def false_drop_probability(slots: int, ways: int, tag_bytes: int) -> float:
    """The probability that a full table takes one new message for one that was done.

    With 8-byte tags another message of the same bucket must share the tag: ``ways * 2**-64``, whatever the
    number of slots. With 16-byte tags, which are whole fingerprints, any of the ``slots`` messages must
    share all of it: ``slots * 2**-128``. It holds for producers that do not forge fingerprints (see
    ``secret`` in `nsqdedupe.fingerprint`).

    Raises:
        ConfigError: an argument is out of range.
    """
    buckets = buckets_for(slots, ways)
    _check_tag_bytes(tag_bytes)
    if tag_bytes == FINGERPRINT_BYTES:
        return math.ldexp(buckets * ways, -128)
    return math.ldexp(ways, -64)


def buckets_for(slots: int, ways: int) -> int:
    """Whole buckets that hold at least ``slots`` slots.

    Raises:
        ConfigError: ``slots`` is not from 1 to 2**36, or ``ways`` not from 1 to 64.
    """
    checks.integer("slots", slots, 1, MAX_SLOTS, "a table takes 8 or 16 bytes per slot")
    _check_ways(ways)
    return -(-slots // ways)


def _check_ways(ways: int) -> None:
    checks.integer("ways", ways, 1, MAX_WAYS, "32 is the default, 1 the classic form")


def _check_tag_bytes(tag_bytes: int) -> None:
    remedy = "16 stores whole fingerprints, 8 is the default"
    checks.integer("tag_bytes", tag_bytes, *TAG_BYTES, remedy)
    checks.one_of("tag_bytes", tag_bytes, TAG_BYTES, remedy)


def _check_window(option: str, messages: int, low: int) -> None:
    checks.integer(option, messages, low, _MAX_MESSAGES, "it is counted in messages")


def _check_recall(recall: float) -> None:
    checks.number(
        "recall", recall, 0, _MAX_RECALL, open_low=True, remedy="no table that forgets recognises every duplicate"
    )


def _smallest(holds: Callable[[int], bool]) -> int:
    """The smallest positive whole number for which ``holds``, which stays true once it is."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _recall(mean: float, ways: int) -> float:
    """P[Poisson(mean) < ways], in logarithms: the plain terms overflow at 64 ways and underflow at e**-746."""
    if not mean:
        return 1.0
    log_mean = math.log(mean)
    terms = (math.exp(count * log_mean - mean - math.lgamma(count + 1)) for count in range(ways))
    return min(1.0, math.fsum(terms))
