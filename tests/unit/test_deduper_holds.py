"""Tries are spaced as with one copy: a failure's delay holds the whole message."""

from __future__ import annotations

import pytest
from harness import MSG_TIMEOUT, Consumer, jittered

from nsqdedupe.delivery import Outcome


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


def test_another_copy_that_comes_during_the_delay_goes_back_for_the_rest_of_it(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a")
    consumer.wait(30.0)
    consumer.deliver("b", "B")
    rest = jittered(60.0 + 1.0)
    assert consumer.did() == [
        *(("run", "a"), ("REQ", "a", 90.0)),
        *(("REQ unrun", "B", rest), ("REQ unrun", "b", rest)),
    ]
    assert consumer.counts() == {"received": 3, "failed": 1, "deferred": 2}
    assert consumer.is_idle()


def test_another_copy_is_handled_when_the_delay_is_over(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a")
    consumer.clock.advance(90.0)
    consumer.deliver("b")
    assert consumer.did()[-1] == ("run", "b")
    assert consumer.deliveries["b"].tries == 1


def test_a_copy_that_comes_in_another_process_during_the_delay_goes_back_too(consumer: Consumer) -> None:
    other = consumer.beside()
    consumer.deliver("a")
    consumer.fail("a")
    consumer.wait(30.0)
    other.deliver("b")
    assert other.did() == [("REQ unrun", "b", jittered(60.0 + 1.0))]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_new_delivery_of_the_copy_that_failed_ends_the_hold(consumer: Consumer, elsewhere: bool) -> None:
    consumer.deliver("a")
    consumer.fail("a")
    consumer.wait(1.0)
    there = consumer.beside() if elsewhere else consumer
    there.deliver("a2")
    assert there.did()[-1] == ("run", "a2")
    assert there.deliveries["a2"].tries == 1


def test_a_delivery_that_may_have_been_there_before_the_failure_does_not_end_the_hold(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(10.0)
    consumer.fail("a")
    consumer.wait(1.0)
    # It waited in the kernel's buffer, or came in the same moment.
    consumer.deliver("a2", waited=1.0)
    assert consumer.did()[-1] == ("REQ unrun", "a2", jittered(89.0 + 1.0))


@pytest.mark.parametrize("waited", [2.0, MSG_TIMEOUT])
def test_a_delivery_that_may_have_been_there_before_a_failure_elsewhere_does_not_end_the_hold(
    consumer: Consumer, waited: float
) -> None:
    """Else one that is too old to be started ends the hold, and then lets another copy have the message."""
    other = consumer.beside()
    other.deliver("a2")
    other.fail("a2")
    consumer.deliver("a", waited=waited)
    consumer.deliver("b")
    assert consumer.did() == [("REQ unrun", "a", jittered(91.0)), ("REQ unrun", "b", jittered(91.0))]


def test_a_delay_that_the_handler_asked_for_is_held(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=5.0)
    consumer.deliver("b")
    consumer.wait(5.0)
    consumer.deliver("b2")
    assert consumer.did() == [
        *(("run", "a"), ("REQ", "a", 5.0)),
        *(("REQ unrun", "b", jittered(6.0)), ("run", "b2")),
    ]


def test_a_hold_is_clamped_like_nsqds_delay(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=86_400.0)
    consumer.wait(1.0)
    consumer.deliver("b")
    consumer.clock.advance(3599.0)
    consumer.deliver("b2")
    assert consumer.did() == [
        *(("run", "a"), ("REQ", "a", 3600.0)),
        *(("REQ unrun", "b", 3600.0), ("run", "b2")),
    ]


def test_a_delay_of_nothing_holds_nothing(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.deliver("b")
    assert consumer.did()[-1] == ("run", "b")


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.INVALID])
def test_what_did_not_fail_holds_nothing(consumer: Consumer, outcome: Outcome) -> None:
    consumer.deliver("a")
    consumer.answer("a", outcome, 90.0)
    consumer.deliver("b")
    assert consumer.did()[-1] == ("run", "b")


def test_two_copies_burn_the_tries_no_faster_than_one() -> None:
    """As long as nsqd would have kept one copy alive: 90 + 180 + 270 + 360 seconds for 5 tries."""

    def seconds_until_given_up(*copies: str) -> float:
        consumer = Consumer(max_tries=5)
        consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.FAILED)
        start = consumer.clock()
        due = dict.fromkeys(copies, start)
        attempts = dict.fromkeys(copies, 0)
        while not consumer.counts().get("given_up"):
            copy = min(due, key=lambda name: due[name])
            consumer.clock.advance(max(0.0, due[copy] - consumer.clock()))
            attempts[copy] += 1
            consumer.deliver(f"{copy}{attempts[copy]}")
            for what, name, *delay in consumer.did():
                if what.startswith("REQ"):
                    due[name[0]] = consumer.clock() + delay[0]
        assert consumer.counts()["failed"] == 5
        return consumer.clock() - start

    one = seconds_until_given_up("a")
    assert one == 90.0 * (1 + 2 + 3 + 4 + 5)
    for _ in range(20):
        assert one <= seconds_until_given_up("a", "b") <= one + 5 * 1.5
