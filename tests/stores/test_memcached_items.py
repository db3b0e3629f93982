"""What lies in memcached: claim items, buckets, times to live."""

from __future__ import annotations

import pytest

from nsqdedupe.errors import ConfigError
from nsqdedupe.memcached.held import HELD_AT_MOST, Bucket, Held, Holdings
from nsqdedupe.memcached.items import (
    CLAIMED,
    DONE,
    FREE,
    LONGEST,
    TAIL,
    Item,
    hold_ttl,
    holds,
    lease_ttl,
    parse,
    sound,
    split,
    tag_of,
    with_tags,
    without_tags,
)
from nsqdedupe.store import Claim

ITEM = Item(CLAIMED, bytes(range(16)), b"8 bytes.", 3, 2, 1)
A, B, C = b"A" * 8, b"B" * 8, b"C" * 8


def test_a_claim_item_comes_back_as_it_was_packed() -> None:
    for item in (ITEM, ITEM._replace(kind=FREE, started=0)):
        assert parse(item.packed()) == item


def test_counts_that_are_too_large_stay_the_largest() -> None:
    item = parse(ITEM._replace(tries=1 << 40, starts=1 << 40).packed())
    assert item is not None
    assert item.tries == item.starts == (1 << 32) - 1


STRANGE = [None, b"", DONE, b"D" * 34, b"C", ITEM.packed()[:-1], ITEM.packed() + b"x", b"X" + ITEM.packed()[1:]]


@pytest.mark.parametrize("value", STRANGE)
def test_what_was_not_packed_so_is_no_claim_item(value: bytes | None) -> None:
    assert parse(value) is None


@pytest.mark.parametrize(("lease", "ttl"), [(0.001, 1), (1, 1), (1.001, 2), (62.0, 62), (LONGEST, LONGEST)])
def test_a_lease_is_rounded_up_and_given_the_tick_that_may_be_nearly_over(lease: float, ttl: int) -> None:
    assert lease_ttl("lease", lease) == b"%d" % (ttl + TAIL + 1)


def test_no_time_to_live_reaches_the_thirty_days_above_which_memcached_stores_nothing() -> None:
    assert int(lease_ttl("lease", LONGEST)) == 30 * 24 * 3600
    assert int(hold_ttl(1e12)) == 30 * 24 * 3600


@pytest.mark.parametrize("lease", [LONGEST + 1, 0, -1, float("nan"), float("inf")])
def test_a_lease_that_memcached_cannot_hold_is_refused(lease: float) -> None:
    with pytest.raises(ConfigError, match=r"lease=.*: must be greater than 0, 2588399 seconds at most"):
        lease_ttl("lease", lease)


def test_without_a_hold_there_is_nothing_to_wait_for() -> None:
    assert hold_ttl(0) == hold_ttl(-1) == b"%d" % TAIL
    assert hold_ttl(0.5) == b"%d" % (1 + TAIL + 1)


def test_a_bucket_is_whole_tags_and_thirty_two_at_most() -> None:
    assert all(sound(b"x" * size) for size in range(0, 257, 8))
    assert not any(sound(b"x" * size) for size in (1, 7, 9, 255, 257, 264))


def test_a_tag_is_found_on_the_grid_only() -> None:
    assert holds(A + B + C, C)
    assert not holds(b"xxxx" + A + b"xxxx", A)
    assert holds(b"xxxx" + A + b"xxxx" + A, A)
    assert not holds(b"", A)


def test_the_newest_tags_come_first_and_the_oldest_fall_out() -> None:
    assert with_tags(A, [B, C]) == C + B + A
    full = b"".join(b"%08d" % number for number in range(32))
    assert with_tags(full, [A]) == A + full[:-8]


def test_a_tag_that_is_there_keeps_its_place() -> None:
    assert with_tags(A + B, [B, A]) == A + B
    assert with_tags(A, [B, B, A]) == B + A


def test_every_tag_of_a_message_is_taken_out() -> None:
    assert without_tags(A + B + A + C, [A]) == B + C
    assert without_tags(b"xxxx" + A + b"xxxx", [A]) == b"xxxx" + A + b"xxxx"
    assert without_tags(A, [A]) == b""


def test_the_tag_is_the_first_half_and_none_is_zero() -> None:
    tag, number = split(bytes(8) + (5).to_bytes(8, "little"))
    assert number == 5
    assert tag_of(tag) == b"\xff" * 8
    assert tag_of(A) == A


# -- what is noted of claims ---------------------------------------------------------------------


def claim(number: int, nonce: bytes) -> Claim:
    return Claim(number.to_bytes(16, "big"), b"a", nonce, 60.0)


def note(holdings: Holdings, of: Claim) -> Held:
    held = Held(of.nonce, 1, b"1", b"", (None, b"", of.fingerprint[-1:], b""))
    holdings.keep(of.fingerprint, held, Bucket(1, b"", b""))
    return held


def test_the_latest_delivery_of_a_message_is_the_one_that_is_noted() -> None:
    holdings = Holdings()
    older, newer = claim(1, b"older"), claim(1, b"newer")
    note(holdings, older)
    held = note(holdings, newer)
    assert holdings.of(older) is None
    assert holdings.of(newer) == held
    holdings.drop([older])
    assert holdings.of(newer) == held
    holdings.drop([newer])
    assert len(holdings) == 0


def test_the_oldest_notes_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HELD_AT_MOST >= 10_000
    monkeypatch.setattr("nsqdedupe.memcached.held.HELD_AT_MOST", 3)
    holdings = Holdings()
    claims = [claim(number, b"nonce") for number in range(5)]
    for each in claims:
        note(holdings, each)
    holdings.trim()
    assert [holdings.of(each) is not None for each in claims] == [False, False, True, True, True]
    holdings.forget(claims[4].fingerprint)
    holdings.forget(claims[4].fingerprint)
    assert len(holdings) == 2


def test_a_bucket_is_known_as_long_as_one_of_its_messages_is_held() -> None:
    holdings = Holdings()
    first, second = claim(0x0100, b"nonce"), claim(0x0200, b"nonce")
    for each in (first, second, second):
        note(holdings, each)
    written = Bucket(1, A, b"2")
    holdings.wrote(b"\0", written)
    holdings.drop([first])
    assert holdings.bucket(b"\0", 1) == written
    assert holdings.bucket(b"\0", 2) is None, "of another connection"
    holdings.drop([second])
    assert holdings.bucket(b"\0", 1) is None
    holdings.wrote(b"\0", written)
    assert holdings.bucket(b"\0", 1) is None
