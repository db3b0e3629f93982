"""For whoever writes a store, or tests code that uses one: a clock to turn by hand, and the laws of a store.

A new store joins by a few lines in a file that pytest collects::

    class TestMyStore(StoreContract):
        traits = Traits(shared=True, durable=True, may_slip=True, may_false_drop=False, blocking=True)
        lease = 2.0  # short, for time passes by sleeping
        expiry_step = 1.0

        def make_store(self) -> Store:
            return MyStore(...)

        def pass_time(self, seconds: float) -> None:
            time.sleep(seconds)

``pytest.register_assert_rewrite("nsqdedupe.testing")`` in a conftest.py makes broken laws say what came
instead.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from nsqdedupe.checks import number
from nsqdedupe.errors import ConfigError, StoreUnavailable
from nsqdedupe.store import Answer, Claim, Release, Store, Traits, Verdict

RACERS = 8
RACES = 50
BATCH = 1000


class ManualClock:
    """A clock that stands still until it is told to go on.

    Args:
        start: what it shows at first, in seconds; not 0, so that nobody takes it for a duration.
    """

    def __init__(self, start: float = 1024.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """What it shows."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ConfigError: ``seconds`` is negative, or no finite number; the clock stands where it stood.
        """
        self._now += number("advance(seconds)", seconds, 0, remedy="a clock never goes back")


class Breakable(NamedTuple):
    """A store that a test can cut off and bring back."""

    store: Store
    """In reach at first."""

    cut: Callable[[], None]
    """Put it out of reach: nothing answers, or nothing answers in time."""

    mend: Callable[[], None]
    """Bring it back, with what it held."""


class Bench:
    """What the laws stand on: makers of stores, passing time, and short ways to ask.

    ``self.store`` is a fresh store, ``self.peer`` another handle on it. Both are closed afterwards.
    """

    traits: Traits
    """What the store promises."""

    lease: float = 64.0
    """Seconds for which the claims and holds of these tests last. Make it short where time is slept."""

    expiry_step: float = 0.0
    """By how many seconds a lease or hold may last longer than was asked for. Never shorter."""

    early: float = 0.125
    """How many seconds before the end of a lease the tests look whether it holds still, and how far off the
    seconds left may be. Make it long enough for the store's slowest answer."""

    patience: float = 5.0
    """Seconds within which a verb of a slow store must have given up."""

    tells_held: bool = True
    """False for a store that cannot tell a hold from a claim (see `Answer.held`)."""

    clock: ManualClock
    store: Store
    peer: Store

    def make_store(self) -> Store:
        """Make an empty store, of any size that holds 10,000 messages. ``self.clock`` is there for it."""
        raise NotImplementedError("a StoreContract needs make_store()")

    def make_peer(self, store: Store) -> Store:
        """Make another handle on a store's memory, as another process would. By default the same handle."""
        return store

    def reopen(self, store: Store) -> Store:
        """Close a durable store, and open what it left behind, as the next process would."""
        raise NotImplementedError("this store has no reopen()")

    def make_full_store(self) -> Store:
        """Make a store so small or so full that it must soon forget, whatever else it does then."""
        raise NotImplementedError("this store has no make_full_store()")

    def make_slow_store(self) -> Breakable:
        """Make a store that a test can slow down so much that no verb is answered in time."""
        raise NotImplementedError("this store has no make_slow_store()")

    def make_dead_store(self) -> Breakable:
        """Make a store that a test can put out of reach and bring back."""
        raise NotImplementedError("this store has no make_dead_store()")

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the store: by ``self.clock``, unless overridden with a true sleep."""
        self.clock.advance(seconds)

    def setup_method(self) -> None:
        """Make the store and its peer."""
        self.clock = ManualClock()
        # Not a fixed seed: a server may still hold what an earlier run left behind.
        self._run = uuid.uuid4().bytes
        self._serials = itertools.count(1)
        self._open: list[Store] = []
        self.store = self.keep(self.make_store())
        self.peer = self.keep(self.make_peer(self.store))

    def teardown_method(self) -> None:
        """Close whatever was opened."""
        for store in self._open:
            store.close()

    def keep(self, store: Store) -> Store:
        """Have a store closed when the test ends."""
        self._open.append(store)
        return store

    def message(self) -> bytes:
        """Make the fingerprint of a message never met before."""
        return uuid.uuid5(uuid.UUID(bytes=self._run), str(next(self._serials))).bytes

    def delivery(
        self, message: bytes, copy: bytes = b"nsqd1/a", process: bytes = b"process1", *, poll: bool = False
    ) -> Claim:
        """Make the claim of a new delivery; later ones have higher serials."""
        nonce = process + next(self._serials).to_bytes(8, "big")
        return Claim(message, copy, nonce, self.lease, poll)

    def sibling(self, message: bytes, *, poll: bool = False) -> Claim:
        """Make the claim of another copy of a message, in another process."""
        return self.delivery(message, b"nsqd2/b", b"process2", poll=poll)

    def ask(self, claim: Claim, store: Store | None = None) -> Answer:
        """Claim one message through the first handle, or the one given."""
        (answer,) = (store or self.store).claim([claim])
        return answer

    def own(self, message: bytes, copy: bytes = b"nsqd1/a") -> Claim:
        """Claim a message that is free."""
        claim = self.delivery(message, copy)
        assert self.ask(claim).verdict is Verdict.NEW
        return claim

    def fail(self, claim: Claim, hold: float = 0.0) -> None:
        """Give a claim back after a failure."""
        assert list(self.store.release([Release(claim, failed=True, hold=hold)])) == [True]

    def verdict_for_others(self, message: bytes) -> Verdict:
        """What another copy, in another process, is told. Claims the message if it is free."""
        return self.ask(self.sibling(message), self.peer).verdict

    def assert_waits(self, answer: Answer, seconds: float, *, held: bool = False) -> None:
        """Somebody has the message for about so many seconds more."""
        assert answer.verdict is Verdict.IN_PROGRESS
        assert seconds - self.early <= answer.lease_left <= seconds + self.expiry_step
        assert answer.held is (held and self.tells_held)

    def assert_binds_no_other(self, store: Store, hashing: str) -> None:
        """Either the store does not care how fingerprints are made, or it refuses and stays as it was."""
        message = self.message()
        store.confirm([self.delivery(message)])
        with contextlib.suppress(ConfigError):
            store.bind(hashing)
        assert self.ask(self.sibling(message), store) == Answer(Verdict.DONE)


class ClaimLaws(Bench):
    """Who gets a message."""

    def test_a_message_never_met_is_new(self) -> None:
        """NEW says: no tries yet, nothing to wait for."""
        assert self.ask(self.delivery(self.message())) == Answer(Verdict.NEW)

    def test_a_second_copy_is_told_to_wait_for_the_rest_of_the_lease(self) -> None:
        """IN_PROGRESS carries the seconds that are left, and a claim is no hold."""
        message = self.message()
        self.own(message)
        self.pass_time(self.lease / 2)
        self.assert_waits(self.ask(self.sibling(message), self.peer), self.lease / 2)

    def test_two_copies_in_one_call_are_answered_new_and_in_progress(self) -> None:
        """The first in the call wins."""
        message = self.message()
        first, second = self.store.claim([self.delivery(message), self.sibling(message)])
        assert first.verdict is Verdict.NEW
        self.assert_waits(second, self.lease)

    def test_of_racing_claimants_exactly_one_wins(self) -> None:
        """However many processes ask at the same moment."""
        messages = [self.message() for _ in range(RACES)]
        processes = [b"racer%03d" % racer for racer in range(RACERS)]
        batches = [[self.delivery(message, process, process) for message in messages] for process in processes]
        handles = [self.keep(self.make_peer(self.store)) for _ in batches]
        if self.traits.shared:
            start = threading.Barrier(RACERS)

            def race(handle: Store, batch: Sequence[Claim]) -> Sequence[Answer]:
                start.wait()
                return handle.claim(batch)

            with ThreadPoolExecutor(RACERS) as pool:
                answers = list(pool.map(race, handles, batches))
        else:
            answers = [handle.claim(batch) for handle, batch in zip(handles, batches, strict=True)]
        for contest in zip(*answers, strict=True):
            verdicts = [answer.verdict for answer in contest]
            assert verdicts.count(Verdict.NEW) == 1
            assert verdicts.count(Verdict.IN_PROGRESS) == RACERS - 1

    def test_a_claim_asked_again_is_its_own_winner_and_starts_anew(self) -> None:
        """The reply may have been lost: same nonce, same answer, and a whole lease from now."""
        message = self.message()
        claim = self.own(message)
        self.pass_time(self.lease / 2)
        assert self.ask(claim).verdict is Verdict.NEW
        self.assert_waits(self.ask(self.sibling(message), self.peer), self.lease)

    def test_a_lease_holds_until_its_end_and_not_longer(self) -> None:
        """Never shorter than was asked for, and at most one step longer."""
        message = self.message()
        self.own(message)
        self.pass_time(self.lease - self.early)
        assert self.verdict_for_others(message) is Verdict.IN_PROGRESS
        self.pass_time(self.early + self.expiry_step)
        assert self.verdict_for_others(message) is Verdict.NEW

    def test_a_refused_claim_changes_nothing(self) -> None:
        """Who is told to wait has neither renewed the lease nor taken the claim."""
        message = self.message()
        owner, refused = self.own(message), self.sibling(message)
        self.pass_time(self.lease / 2)
        assert self.ask(refused, self.peer).verdict is Verdict.IN_PROGRESS
        assert list(self.peer.extend([refused])) == [False]
        assert list(self.peer.release([Release(refused, failed=True, hold=self.lease)])) == [False]
        self.pass_time(self.lease / 2 + self.expiry_step)
        assert list(self.store.release([Release(owner)])) == [True]
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW)

    def test_a_takeover_carries_the_tries(self) -> None:
        """Tries belong to the message: they survive releases, leases and owners."""
        message = self.message()
        self.fail(self.own(message))
        self.own(message)
        self.pass_time(self.lease + self.expiry_step)
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1)

    def test_a_later_delivery_of_the_same_copy_in_the_same_process_takes_over_at_once(self) -> None:
        """Its process knows that nobody handles the older one; from now on that one is stale."""
        message = self.message()
        older = self.own(message)
        newer = self.own(message)
        assert list(self.store.extend([older])) == [False]
        assert list(self.store.extend([newer])) == [True]

    def test_an_earlier_delivery_of_the_same_copy_does_not_take_over(self) -> None:
        """A command that was delayed on its way must not win against a newer one."""
        message = self.message()
        older = self.delivery(message)
        newer = self.own(message)
        self.assert_waits(self.ask(older), self.lease)
        assert list(self.store.extend([newer])) == [True]

    def test_the_same_copy_in_another_process_waits_for_the_lease(self) -> None:
        """Nobody there knows whether the first process still handles it."""
        message = self.message()
        self.own(message)
        elsewhere = self.delivery(message, process=b"process2")
        self.assert_waits(self.ask(elsewhere, self.peer), self.lease)

    def test_another_copy_in_the_same_process_waits_for_the_lease(self) -> None:
        """A higher serial alone gives no right to a message."""
        message = self.message()
        self.own(message)
        self.assert_waits(self.ask(self.delivery(message, b"nsqd2/b")), self.lease)

    def test_messages_do_not_influence_each_other(self) -> None:
        """Not even those whose fingerprints end alike, or differ by a bit."""
        done, claimed, failed = self.message(), self.message(), self.message()
        self.store.confirm([self.own(done)])
        self.own(claimed)
        self.fail(self.own(failed), self.lease)
        for other in (done, claimed, failed):
            neighbour = bytes([other[0] ^ 1]) + other[1:]
            stranger = self.message()[:8] + other[8:]
            assert [self.ask(self.delivery(message)) for message in (neighbour, stranger)] == [Answer(Verdict.NEW)] * 2


class OutcomeLaws(Bench):
    """What confirm, release, extend and forget do."""

    def test_a_confirmed_message_is_done_for_everybody(self) -> None:
        """For other copies, for a redelivery, for the delivery itself."""
        message = self.message()
        claim = self.own(message)
        assert list(self.store.confirm([claim])) == [True]
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.DONE)
        assert self.ask(self.delivery(message)) == Answer(Verdict.DONE)
        assert self.ask(claim) == Answer(Verdict.DONE)

    def test_done_outlives_the_lease(self) -> None:
        """A claim and what is seen are two things."""
        message = self.message()
        self.store.confirm([self.own(message)])
        self.pass_time(self.lease + self.expiry_step)
        assert self.verdict_for_others(message) is Verdict.DONE

    def test_confirming_again_changes_nothing(self) -> None:
        """The reply may have been lost. What the second call returns is open."""
        message = self.message()
        claim = self.own(message)
        self.store.confirm([claim])
        self.store.confirm([claim])
        assert self.verdict_for_others(message) is Verdict.DONE

    def test_a_message_is_confirmed_without_a_claim(self) -> None:
        """It was handled while the store was out of reach: not ours, but done."""
        message = self.message()
        assert list(self.store.confirm([self.delivery(message)])) == [False]
        assert self.verdict_for_others(message) is Verdict.DONE

    def test_a_stale_owners_success_is_recorded_and_its_successors_claim_stays(self) -> None:
        """Handled is handled; but the successor's claim is the successor's."""
        message = self.message()
        stale = self.own(message)
        self.pass_time(self.lease + self.expiry_step)
        successor = self.sibling(message)
        assert self.ask(successor, self.peer).verdict is Verdict.NEW
        assert list(self.store.confirm([stale])) == [False]
        assert self.ask(self.delivery(message)) == Answer(Verdict.DONE)
        assert list(self.peer.extend([successor])) == [True]
        assert list(self.peer.confirm([successor])) == [True]

    def test_confirm_ends_the_count_of_tries(self) -> None:
        """A message that is published again after it was forgotten starts from nothing."""
        message = self.message()
        self.fail(self.own(message))
        self.store.confirm([self.own(message)])
        self.store.forget([message])
        assert self.ask(self.delivery(message)) == Answer(Verdict.NEW)

    def test_a_released_message_is_free_at_once(self) -> None:
        """Without a failure no try is counted."""
        message = self.message()
        assert list(self.store.release([Release(self.own(message))])) == [True]
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW)

    def test_a_release_after_a_failure_counts_one_try(self) -> None:
        """Each failure one, whichever copy failed."""
        message = self.message()
        self.fail(self.own(message))
        second = self.sibling(message)
        assert self.ask(second, self.peer) == Answer(Verdict.NEW, tries=1)
        self.peer.release([Release(second, failed=True)])
        assert self.ask(self.delivery(message)) == Answer(Verdict.NEW, tries=2)

    def test_a_release_without_a_failure_keeps_the_tries(self) -> None:
        """Neither more nor fewer."""
        message = self.message()
        self.fail(self.own(message))
        self.store.release([Release(self.own(message))])
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1)

    def test_releasing_twice_counts_once_and_is_refused_the_second_time(self) -> None:
        """What was given back is not ours any more."""
        message = self.message()
        claim = self.own(message)
        self.fail(claim)
        assert list(self.store.release([Release(claim, failed=True, hold=self.lease)])) == [False]
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1)

    def test_what_was_given_back_can_neither_be_extended_nor_released(self) -> None:
        """Also where the message keeps its tries, and nobody has taken it since."""
        message = self.message()
        self.fail(self.own(message))
        claim = self.own(message)
        assert list(self.store.release([Release(claim)])) == [True]
        assert list(self.store.extend([claim])) == [False]
        assert list(self.store.release([Release(claim, failed=True, hold=self.lease)])) == [False]
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1)

    def test_a_success_that_comes_after_the_claim_was_given_back_is_recorded_all_the_same(self) -> None:
        """Handled is handled; but the claim was not ours any more, and nobody else's."""
        message = self.message()
        self.fail(self.own(message))
        claim = self.own(message)
        self.store.release([Release(claim)])
        assert list(self.store.confirm([claim])) == [False]
        assert self.verdict_for_others(message) is Verdict.DONE

    def test_a_release_by_who_is_not_the_owner_changes_nothing(self) -> None:
        """No try is counted, no hold begins, the owner keeps its claim."""
        message = self.message()
        stale = self.own(message)
        self.pass_time(self.lease + self.expiry_step)
        owner = self.sibling(message)
        assert self.ask(owner, self.peer).verdict is Verdict.NEW
        assert list(self.store.release([Release(stale, failed=True, hold=self.lease)])) == [False]
        self.assert_waits(self.ask(self.delivery(message)), self.lease)
        assert list(self.peer.release([Release(owner)])) == [True]
        assert self.ask(self.delivery(message)) == Answer(Verdict.NEW)

    def test_a_release_of_a_done_message_leaves_it_done(self) -> None:
        """A stale owner that fails cannot undo another's success."""
        message = self.message()
        stale = self.own(message)
        self.store.confirm([self.sibling(message)])
        self.store.release([Release(stale, failed=True)])
        assert self.verdict_for_others(message) is Verdict.DONE

    def test_extending_lets_the_lease_start_anew(self) -> None:
        """A whole lease, from the moment of the call."""
        message = self.message()
        claim = self.own(message)
        self.pass_time(self.lease / 2)
        assert list(self.store.extend([claim])) == [True]
        self.pass_time(self.lease - self.early)
        assert self.verdict_for_others(message) is Verdict.IN_PROGRESS
        self.pass_time(self.early + self.expiry_step)
        assert self.verdict_for_others(message) is Verdict.NEW

    def test_starting_a_run_lets_the_lease_start_anew(self) -> None:
        """And says whose the message is."""
        message = self.message()
        claim = self.own(message)
        self.pass_time(self.lease / 2)
        assert list(self.store.start([claim, self.sibling(message)])) == [True, False]
        self.pass_time(self.lease - self.early)
        assert self.verdict_for_others(message) is Verdict.IN_PROGRESS

    def test_a_run_that_ended_leaves_no_trace(self) -> None:
        """Only one that was never heard of again does, if the store outlives the process."""
        message = self.message()
        claim = self.own(message)
        assert list(self.store.start([claim])) == [True]
        self.fail(claim)
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1, starts=0)

    def test_a_run_that_is_never_heard_of_again_is_told_of_once_if_at_all(self) -> None:
        """A store that outlives the process may tell whoever takes the message over; another has nothing to tell."""
        message = self.message()
        claim = self.own(message)
        self.store.start([claim])
        self.pass_time(self.lease + self.expiry_step)
        answer = self.ask(self.sibling(message), self.peer)
        assert answer.verdict is Verdict.NEW
        assert 0 <= answer.starts <= self.store.traits.shared

    def test_a_stale_owner_cannot_extend(self) -> None:
        """The successor's lease ends when it would have ended."""
        message = self.message()
        stale = self.own(message)
        self.pass_time(self.lease + self.expiry_step)
        assert self.verdict_for_others(message) is Verdict.NEW
        self.pass_time(self.lease / 2)
        assert list(self.store.extend([stale])) == [False]
        self.assert_waits(self.ask(self.delivery(message)), self.lease / 2)

    def test_what_is_forgotten_was_never_met(self) -> None:
        """Done, claimed and failed messages alike; one never met is no error."""
        done, claimed, failed, _ = messages = [self.message() for _ in range(4)]
        self.store.confirm([self.own(done)])
        claim = self.own(claimed)
        self.fail(self.own(failed), self.lease)
        self.store.forget(messages)
        assert list(self.store.extend([claim])) == [False]
        assert [self.ask(self.sibling(message), self.peer) for message in messages] == [Answer(Verdict.NEW)] * 4

    def test_it_may_be_told_again_how_fingerprints_are_made(self) -> None:
        """Each reader tells it; a store that can tell refuses what is made otherwise."""
        self.store.bind("one")
        self.store.bind("one")
        self.assert_binds_no_other(self.store, "another")

    def test_closing_twice_is_no_error(self) -> None:
        """Nor is closing one that was never used."""
        store = self.make_store()
        store.close()
        store.close()

    def test_traits_are_what_was_promised_and_stay(self) -> None:
        """Callers ask them once."""
        assert self.store.traits == self.traits
        self.store.confirm([self.own(self.message())])
        assert self.store.traits == self.peer.traits == self.traits


class HoldLaws(Bench):
    """What a failure's delay does: tries are spaced as with one copy."""

    def hold(self, message: bytes) -> None:
        """Let a message fail, and be held for as long as a lease."""
        self.fail(self.own(message), self.lease)

    def test_a_held_message_is_told_to_wait_for_the_rest_of_the_hold(self) -> None:
        """Whoever asks: another copy, in this process or another."""
        message = self.message()
        self.hold(message)
        self.pass_time(self.lease / 2)
        self.assert_waits(self.ask(self.sibling(message), self.peer), self.lease / 2, held=True)
        self.assert_waits(self.ask(self.delivery(message, b"nsqd2/b")), self.lease / 2, held=True)

    def test_a_hold_ends_by_time(self) -> None:
        """Not earlier than was asked for, and at most one step later."""
        message = self.message()
        self.hold(message)
        self.pass_time(self.lease - self.early)
        assert self.verdict_for_others(message) is Verdict.IN_PROGRESS
        self.pass_time(self.early + self.expiry_step)
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.NEW, tries=1)

    def test_a_hold_is_ended_by_a_fresh_delivery_of_the_copy_that_failed(self) -> None:
        """In any process: nsqd has waited its delay. From then on it is a claim like any other."""
        for process in (b"process1", b"process2"):
            message = self.message()
            self.hold(message)
            fresh = self.delivery(message, process=process)
            assert self.ask(fresh, self.peer) == Answer(Verdict.NEW, tries=1)
            self.assert_waits(self.ask(self.sibling(message), self.peer), self.lease)
            assert list(self.peer.extend([fresh])) == [True]

    def test_a_hold_is_not_ended_by_a_delivery_that_was_waiting_already(self) -> None:
        """In no process: else a copy given out twice would burn the tries twice as fast."""
        message = self.message()
        self.hold(message)
        for process in (b"process1", b"process2"):
            waiting = self.delivery(message, process=process, poll=True)
            self.assert_waits(self.ask(waiting, self.peer), self.lease, held=True)

    def test_a_held_message_may_be_confirmed(self) -> None:
        """A stale owner's success comes while its successor's failure is waited out."""
        message = self.message()
        stale = self.delivery(message)
        self.hold(message)
        self.store.confirm([stale])
        assert self.ask(self.sibling(message), self.peer) == Answer(Verdict.DONE)


class BatchLaws(Bench):
    """Many claims in a call."""

    def test_empty_batches_are_answered_by_nothing(self) -> None:
        """Every verb takes none."""
        store = self.store
        assert not [*store.claim([]), *store.confirm([]), *store.release([]), *store.extend([])]
        store.forget([])

    def test_a_thousand_claims_are_answered_in_order(self) -> None:
        """Whatever each one's verdict is."""
        messages = [self.message() for _ in range(BATCH)]
        owners = [self.delivery(message) for message in messages]
        assert [answer.verdict for answer in self.store.claim(owners)] == [Verdict.NEW] * BATCH
        self.store.confirm(owners[::3])
        self.store.release([Release(owner, failed=True) for owner in owners[1::3]])
        answers = self.peer.claim([self.sibling(message) for message in messages])
        expected = [(Verdict.DONE, 0), (Verdict.NEW, 1), (Verdict.IN_PROGRESS, 0)]
        assert [(answer.verdict, answer.tries) for answer in answers] == list(
            itertools.islice(itertools.cycle(expected), BATCH)
        )

    def test_a_thousand_ends_are_answered_in_order(self) -> None:
        """Of every verb, where every second claim is ours."""
        batches = [[self.delivery(self.message()) for _ in range(BATCH)] for _ in range(3)]
        for claims in batches:
            self.store.claim(claims[::2])
        confirmed, released, extended = batches
        ours = [True, False] * (BATCH // 2)
        assert list(self.store.confirm(confirmed)) == ours
        assert list(self.store.release([Release(claim) for claim in released])) == ours
        assert list(self.store.extend(extended)) == ours

    def test_a_thousand_messages_are_forgotten_in_one_call(self) -> None:
        """All of them."""
        claims = [self.delivery(self.message()) for _ in range(BATCH)]
        self.store.confirm(claims)
        self.store.forget([claim.fingerprint for claim in claims])
        answers = self.peer.claim([self.sibling(claim.fingerprint) for claim in claims])
        assert [answer.verdict for answer in answers] == [Verdict.NEW] * BATCH


class DurableLaws(Bench):
    """What outlives a process. Each is collected where `Bench.reopen` is defined."""

    def test_what_was_done_is_done_in_the_next_process(self) -> None:
        """For every copy, whatever becomes of claims: nothing that was not confirmed is done by that."""
        messages = [self.message() for _ in range(BATCH)]
        owners = [self.delivery(message) for message in messages]
        self.store.claim(owners)
        self.store.confirm(owners[::2])
        assert self.traits.durable
        reopened = self.keep(self.reopen(self.store))
        verdicts = [answer.verdict for answer in reopened.claim([self.sibling(message) for message in messages])]
        assert verdicts[::2] == [Verdict.DONE] * (BATCH // 2)
        assert Verdict.DONE not in verdicts[1::2]

    def test_what_was_forgotten_stays_forgotten_in_the_next_process(self) -> None:
        """And its neighbours stay done."""
        forgotten, kept = self.message(), self.message()
        self.store.confirm([self.delivery(forgotten), self.delivery(kept)])
        self.store.forget([forgotten])
        reopened = self.keep(self.reopen(self.store))
        answers = reopened.claim([self.sibling(forgotten), self.sibling(kept)])
        assert list(answers) == [Answer(Verdict.NEW), Answer(Verdict.DONE)]

    def test_how_fingerprints_are_made_is_told_to_the_next_process_too(self) -> None:
        """It may bind the store as it was bound; a store that can tell refuses anything else."""
        self.store.bind("one")
        reopened = self.keep(self.reopen(self.store))
        reopened.bind("one")
        self.assert_binds_no_other(reopened, "another")


class HardStateLaws(Bench):
    """What holds when the store is full, slow or gone. Each is collected where its maker is defined."""

    def every_verb(self, store: Store, claim: Claim) -> list[Callable[[], object]]:
        """All that can be asked of a store."""
        return [
            lambda: store.claim([claim]),
            lambda: store.confirm([claim]),
            lambda: store.release([Release(claim, failed=True)]),
            lambda: store.extend([claim]),
            lambda: store.forget([claim.fingerprint]),
        ]

    def is_unavailable(self, verb: Callable[[], object]) -> bool:
        """Whether a verb says that the store is out of reach."""
        try:
            verb()
        except StoreUnavailable:
            return True
        return False

    def test_a_full_store_may_forget_but_never_takes_a_new_message_for_a_done_one(self) -> None:
        """It may slip where its traits say so; a message that was never confirmed is lost if it is called done."""
        store = self.keep(self.make_full_store())
        for _ in range(3):
            claims = [self.delivery(self.message()) for _ in range(BATCH)]
            verdicts = [answer.verdict for answer in store.claim(claims)]
            if not self.traits.may_false_drop:
                assert verdicts == [Verdict.NEW] * BATCH
            store.confirm(claims)
            again = [answer.verdict for answer in store.claim([self.sibling(claim.fingerprint) for claim in claims])]
            if not self.traits.may_slip:
                assert again == [Verdict.DONE] * BATCH
            assert set(again) <= {Verdict.DONE, Verdict.NEW}

    def test_a_slow_store_is_given_up_in_time(self) -> None:
        """Every verb raises StoreUnavailable, before nsqd's patience ends."""
        store, cut, mend = self.make_slow_store()
        self.keep(store)
        cut()
        for verb in self.every_verb(store, self.delivery(self.message())):
            began = time.monotonic()
            assert self.is_unavailable(verb)
            assert time.monotonic() - began < self.patience
        mend()

    def test_a_dead_store_says_so_and_loses_nothing(self) -> None:
        """Every verb raises StoreUnavailable; when it is back, all is as it was."""
        store, cut, mend = self.make_dead_store()
        self.keep(store)
        done, claimed, failed, bystander = [self.delivery(self.message()) for _ in range(4)]
        store.claim([done, claimed, failed])
        store.confirm([done])
        store.release([Release(failed, failed=True)])
        cut()
        for verb in self.every_verb(store, bystander):
            assert self.is_unavailable(verb)
        mend()
        answers = store.claim([self.sibling(claim.fingerprint) for claim in (done, claimed, failed)])
        assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.IN_PROGRESS, Verdict.NEW]
        assert answers[2].tries == 1
        assert list(store.extend([claimed])) == [True]


_NEEDED = {
    **{law: "reopen" for law in vars(DurableLaws) if law.startswith("test_")},
    "test_a_full_store_may_forget_but_never_takes_a_new_message_for_a_done_one": "make_full_store",
    "test_a_slow_store_is_given_up_in_time": "make_slow_store",
    "test_a_dead_store_says_so_and_loses_nothing": "make_dead_store",
}


class StoreContract(ClaimLaws, OutcomeLaws, HoldLaws, BatchLaws, DurableLaws, HardStateLaws):
    """The laws of `nsqdedupe.store.Store`, as tests that pytest collects from a subclass.

    A subclass, named ``Test...``, states `traits`, defines `make_store` and, where it can, `make_peer`, `reopen`,
    `make_full_store`, `make_slow_store` and `make_dead_store`; without one of the last four its laws are not
    collected. A store on a real clock overrides `pass_time`, `lease`, `expiry_step` and `early`.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for test, maker in _NEEDED.items():
            defined = getattr(cls, maker) is not getattr(Bench, maker)
            if test not in vars(cls):
                setattr(cls, test, getattr(StoreContract, test) if defined else None)
