"""What becomes of a message when its handler answers, and of its copies that come later."""

from __future__ import annotations

import math

import pytest
from harness import MSG_TIMEOUT, Consumer, fingerprint_of, jittered

from nsqdedupe.delivery import Delivery, Outcome
from nsqdedupe.outcomes import MAX_DELAY, jitter


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# -- success, and duplicates ---------------------------------------------------------------------


def test_a_new_message_is_handled_and_finished(consumer: Consumer) -> None:
    consumer.deliver("a")
    assert consumer.did() == [("run", "a")]
    assert consumer.counts() == {"received": 1, "in_flight": 1}
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a")]
    assert consumer.counts() == {"received": 1, "handled": 1}
    assert consumer.is_idle()
    assert consumer.kept() == 0


def test_a_message_is_confirmed_before_it_is_finished(consumer: Consumer) -> None:
    consumer.gate.listener = lambda verb: consumer.notes.append((verb, ""))
    consumer.deliver("a")
    consumer.succeed("a")
    assert consumer.did() == [("claim", ""), ("run", "a"), ("confirm", ""), ("FIN", "a")]


def test_a_copy_of_a_handled_message_is_finished_without_a_run(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.succeed("a")
    consumer.did()
    consumer.deliver("b")
    consumer.deliver("a2")
    assert consumer.did() == [("FIN unrun", "b"), ("FIN unrun", "a2")]
    assert consumer.counts() == {"received": 3, "handled": 1, "duplicates": 2}
    assert consumer.is_idle()


def test_a_handler_that_answers_while_it_is_called_is_settled_in_the_same_turn(consumer: Consumer) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.HANDLED)
    consumer.deliver("a", "A", "n/a")
    assert consumer.did() == [("run", "a"), ("run", "n/a"), ("FIN", "a"), ("FIN", "n/a"), ("FIN unrun", "A")]
    assert consumer.wakes == 0


def test_a_handler_that_succeeds_at_once_needs_no_other_answer(consumer: Consumer) -> None:
    consumer.deliver("0/b")
    consumer.fail("0/b", delay=0.0)
    consumer.did()
    consumer.on_run = lambda delivery: True
    consumer.deliver("0/a", "0/A", "1/a")
    assert consumer.did() == [
        *(("run", "0/a"), ("run", "1/a")),
        *(("FIN", "0/a"), ("FIN", "1/a"), ("FIN unrun", "0/A")),
    ]
    assert consumer.counts() == {"received": 4, "failed": 1, "handled": 2, "duplicates": 1}
    assert consumer.is_idle()


def test_a_handler_that_answers_later_wakes_the_reader(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deduper.answer(consumer.deliveries["a"], Outcome.HANDLED)
    assert consumer.wakes == 1
    assert consumer.did() == [("run", "a")]
    consumer.work()
    assert consumer.did() == [("FIN", "a")]


def test_only_the_first_answer_of_a_handler_counts(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deduper.answer(consumer.deliveries["a"], Outcome.HANDLED)
    consumer.deduper.answer(consumer.deliveries["a"], Outcome.FAILED)
    consumer.work()
    consumer.fail("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.counts() == {"received": 1, "handled": 1}


# -- batches -------------------------------------------------------------------------------------


def test_a_batch_costs_one_claim_and_one_confirm(consumer: Consumer) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.HANDLED)
    consumer.deliver(*(f"{message}/a" for message in range(100)))
    assert consumer.gate.asked() == [("claim", 100), ("confirm", 100)]


def test_failures_of_a_batch_cost_one_release(consumer: Consumer) -> None:
    outcomes = {b"0": Outcome.HANDLED, b"1": Outcome.FAILED, b"2": Outcome.CANCELLED, b"3": Outcome.GIVEN_UP}
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, outcomes[delivery.owner[:1]])
    consumer.deliver("0/a", "1/a", "2/a", "3/a")
    assert consumer.gate.asked() == [("claim", 4), ("confirm", 2), ("release", 2)]


def test_nsqd_is_answered_in_the_order_of_the_answers(consumer: Consumer) -> None:
    """A backoff begins with a failure and ends with a success: their order counts."""
    outcomes = {b"0": Outcome.HANDLED, b"1": Outcome.FAILED, b"2": Outcome.HANDLED, b"3": Outcome.INVALID}
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, outcomes[delivery.owner[:1]])
    consumer.take("0/a", "1/a", "2/a", "3/a")
    consumer.work()
    assert consumer.did()[4:] == [("FIN", "0/a"), ("REQ", "1/a", 90.0), ("FIN", "2/a"), ("FIN", "3/a")]


def test_both_copies_in_one_batch_are_claimed_once(consumer: Consumer) -> None:
    consumer.deliver("a", "A")
    assert consumer.gate.asked() == [("claim", 1)]
    assert consumer.did() == [("run", "a")]


def test_a_slice_that_is_over_leaves_the_rest_for_the_next_turn(consumer: Consumer) -> None:
    def handle(delivery: Delivery) -> None:
        consumer.clock.advance(0.005)
        consumer.deduper.answer(delivery, Outcome.HANDLED)

    consumer.on_run = handle
    consumer.take("0/a", "1/a", "2/a")
    assert consumer.work(until=consumer.clock() + 0.008) is True
    assert consumer.did() == [("run", "0/a"), ("run", "1/a"), ("FIN", "0/a"), ("FIN", "1/a")]
    assert consumer.work(until=consumer.clock() + 0.008) is False
    assert consumer.did() == [("run", "2/a"), ("FIN", "2/a")]


def test_a_slice_that_is_over_before_it_begins_still_handles_one(consumer: Consumer) -> None:
    consumer.take("0/a", "1/a")
    assert consumer.work(until=consumer.clock() - 1) is True
    assert consumer.did() == [("run", "0/a")]


def test_what_was_answered_is_settled_even_when_a_handler_stops_the_process(consumer: Consumer) -> None:
    def handle(delivery: Delivery) -> None:
        if delivery.owner == b"1/a":
            consumer.deduper.answer(delivery, Outcome.CANCELLED)
            raise SystemExit
        consumer.deduper.answer(delivery, Outcome.HANDLED)

    consumer.on_run = handle
    consumer.take("0/a", "1/a")
    with pytest.raises(SystemExit):
        consumer.work()
    assert consumer.did() == [
        ("run", "0/a"),
        ("run", "1/a"),
        ("FIN", "0/a"),
        ("REQ unrun", "1/a", jittered(1.0)),
    ]
    consumer.on_run = lambda delivery: None
    consumer.deliver("2/a")
    assert consumer.wakes == 0
    consumer.deduper.answer(consumer.deliveries["2/a"], Outcome.HANDLED)
    assert consumer.wakes == 1


# -- failure -------------------------------------------------------------------------------------


def test_a_claim_is_released_before_its_message_is_requeued(consumer: Consumer) -> None:
    consumer.gate.listener = lambda verb: consumer.notes.append((verb, ""))
    consumer.deliver("a")
    consumer.fail("a")
    assert consumer.did() == [("claim", ""), ("run", "a"), ("release", ""), ("REQ", "a", 90.0)]
    assert consumer.counts() == {"received": 1, "failed": 1}
    assert consumer.is_idle()


def test_delays_grow_with_the_messages_tries_not_with_the_copys_attempts(consumer: Consumer) -> None:
    consumer.deliver("a7")
    consumer.fail("a7")
    consumer.wait(90.0)
    consumer.deliver("b1")
    consumer.fail("b1")
    consumer.wait(180.0)
    consumer.deliver("a8")
    consumer.fail("a8")
    assert consumer.did() == [
        *(("run", "a7"), ("REQ", "a7", 90.0)),
        *(("run", "b1"), ("REQ", "b1", 180.0)),
        *(("run", "a8"), ("REQ", "a8", 270.0)),
    ]


@pytest.mark.parametrize(("asked", "given"), [(0.0, 0.0), (0.25, 0.25), (3600.0, 3600.0), (3601.0, MAX_DELAY)])
def test_a_handler_may_ask_for_a_delay_of_up_to_an_hour(consumer: Consumer, asked: float, given: float) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=asked)
    assert consumer.did() == [("run", "a"), ("REQ", "a", given)]


def test_a_default_delay_is_clamped_like_nsqds() -> None:
    consumer = Consumer(requeue_delay=4000.0)
    consumer.deliver("a")
    consumer.fail("a")
    assert consumer.did() == [("run", "a"), ("REQ", "a", MAX_DELAY)]


@pytest.mark.parametrize(("asked", "given"), [(None, jittered(1.0)), (0.0, 0.0), (7.0, 7.0)])
def test_a_cancelled_handler_costs_no_try_and_holds_nothing(
    consumer: Consumer, asked: float | None, given: object
) -> None:
    consumer.deliver("a")
    consumer.answer("a", Outcome.CANCELLED, asked)
    assert consumer.did() == [("run", "a"), ("REQ unrun", "a", given)]
    assert consumer.counts() == {"received": 1, "failed": 1}
    assert consumer.kept() == 0
    consumer.deliver("b")
    assert consumer.did() == [("run", "b")]
    assert consumer.deliveries["b"].tries == 0


def test_an_invalid_message_is_finished_and_not_remembered(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.answer("a", Outcome.INVALID)
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.counts() == {"received": 1, "invalid": 1}
    assert consumer.kept() == 0
    consumer.deliver("b")
    assert consumer.did() == [("run", "b")]


# -- giving up -----------------------------------------------------------------------------------


def fail_twice(consumer: Consumer) -> None:
    """Let two copies fail, one after the other, and their holds pass."""
    for name, hold in (("a", 90.0), ("b", 180.0)):
        consumer.deliver(name)
        consumer.fail(name)
        consumer.wait(hold)
    consumer.did()


def test_a_message_that_failed_often_enough_is_given_up_once() -> None:
    consumer = Consumer(max_tries=2)
    fail_twice(consumer)
    consumer.deliver("a2", "b2")
    assert consumer.did() == [("give up", "a2"), ("FIN", "a2"), ("FIN unrun", "b2")]
    consumer.deliver("c")
    assert consumer.did() == [("FIN unrun", "c")]
    assert consumer.counts() == {"received": 5, "failed": 2, "given_up": 1, "duplicates": 2}
    assert consumer.kept() == 0


def test_a_message_is_confirmed_before_it_is_given_up_to_nsqd() -> None:
    consumer = Consumer(max_tries=2)
    fail_twice(consumer)
    consumer.gate.listener = lambda verb: consumer.notes.append((verb, ""))
    consumer.deliver("a2")
    assert consumer.did() == [("claim", ""), ("give up", "a2"), ("confirm", ""), ("FIN", "a2")]


def test_the_last_try_is_run() -> None:
    consumer = Consumer(max_tries=3)
    fail_twice(consumer)
    consumer.deliver("a2")
    assert consumer.did() == [("run", "a2")]
    consumer.succeed("a2")
    assert consumer.counts() == {"received": 3, "failed": 2, "handled": 1}


def test_max_tries_of_0_never_gives_up() -> None:
    consumer = Consumer(max_tries=0)
    for failure in range(30):
        consumer.deliver(f"a{failure + 1}")
        consumer.fail(f"a{failure + 1}", delay=0.0)
    assert consumer.counts() == {"received": 30, "failed": 30}


def test_deliveries_without_a_run_cost_no_try() -> None:
    consumer = Consumer(max_tries=1)
    consumer.deliver("a3000")
    consumer.answer("a3000", Outcome.CANCELLED)
    consumer.deliver("a3001", waited=MSG_TIMEOUT)
    consumer.deliver("a3002")
    assert [what for what, *_ in consumer.did()] == ["run", "REQ unrun", "abandon", "run"]


def test_a_hook_that_fails_while_giving_up_costs_no_try_and_is_asked_again() -> None:
    consumer = Consumer(max_tries=2)
    fail_twice(consumer)
    consumer.on_give_up = lambda delivery: consumer.deduper.answer(delivery, Outcome.CANCELLED, 90.0)
    consumer.deliver("a2")
    consumer.on_give_up = consumer.accept
    consumer.deliver("b2")
    assert consumer.did() == [
        *(("give up", "a2"), ("REQ unrun", "a2", 90.0)),
        *(("give up", "b2"), ("FIN", "b2")),
    ]
    assert consumer.deliveries["b2"].tries == 2


def test_tries_end_with_success() -> None:
    consumer = Consumer(max_tries=3)
    fail_twice(consumer)
    consumer.deliver("a2")
    consumer.succeed("a2")
    consumer.gate.forget([fingerprint_of("m")])
    consumer.deliver("a3")
    assert consumer.deliveries["a3"].tries == 0


# -- without a fingerprint, without a store ------------------------------------------------------


def take_without_a_fingerprint(consumer: Consumer, name: str, waited: float = 0.0) -> None:
    (copy,) = consumer.copies(name, waited=waited)
    copy.fingerprint = None
    consumer.deduper.take([copy])
    consumer.work()


def test_a_message_without_a_fingerprint_is_handled_unprotected(consumer: Consumer) -> None:
    take_without_a_fingerprint(consumer, "a")
    take_without_a_fingerprint(consumer, "b")
    assert consumer.did() == [("run", "a"), ("run", "b")]
    consumer.succeed("a")
    consumer.answer("b", Outcome.INVALID)
    assert consumer.did() == [("FIN", "a"), ("FIN", "b")]
    assert consumer.gate.asked() == []
    assert consumer.events.unprotected == 2
    assert consumer.counts() == {"received": 2, "handled": 1, "invalid": 1}


def test_without_a_fingerprint_nsqds_attempts_count_for_delays_and_for_giving_up(consumer: Consumer) -> None:
    take_without_a_fingerprint(consumer, "a5")
    consumer.fail("a5")
    take_without_a_fingerprint(consumer, "a6")
    assert consumer.did() == [("run", "a5"), ("REQ", "a5", 450.0), ("give up", "a6"), ("FIN", "a6")]
    assert consumer.counts() == {"received": 2, "failed": 1, "given_up": 1}


def test_without_a_fingerprint_a_delivery_that_waited_too_long_is_not_run(consumer: Consumer) -> None:
    take_without_a_fingerprint(consumer, "a", waited=MSG_TIMEOUT)
    assert consumer.did() == [("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}


def test_without_a_store_every_copy_is_handled() -> None:
    consumer = Consumer(unprotected=True)
    consumer.deliver("a", "b")
    consumer.succeed("a")
    consumer.fail("b")
    consumer.deliver("b2", "c6")
    consumer.wait(1.0)
    assert consumer.did() == [
        *(("run", "a"), ("run", "b"), ("FIN", "a"), ("REQ", "b", 90.0)),
        *(("run", "b2"), ("give up", "c6"), ("FIN", "c6")),
    ]
    assert consumer.events.unprotected == 4


# -- jitter --------------------------------------------------------------------------------------


def test_jitter_spreads_and_is_never_nothing() -> None:
    jitters = [jitter() for _ in range(1000)]
    assert 0.1 <= min(jitters) < 0.15
    assert 0.45 < max(jitters) <= 0.5
    assert not math.isclose(jitters[0], jitters[1])


# -- counters add up -----------------------------------------------------------------------------


def test_two_that_are_never_answered_are_two_unanswered(consumer: Consumer) -> None:
    consumer.deliver("0/a", "1/a")
    consumer.wait(MSG_TIMEOUT + 10)
    assert consumer.counts() == {"received": 2, "unanswered": 2}


def test_two_that_succeed_after_their_connection_are_two_unanswered(consumer: Consumer) -> None:
    consumer.deliver("0/a", "1/a")
    consumer.lose("a")
    consumer.succeed("0/a", "1/a")
    assert consumer.counts() == {"received": 2, "unanswered": 2}


def test_two_that_succeed_after_their_redelivery_are_two_handled(consumer: Consumer) -> None:
    consumer.deliver("0/a", "1/a", "0/a2", "1/a2")
    consumer.succeed("0/a", "1/a")
    assert consumer.counts() == {"received": 4, "handled": 2, "duplicates": 2}


def test_two_that_succeed_too_late_are_two_late_confirms(consumer: Consumer) -> None:
    consumer.deliver("0/a", "1/a")
    consumer.wait(MSG_TIMEOUT + 10)
    consumer.deliver("0/b", "1/b")
    consumer.succeed("0/a", "1/a")
    assert consumer.events.late_confirms == 2


def test_who_was_let_go_keeps_nobody_behind_it_from_its_answer(consumer: Consumer) -> None:
    consumer.deliver("0/a")
    consumer.wait(MSG_TIMEOUT + 10)
    consumer.deliver("1/a")
    consumer.did()
    consumer.deduper.answer(consumer.deliveries["0/a"], Outcome.HANDLED)
    consumer.deduper.answer(consumer.deliveries["1/a"], Outcome.HANDLED)
    consumer.work()
    assert consumer.did() == [("FIN", "1/a")]


def test_with_one_try_a_message_is_given_up_after_its_first_failure() -> None:
    consumer = Consumer(max_tries=1)
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.deliver("a2")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 0.0), ("give up", "a2"), ("FIN", "a2")]
