"""What was confirmed a moment ago is answered without a round trip; what may have been forgotten is not."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import pytest
from messages import DONE, NEW, Patient, deliveries, delivery, message, own, sibling, verdicts
from relay import Relay, relay
from servers import eventually
from test_memcached_verbs import Handle

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.memcached import recent
from nsqdedupe.memcached.recent import AT_MOST, Recent
from nsqdedupe.store import Answer, Claim
from nsqdedupe.testing import ManualClock

pytestmark = pytest.mark.remembers

WINDOW = 10_000


@pytest.fixture
def line(memcached: Memcached) -> Iterator[Relay]:
    with relay(memcached.tcp_port) as made:
        yield made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(line: Relay, clock: ManualClock) -> Iterator[Handle]:
    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex)) as made:
        made._recent.__init__(clock)  # type: ignore[misc]
        yield made


def known(found: Recent, claim: Claim) -> bool:
    return not found.strangers([claim])


# -- for how long ---------------------------------------------------------------------------------


def test_a_message_is_known_for_half_the_time_at_least_and_never_longer_than_all_of_it(clock: ManualClock) -> None:
    found = Recent(clock)
    for step in range(200):
        claim = delivery(message())
        since = clock()
        clock.advance(0.01)  # while memcached is told
        found.note([claim.fingerprint], since)
        while clock() - since < recent.SECONDS / 2:
            assert known(found, claim)
            clock.advance(0.1)
        clock.advance(since + recent.SECONDS - clock())
        assert not known(found, claim), step
        clock.advance(0.037)


def test_it_counts_from_before_memcached_was_told(clock: ManualClock) -> None:
    """However long the answer took: somebody may have forgotten the message meanwhile."""
    for took in (0.0, 0.3, 0.6, 0.9, 1.0, 1.1, 5.0):
        found, claim = Recent(clock), delivery(message())
        for _ in range(7):  # not only at the beginning of a half
            clock.advance(0.13)
            found.note([message()], clock())
        since = clock()
        clock.advance(took)
        found.note([claim.fingerprint], since)
        clock.advance(max(0.0, since + recent.SECONDS - clock()))
        assert not known(found, claim), took


def test_what_is_read_late_in_the_first_half_is_known_as_long_as_it_may_be(clock: ManualClock) -> None:
    found, claim = Recent(clock), delivery(message())
    since = clock()
    clock.advance(recent.SECONDS * 0.6)
    found.note([claim.fingerprint], since)
    assert known(found, claim)


def test_very_many_are_not_all_known(clock: ManualClock) -> None:
    found = Recent(clock)
    first, *others = deliveries(2)
    found.note([first.fingerprint], clock())
    for part in range(3):
        found.note([bytes([part]) * 12 + number.to_bytes(4, "big") for number in range(AT_MOST + 1)], clock())
    assert not known(found, first)
    found.note([claim.fingerprint for claim in others], clock())
    assert known(found, others[0])


def test_time_goes_on_while_the_machine_is_suspended() -> None:
    assert abs(recent.now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60


# -- in a store -----------------------------------------------------------------------------------


def test_copies_of_what_was_confirmed_a_moment_ago_cost_no_round_trip(
    line: Relay, store: Handle, clock: ManualClock
) -> None:
    done = [own(store, message()) for _ in range(2)]
    assert store.confirm(done) == [True, True]
    before = line.trips
    assert store.claim([sibling(claim.fingerprint) for claim in done]) == [Answer(DONE)] * 2
    assert line.trips == before
    mixed = [done[0].fingerprint, message(), done[1].fingerprint, done[0].fingerprint, message()]
    assert verdicts(store.claim([sibling(each) for each in mixed])) == [DONE, NEW, DONE, DONE, NEW]
    assert line.trips == before + 1
    clock.advance(recent.SECONDS)
    assert verdicts(store.claim([sibling(claim.fingerprint) for claim in done])) == [DONE, DONE]
    assert line.trips == before + 2


def test_they_are_answered_while_memcached_is_away_and_the_others_are_not(line: Relay, store: Handle) -> None:
    done = own(store, message())
    store.confirm([done])
    line.cut_after = 0
    with pytest.raises(StoreUnavailable) as away:
        store.claim([delivery(message()), sibling(done.fingerprint)])
    assert away.value.results == [None, Answer(DONE)]


def test_what_memcached_did_not_confirm_is_not_known(line: Relay, store: Handle) -> None:
    lost = own(store, message())
    line.cut_after = 0
    with pytest.raises(StoreUnavailable):
        store.confirm([lost])
    assert store._recent.strangers([lost])


def test_a_success_that_came_late_is_asked_for(store: Handle, memcached: Memcached) -> None:
    """Its claim was not its own any more; others may know more of it."""
    late = delivery(message())
    assert store.confirm([late]) == [False]
    assert store._recent.strangers([late])


def test_what_is_forgotten_is_new_at_once_here(store: Handle) -> None:
    done = own(store, message())
    store.confirm([done])
    store.forget([done.fingerprint])
    assert verdicts(store.claim([sibling(done.fingerprint)])) == [NEW]


def test_forget_returns_when_nobody_else_knows_any_more(memcached: Memcached) -> None:
    """The one that confirmed it is in another process, and is not asked."""
    namespace = uuid.uuid4().hex
    both = [Patient(memcached.tcp_address, window=WINDOW, namespace=namespace) for _ in range(2)]
    with contextlib.closing(both[0]) as consumer, contextlib.closing(both[1]) as operator:

        def confirmed() -> list[Claim]:
            """Some that are known here; none if that took so long that they are not any more."""
            claims = deliveries(5)
            consumer.claim(claims)
            consumer.confirm(claims)
            return [] if consumer._recent.strangers(claims) else claims

        claims = eventually(confirmed)
        operator.forget([claim.fingerprint for claim in claims])
        assert verdicts(consumer.claim([sibling(claim.fingerprint) for claim in claims])) == [NEW] * 5
