"""How long a delivery keeps its message: age, leases, touch, and owners that come too late."""

from __future__ import annotations

import pytest
from harness import LEASE, MSG_TIMEOUT, Consumer, fingerprint_of, jittered

from nsqdedupe.delivery import Outcome
from nsqdedupe.keeper import MAX_LEASE


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# -- before the handler starts -------------------------------------------------------------------


def test_a_delivery_whose_timeout_is_near_is_not_run_and_its_message_is_free(consumer: Consumer) -> None:
    consumer.take("a", "b")
    consumer.clock.advance(MSG_TIMEOUT)
    consumer.copies("b2")
    consumer.take("b2")
    consumer.work()
    consumer.work()
    assert consumer.did() == [("abandon", "b"), ("abandon", "a"), ("run", "b2")]
    assert consumer.deliveries["b2"].tries == 0
    assert consumer.counts() == {"received": 3, "unanswered": 2, "in_flight": 1}


@pytest.mark.parametrize(("msg_timeout", "margin"), [(60.0, 0.5), (1.0, 0.1)])
def test_a_delivery_starts_until_shortly_before_its_timeout(msg_timeout: float, margin: float) -> None:
    consumer = Consumer(msg_timeout=msg_timeout)
    consumer.deliver("0/a", waited=msg_timeout - margin - 0.01)
    consumer.deliver("1/a", waited=msg_timeout - margin + 0.01)
    assert consumer.did() == [("run", "0/a"), ("abandon", "1/a")]


def test_age_counts_from_when_the_socket_was_last_seen_empty(consumer: Consumer) -> None:
    consumer.take("a", waited=50.0)
    consumer.clock.advance(9.0)
    consumer.work()
    assert consumer.did() == [("run", "a")]
    consumer.take("n/a", waited=50.0)
    consumer.clock.advance(10.0)
    consumer.work()
    assert consumer.did() == [("abandon", "n/a")]


def test_a_message_that_was_let_go_is_free_for_another_process(consumer: Consumer) -> None:
    other = consumer.beside()
    consumer.take("a")
    consumer.clock.advance(MSG_TIMEOUT)
    consumer.work()
    other.deliver("b")
    assert other.did() == [("run", "b")]


def test_old_leases_are_extended_before_a_handler_starts_all_in_one_call(consumer: Consumer) -> None:
    consumer.take("0/a", "1/a", "2/a")
    consumer.clock.advance(1.0)
    consumer.take("3/a")
    consumer.clock.advance(LEASE / 2)
    consumer.gate.asked()
    consumer.work()
    assert consumer.gate.asked() == [("extend", 3)]
    assert consumer.did() == [("run", f"{message}/a") for message in range(4)]


def test_young_leases_are_not_extended(consumer: Consumer) -> None:
    consumer.take("a")
    consumer.clock.advance(LEASE / 2)
    consumer.gate.asked()
    consumer.work()
    assert consumer.gate.asked() == []
    assert consumer.did() == [("run", "a")]


def take_over(consumer: Consumer, *names: str) -> Consumer:
    """Another process gets the messages that this one has claimed, as if their leases were over."""
    other = consumer.beside()
    consumer.gate.store.forget([copy.fingerprint for copy in consumer.deliveries.values() if copy.fingerprint])
    other.deliver(*names)
    other.did()
    return other


def test_a_claim_that_was_lost_before_the_start_is_asked_for_again(consumer: Consumer) -> None:
    consumer.take("0/a", "1/a", "2/a", "3/a")
    consumer.clock.advance(40.0)
    other = take_over(consumer, "0/b", "1/b")
    other.succeed("1/b")
    consumer.gate.asked()
    consumer.work()
    consumer.work()
    # 0 is handled elsewhere, 1 was, 2 and 3 are free again.
    assert consumer.gate.asked() == [("extend", 4), ("claim", 4)]
    deferred = ("REQ unrun", "0/a", jittered(LEASE + 1.0))
    assert consumer.did() == [deferred, ("FIN unrun", "1/a"), ("run", "2/a"), ("run", "3/a")]
    assert consumer.counts() == {"received": 4, "duplicates": 1, "deferred": 1, "in_flight": 2}


def test_a_lost_claim_that_is_free_again_is_run_once(consumer: Consumer) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.HANDLED)
    consumer.take("0/a", "1/a")
    consumer.clock.advance(40.0)
    consumer.gate.store.forget([fingerprint_of("0"), fingerprint_of("1")])
    consumer.work()
    assert sorted(consumer.did()) == [("FIN", "0/a"), ("FIN", "1/a"), ("run", "0/a"), ("run", "1/a")]
    assert consumer.is_idle()


def test_who_lost_its_claim_does_not_end_the_hold_of_the_one_who_took_it(consumer: Consumer) -> None:
    consumer.take("a")
    consumer.clock.advance(40.0)
    other = take_over(consumer, "a2")
    other.fail("a2")
    consumer.work()
    assert consumer.did() == [("REQ unrun", "a", jittered(91.0))]


# -- while a coroutine handler runs --------------------------------------------------------------


def test_the_lease_of_a_running_coroutine_is_extended(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    for _ in range(10):
        consumer.wait(MSG_TIMEOUT)
        other = consumer.beside()
        other.deliver("b")
        assert other.is_idle() is False
        assert ("run", "b") not in other.did()
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.events.late_confirms == 0


def test_coroutines_are_extended_in_one_call_when_half_their_lease_is_over(consumer: Consumer) -> None:
    consumer.deliver("0/a", "1/a", "2/a")
    for copy in consumer.deliveries.values():
        copy.runs_since = consumer.clock()
    consumer.gate.asked()
    consumer.wait(31.0)
    assert consumer.gate.asked() == []
    consumer.wait(1.0)
    assert consumer.gate.asked() == [("extend", 3)]


def test_a_coroutine_that_never_ends_loses_its_message_after_max_lease(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    consumer.wait(MAX_LEASE)
    assert consumer.did() == [("run", "a")]
    consumer.wait(LEASE)
    assert consumer.did() == [("abandon", "a")]
    assert consumer.is_idle()
    assert consumer.kept() == 0


def test_a_coroutine_whose_claim_was_lost_runs_on_and_its_success_is_recorded(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    other = take_over(consumer, "b")
    consumer.wait(40.0)
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.events.late_confirms == 1
    other.fail("b")
    other.deliver("b2")
    assert other.did() == [("REQ", "b", 90.0), ("FIN unrun", "b2")]


def test_a_coroutine_whose_claim_was_lost_and_fails_sends_its_copy_back_and_touches_nothing(
    consumer: Consumer,
) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    other = take_over(consumer, "b")
    consumer.wait(40.0)
    consumer.fail("a")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 90.0)]
    consumer.deliver("a2")
    assert consumer.did() == []
    other.fail("b")
    consumer.wait(LEASE + 95.0)
    consumer.deliver("a3")
    assert consumer.deliveries["a3"].tries == 1


# -- handlers that may never answer --------------------------------------------------------------


def test_a_handler_that_never_answers_loses_its_message_when_its_lease_ends(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE - 1)
    assert consumer.did() == [("run", "a")]
    consumer.wait(1.0)
    assert consumer.did() == [("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}
    assert consumer.is_idle()
    consumer.deliver("a2")
    assert consumer.did() == [("run", "a2")]


def test_an_answer_that_is_not_carried_out_yet_when_the_lease_ends_still_counts(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.clock.advance(LEASE)
    consumer.deduper.answer(consumer.deliveries["a"], Outcome.HANDLED)
    consumer.deduper.tick()
    consumer.work()
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.counts() == {"received": 1, "handled": 1}


def test_what_a_stale_owner_answers_is_not_told_to_nsqd(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE)
    consumer.deliver("a2")
    consumer.did()
    consumer.fail("a")
    consumer.answer("a", Outcome.HANDLED)
    assert consumer.did() == []
    assert consumer.deliveries["a2"].superseded is False
    consumer.succeed("a2")
    assert consumer.did() == [("FIN", "a2")]
    assert consumer.counts() == {"received": 2, "unanswered": 1, "handled": 1}


def test_a_stale_owners_success_is_recorded_and_counted_as_late(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE)
    consumer.succeed("a")
    assert consumer.events.late_confirms == 1
    consumer.deliver("a2", "b")
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("FIN unrun", "a2"), ("FIN unrun", "b")]


def test_a_stale_owners_success_does_not_end_its_successors_claim(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE)
    consumer.deliver("b")
    consumer.succeed("a")
    consumer.succeed("b")
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("run", "b"), ("FIN", "b")]
    assert consumer.events.late_confirms == 1


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.INVALID])
def test_a_stale_owners_failure_counts_no_try_and_touches_no_claim(consumer: Consumer, outcome: Outcome) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE)
    consumer.deliver("b")
    consumer.answer("a", outcome)
    other = consumer.beside()
    other.deliver("c")
    assert other.did() == []
    consumer.fail("b", delay=0.0)
    other.poll()
    assert other.did() == [("run", "c")]
    assert other.deliveries["c"].tries == 1


def test_a_stale_owner_that_fails_before_anybody_took_over_counts_no_try_either(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.deliver("a2")
    consumer.wait(LEASE)
    consumer.fail("a2")
    consumer.deliver("b")
    assert consumer.did()[-1] == ("run", "b")
    assert consumer.deliveries["b"].tries == 1


def test_owners_that_never_answered_are_not_remembered(consumer: Consumer) -> None:
    for message in range(100):
        consumer.deliver(f"{message}/a")
    consumer.wait(LEASE)
    left = [value for value in vars(consumer.deduper).values() if isinstance(value, dict | list) and value]
    assert left == []


# -- touch ---------------------------------------------------------------------------------------


def test_touch_lets_the_lease_start_anew(consumer: Consumer) -> None:
    consumer.deliver("a")
    for _ in range(5):
        consumer.wait(LEASE - 1)
        consumer.deduper.touch(consumer.deliveries["a"])
    other = consumer.beside()
    other.deliver("b")
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    other.poll()
    assert other.did() == [("FIN unrun", "b")]
    assert consumer.events.late_confirms == 0


def test_touch_by_a_stale_owner_changes_nothing(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(LEASE)
    consumer.gate.asked()
    consumer.deduper.touch(consumer.deliveries["a"])
    assert consumer.gate.asked() == []
    assert consumer.is_idle()


def test_touch_after_the_answer_changes_nothing(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.succeed("a")
    consumer.gate.asked()
    consumer.deduper.touch(consumer.deliveries["a"])
    assert consumer.gate.asked() == []


def test_touch_without_a_fingerprint_asks_nobody() -> None:
    consumer = Consumer(unprotected=True)
    consumer.deliver("a")
    consumer.deduper.touch(consumer.deliveries["a"])
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.gate.asked() == []


# -- how often leases are looked at --------------------------------------------------------------


@pytest.mark.parametrize(("msg_timeout", "every"), [(2.0, 0.25), (8.0, 1.0), (60.0, 1.0)])
def test_leases_are_looked_at_each_second_or_eight_times_in_a_short_timeout(msg_timeout: float, every: float) -> None:
    consumer = Consumer(msg_timeout=msg_timeout)
    consumer.deliver("a")
    consumer.clock.advance(msg_timeout + 2.0 - every / 2)
    consumer.deduper.tick()
    consumer.clock.advance(every * 0.75)
    consumer.deduper.tick()
    assert consumer.did() == [("run", "a")]
    consumer.clock.advance(every / 4)
    consumer.deduper.tick()
    assert consumer.did() == [("abandon", "a")]


# -- without a claim -----------------------------------------------------------------------------


def test_a_message_without_a_claim_that_is_never_answered_is_let_go_when_its_lease_would_be_over() -> None:
    """Else it stayed in flight for good, and a reader that stops would wait for it."""
    consumer = Consumer(unprotected=True)
    consumer.deliver("a")
    consumer.wait(LEASE - 1.0)
    assert consumer.did() == [("run", "a")]
    consumer.wait(2.0)
    assert consumer.did() == [("abandon", "a")]
    consumer.succeed("a")
    assert consumer.did() == [], "too late: nsqd has given it out again"
    assert [tally.unanswered for tally in consumer.tallies] == [1]
    assert [tally.in_flight for tally in consumer.tallies] == [0]


def test_a_touch_gives_a_message_without_a_claim_more_time() -> None:
    consumer = Consumer(unprotected=True)
    consumer.deliver("a")
    consumer.wait(LEASE - 1.0)
    consumer.deduper.touch(consumer.deliveries["a"])
    consumer.wait(LEASE - 1.0)
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]


def test_a_coroutine_without_a_claim_keeps_its_message_while_it_runs() -> None:
    consumer = Consumer(unprotected=True)
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    consumer.wait(10 * LEASE)
    consumer.succeed("a")
    consumer.wait(LEASE)
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
