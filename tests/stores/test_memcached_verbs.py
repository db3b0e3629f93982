"""What each verb of the store in memcached costs, writes and leaves."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from messages import DONE, IN_PROGRESS, NEW, Patient, ask, deliveries, delivery, message, own, sibling, verdicts
from relay import Relay

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import ConfigError, StoreError
from nsqdedupe.memcached.claiming import ATTEMPTS
from nsqdedupe.memcached.items import LONGEST, TAG_BYTES, TAIL, parse
from nsqdedupe.memcached.meta import READS, WRITES, Reply, flags_of
from nsqdedupe.memcached.servers import Exchange
from nsqdedupe.store import Answer, Claim, Release, Verdict


class Handle(Patient):
    """A store that a test looks into."""

    def say(self, command: bytes, kind: bytes = WRITES) -> Reply:
        """The reply to a command of the test's own, on the store's connection."""
        found: list[Reply] = []
        self._servers.ask(
            Exchange({self._servers.links[0]: ([command], kind)}, lambda _, replies: found.extend(replies))
        )
        return found[0]

    def claim_key(self, fingerprint: bytes) -> bytes:
        return self._servers.spots([fingerprint])[0][1]

    def bucket_key(self, fingerprint: bytes) -> bytes:
        return self._servers.spots([fingerprint])[0][2]

    def tag(self, fingerprint: bytes) -> bytes:
        return self._servers.spots([fingerprint])[0][3]

    def item(self, fingerprint: bytes) -> tuple[bytes | None, int]:
        """The claim item, and how many seconds it has to live."""
        line, value = self.say(b"mg %b v t\r\n" % self.claim_key(fingerprint), READS)
        return value, int(flags_of(line).get(b"t", b"0"))

    def bucket(self, fingerprint: bytes) -> bytes | None:
        """Its tags; it may have room for more."""
        value = self.say(b"mg %b v\r\n" % self.bucket_key(fingerprint), READS)[1]
        while value is not None and value[-TAG_BYTES:] == bytes(TAG_BYTES):
            value = value[:-TAG_BYTES]
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Write as somebody else might."""
        assert self.say(b"ms %b %d\r\n%b\r\n" % (key, len(value), value))[0][:2] == b"HD"

    def evict(self, key: bytes) -> None:
        assert self.say(b"md %b\r\n" % key)[0] == b"HD"


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(line: Relay, namespace: str) -> Iterator[Handle]:
    with contextlib.closing(Handle(line.address, window=10_000, namespace=namespace)) as made:
        yield made


@pytest.fixture
def peer(memcached: Memcached, namespace: str) -> Iterator[Handle]:
    with contextlib.closing(Handle(memcached.tcp_address, window=10_000, namespace=namespace)) as made:
        yield made


def trips(line: Relay, run: Callable[[], object]) -> int:
    """How many round trips it takes."""
    before = line.trips
    run()
    return line.trips - before


# -- what it costs -------------------------------------------------------------------------------


def test_a_batch_is_claimed_and_confirmed_in_a_round_trip_each(line: Relay, store: Handle) -> None:
    claims = deliveries(500)
    assert trips(line, lambda: store.claim(claims)) == 1
    assert trips(line, lambda: store.extend(claims)) == 1
    assert trips(line, lambda: store.start(claims)) == 1
    assert trips(line, lambda: store.confirm(claims)) == 1
    assert trips(line, lambda: store.claim([sibling(claim.fingerprint) for claim in claims])) == 1
    others = deliveries(500)
    store.claim(others)
    assert trips(line, lambda: store.release([Release(claim, failed=True) for claim in others])) == 1


def test_a_second_trip_for_what_meets_another_and_a_third_to_take_over(line: Relay, store: Handle) -> None:
    busy, free = message(), message()
    own(store, busy)
    store.release([Release(own(store, free), failed=True)])
    answers = []
    assert trips(line, lambda: answers.extend(store.claim([sibling(message()), sibling(busy)]))) == 2
    assert trips(line, lambda: answers.extend(store.claim([sibling(message()), sibling(free)]))) == 3
    assert verdicts(answers) == [NEW, IN_PROGRESS, NEW, NEW]


def test_a_large_batch_is_cut_into_pipelines_of_a_thousand(line: Relay, store: Handle) -> None:
    claims = deliveries(2001)
    assert trips(line, lambda: store.claim(claims)) == 3
    assert trips(line, lambda: store.confirm(claims)) == 3
    assert trips(line, lambda: store.forget([claim.fingerprint for claim in claims])) == 6
    assert verdicts(store.claim([sibling(claim.fingerprint) for claim in claims])) == [NEW] * 2001


def test_messages_of_one_bucket_are_confirmed_in_one_write(line: Relay, store: Handle) -> None:
    alike = [bytes([number]) * 8 + b"the same" for number in range(40)]
    claims = [own(store, fingerprint) for fingerprint in alike]
    line.requests.clear()
    assert store.confirm(claims) == [True] * 40
    writes = b"".join(line.requests).count(b"ms %b " % store.bucket_key(alike[0]))
    assert writes == 1
    # First in, first out: the last 32 of them, the newest first.
    assert store.bucket(alike[0]) == b"".join(bytes([number]) * 8 for number in reversed(range(8, 40)))


def test_a_bucket_that_somebody_else_has_written_meanwhile_costs_two_more(
    line: Relay, store: Handle, peer: Handle
) -> None:
    first, second = b"12345678" + b"the same", b"abcdefgh" + b"the same"
    ours, theirs = own(store, first), own(peer, second)
    assert peer.confirm([theirs]) == [True]
    assert trips(line, lambda: store.confirm([ours])) == 3
    assert store.bucket(first) == b"12345678abcdefgh"
    assert verdicts(peer.claim([sibling(first), sibling(second)])) == [DONE, DONE]


def test_a_bucket_that_already_has_it_is_not_written_again(line: Relay, store: Handle, peer: Handle) -> None:
    fingerprint = message()
    ours = own(store, fingerprint)
    assert peer.confirm([sibling(fingerprint)]) == [False]
    before = peer.bucket(fingerprint)
    assert trips(line, lambda: store.confirm([ours])) == 2
    assert peer.bucket(fingerprint) == before == store.tag(fingerprint)


def test_confirms_that_meet_in_one_bucket_are_all_recorded(memcached: Memcached, namespace: str) -> None:
    def confirm(number: int) -> list[Claim]:
        claims = [delivery(b"%04d%04d" % (number, each) + b"the same") for each in range(4)]
        with contextlib.closing(Handle(memcached.tcp_address, window=10_000, namespace=namespace)) as own:
            for claim in claims:
                own.claim([claim])
                own.confirm([claim])
        return claims

    with ThreadPoolExecutor(8) as pool:
        claims = [claim for batch in pool.map(confirm, range(8)) for claim in batch]
    with contextlib.closing(Handle(memcached.tcp_address, window=10_000, namespace=namespace)) as own:
        assert verdicts(own.claim([sibling(claim.fingerprint) for claim in claims])) == [DONE] * 32


# -- what it writes ------------------------------------------------------------------------------


def test_a_claim_lives_for_its_lease_a_tick_and_the_tail(store: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)._replace(lease=61.5)
    store.extend([claim])
    _, left = store.item(fingerprint)
    assert 62 + 1 + TAIL - 10 <= left <= 62 + 1 + TAIL


def test_a_hold_lives_for_its_delay_a_tick_and_the_tail(store: Handle) -> None:
    fingerprint = message()
    store.release([Release(own(store, fingerprint), failed=True, hold=90.5)])
    _, left = store.item(fingerprint)
    assert 91 + 1 + TAIL - 10 <= left <= 91 + 1 + TAIL


def test_what_is_confirmed_leaves_a_marker_for_ten_seconds(store: Handle) -> None:
    fingerprint = message()
    store.confirm([own(store, fingerprint)])
    value, left = store.item(fingerprint)
    assert value == b"D"
    assert 1 <= left <= 10
    assert store.bucket(fingerprint) == store.tag(fingerprint)


def test_the_marker_says_done_where_the_bucket_is_lost(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    store.confirm([own(store, fingerprint)])
    store.evict(store.bucket_key(fingerprint))
    assert ask(peer, sibling(fingerprint)) == Answer(DONE)


def test_a_claim_of_what_is_done_goes_with_the_next_pipeline(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    store.confirm([own(store, fingerprint)])
    store.evict(store.claim_key(fingerprint))  # as after ten seconds
    assert ask(store, sibling(fingerprint)) == Answer(DONE)
    assert parse(peer.item(fingerprint)[0]) is not None
    ask(store, delivery(message()))
    assert peer.item(fingerprint)[0] is None


def test_a_claim_that_took_over_what_was_done_meanwhile_goes_too(store: Handle, peer: Handle) -> None:
    """Its bucket was written between the look at the claim and the takeover."""
    fingerprint = message()
    store.release([Release(own(store, fingerprint), failed=True)])
    late = sibling(fingerprint)
    # The takeover's own look at the bucket is what finds it; so the first one must not.
    original = peer._servers.ask
    rounds = iter(range(10))

    def ask_after_a_confirm(*args: object) -> None:
        if next(rounds) == 2:
            store.confirm([delivery(fingerprint)])
        original(*args)  # type: ignore[arg-type]

    peer._servers.ask = ask_after_a_confirm  # type: ignore[method-assign]
    assert ask(peer, late) == Answer(DONE)
    peer.claim([delivery(message())])
    assert store.item(fingerprint)[0] is None


def test_the_longest_lease_is_kept_and_a_longer_one_refused(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    assert ask(store, delivery(fingerprint, lease=LONGEST)).verdict is NEW
    answer = ask(peer, sibling(fingerprint))
    assert answer.verdict is IN_PROGRESS
    assert LONGEST - 10 <= answer.lease_left <= LONGEST + 1
    claim = delivery(message(), lease=LONGEST + 1)
    for verb in (store.claim, store.extend, store.start):
        with pytest.raises(ConfigError, match="memcached takes more for a date"):
            verb([claim])


# -- starts --------------------------------------------------------------------------------------


def end_lease(store: Handle, fingerprint: bytes) -> None:
    """Of the claim there is, as time would."""
    value, _ = store.item(fingerprint)
    assert value is not None
    key = store.claim_key(fingerprint)
    assert store.say(b"ms %b %d T%d\r\n%b\r\n" % (key, len(value), TAIL, value))[0] == b"HD"


def after_a_death(store: Handle, fingerprint: bytes) -> Answer:
    """What the next delivery is told when the lease has ended: nobody heard of the one before again."""
    end_lease(store, fingerprint)
    return ask(store, sibling(fingerprint))


def test_a_start_of_a_process_that_lives_is_no_death(store: Handle) -> None:
    """Its run may have ended while the store was away, or have taken longer than its lease."""
    fingerprint = message()
    store.start([own(store, fingerprint)])
    redelivery = own(store, fingerprint)
    store.start([redelivery])
    end_lease(store, fingerprint)
    other_copy = delivery(fingerprint, b"nsqd2/b")
    assert ask(store, other_copy) == Answer(NEW, starts=0)
    store.start([other_copy])
    assert after_a_death(store, fingerprint) == Answer(NEW, starts=1)


def test_a_start_that_was_never_heard_of_again_is_counted(store: Handle) -> None:
    fingerprint = message()
    assert store.start([own(store, fingerprint)]) == [True]
    assert after_a_death(store, fingerprint) == Answer(NEW, tries=0, starts=1)
    # The second has not started, when it dies as well; the first is still counted.
    assert after_a_death(store, fingerprint) == Answer(NEW, tries=0, starts=1)


def test_starting_twice_counts_once_and_renews_the_lease(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)
    longer = claim._replace(lease=600.0)
    assert store.start([claim]) == [True]
    assert store.start([longer]) == [True]
    assert ask(peer, sibling(fingerprint)).lease_left > 500
    assert store.extend([claim]) == [True]
    assert after_a_death(store, fingerprint).starts == 1


def test_the_end_of_a_run_takes_its_start_back_and_no_other(store: Handle) -> None:
    fingerprint = message()
    store.start([own(store, fingerprint)])
    second = sibling(fingerprint)
    end_lease(store, fingerprint)
    assert ask(store, second).starts == 1
    store.start([second])
    assert store.release([Release(second, failed=True)]) == [True]
    assert ask(store, delivery(fingerprint)) == Answer(NEW, tries=1, starts=1)


def test_a_success_ends_the_count_of_starts(store: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)
    store.start([claim])
    store.confirm([claim])
    store.forget([fingerprint])
    assert ask(store, sibling(fingerprint)) == Answer(NEW)


def test_who_is_not_the_owner_starts_nothing(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    own(store, fingerprint)
    assert peer.start([sibling(fingerprint)]) == [False]
    assert after_a_death(store, fingerprint).starts == 0


# -- claims that are evicted, lost or met --------------------------------------------------------


def test_a_claim_that_was_evicted_is_made_again_when_it_is_extended(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    store.release([Release(own(store, fingerprint), failed=True)])
    claim = own(store, fingerprint)
    store.evict(store.claim_key(fingerprint))
    assert store.extend([claim]) == [True]
    answer = ask(peer, sibling(fingerprint))
    assert (answer.verdict, answer.tries) == (IN_PROGRESS, 1)


def test_a_claim_that_was_evicted_and_given_to_another_is_the_others(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)
    store.evict(store.claim_key(fingerprint))
    successor = own(peer, fingerprint)
    assert store.extend([claim]) == [False]
    assert store.release([Release(claim, failed=True)]) == [False]
    assert store.confirm([claim]) == [False]
    assert peer.extend([successor]) == [True]


def test_a_claim_that_another_makes_just_before_it_is_made_again_is_the_others(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)
    store.evict(store.claim_key(fingerprint))
    original = store._servers.ask
    rounds = iter(range(10))

    def ask_after_another(*args: object) -> None:
        if next(rounds) == 1:
            own(peer, fingerprint)
        original(*args)  # type: ignore[arg-type]

    store._servers.ask = ask_after_another  # type: ignore[method-assign]
    assert store.extend([claim]) == [False]


def test_of_a_claim_that_was_evicted_nothing_is_left_to_release(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    claim = own(store, fingerprint)
    store.evict(store.claim_key(fingerprint))
    assert store.release([Release(claim, failed=True, hold=60.0)]) == [False]
    assert ask(peer, sibling(fingerprint)) == Answer(NEW)


def test_a_claim_that_nothing_is_noted_of_is_found_by_its_nonce(store: Handle, peer: Handle) -> None:
    claims = [own(store, message()) for _ in range(4)]
    extended, started, released, confirmed = claims
    assert peer.extend([extended]) == peer.start([started]) == peer.confirm([confirmed]) == [True]
    assert peer.release([Release(released, failed=True)]) == [True]
    # The store's own tokens are old now; the nonce is still its own.
    assert store.extend([extended, started, released, confirmed]) == [True, True, False, False]


def test_a_message_whose_claim_comes_and_goes_stands_by(store: Handle, peer: Handle) -> None:
    fingerprint = message()
    owner = delivery(fingerprint)
    original = store._servers.ask
    rounds = iter(range(100))

    def ask_between_claim_and_eviction(*args: object) -> None:
        if next(rounds) % 2 == 0:
            assert ask(peer, owner).verdict is NEW
        else:
            peer.evict(peer.claim_key(fingerprint))
        original(*args)  # type: ignore[arg-type]

    store._servers.ask = ask_between_claim_and_eviction  # type: ignore[method-assign]
    answer = ask(store, sibling(fingerprint))
    assert (answer.verdict, answer.lease_left) == (IN_PROGRESS, 1.0)
    assert next(rounds) == 2 * ATTEMPTS


def test_a_swap_that_always_comes_too_late_gives_up(store: Handle, peer: Handle) -> None:
    """Somebody with the same nonce, a proxy that repeats commands perhaps, renews it in between."""
    fingerprint = message()
    claim = own(store, fingerprint)
    original = store._servers.ask

    def ask_after_a_renewal(*args: object) -> None:
        assert peer.extend([claim]) == [True]
        original(*args)  # type: ignore[arg-type]

    store._servers.ask = ask_after_a_renewal  # type: ignore[method-assign]
    assert store.release([Release(claim)]) == [False]


def test_a_batch_with_a_message_twice_is_told_new_and_in_progress_also_at_a_takeover(store: Handle) -> None:
    fingerprint = message()
    store.release([Release(own(store, fingerprint), failed=True)])
    answers = store.claim([sibling(fingerprint), delivery(fingerprint, b"nsqd3/c", b"process3")])
    assert [(answer.verdict, answer.tries) for answer in answers] == [(NEW, 1), (IN_PROGRESS, 1)]


# -- who may use it ------------------------------------------------------------------------------


def test_several_threads_may_use_one_store(store: Handle) -> None:
    messages = [message() for _ in range(200)]

    def race(copy: int) -> list[Verdict | None]:
        found = []
        for start in range(0, len(messages), 20):
            batch = [delivery(each, b"copy %d" % copy) for each in messages[start : start + 20]]
            answers = store.claim(batch)
            store.confirm([claim for claim, answer in zip(batch, answers, strict=True) if answer.verdict is NEW])
            found += verdicts(answers)
        return found

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(race, range(4)))
    assert all(answers.count(NEW) == 1 for answers in zip(*told, strict=True))


def test_two_stores_of_one_process_share_and_one_outlives_the_other(store: Handle, peer: Handle) -> None:
    claim = own(store, message())
    store.confirm([claim])
    store.close()
    assert ask(peer, sibling(claim.fingerprint)) == Answer(DONE)


def test_a_closed_store_says_so(store: Handle) -> None:
    store.close()
    claim = delivery(message())
    for verb in (store.claim, store.confirm, store.extend, store.start):
        with pytest.raises(StoreError, match="the store is closed"):
            verb([claim])
    with pytest.raises(StoreError, match="the store is closed"):
        store.release([Release(claim)])
    with pytest.raises(StoreError, match="the store is closed"):
        store.forget([claim.fingerprint])
    with pytest.raises(StoreError, match="the store is closed"):
        store.bind("one")


@pytest.mark.parametrize("wrong", [b"", b"x" * 15, b"x" * 17, "x" * 16, None])
def test_what_is_no_fingerprint_is_refused(store: Handle, wrong: bytes) -> None:
    claim = delivery(wrong)
    for verb in (store.claim, store.confirm, store.extend):
        with pytest.raises(ConfigError, match="fingerprint: must be 16 bytes, not") as refused:
            verb([claim])
        assert "xxx" not in str(refused.value)
    with pytest.raises(ConfigError, match="must be 16 bytes"):
        store.forget([wrong])
