"""What becomes of copies that come while another copy of their message is being handled in this process."""

from __future__ import annotations

import pytest
from harness import LEASE, MSG_TIMEOUT, Between, Consumer, jittered

from nsqdedupe.delivery import Outcome, State


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# -- the owner is in this process ----------------------------------------------------------------


def test_a_copy_waits_while_another_is_handled_and_is_finished_with_it(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliver("b")
    consumer.deliver("c")
    assert consumer.did() == [("run", "a")]
    assert consumer.events.standbys == 2
    assert consumer.held == ["b", "c"]
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "b"), ("FIN unrun", "c")]
    assert consumer.counts() == {"received": 3, "handled": 1, "duplicates": 2}
    assert consumer.is_idle()


def test_copies_of_a_failed_message_go_back_a_second_later_than_it(consumer: Consumer) -> None:
    consumer.deliver("a", "b", "c")
    consumer.fail("a")
    assert consumer.did() == [
        ("run", "a"),
        ("REQ", "a", 90.0),
        ("REQ unrun", "b", jittered(91.0)),
        ("REQ unrun", "c", jittered(91.0)),
    ]
    assert consumer.counts() == {"received": 3, "failed": 1, "deferred": 2}
    assert consumer.is_idle()


def test_copies_of_a_message_that_shall_come_again_at_once_go_back_only_for_the_jitter(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.fail("a", delay=0.0)
    assert consumer.did() == [("run", "a"), ("REQ", "a", 0.0), ("REQ unrun", "b", jittered(0.0))]


def test_a_copy_never_goes_back_for_more_than_an_hour(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.fail("a", delay=3600.0)
    assert consumer.did() == [("run", "a"), ("REQ", "a", 3600.0), ("REQ unrun", "b", 3600.0)]


def test_copies_of_a_cancelled_message_go_back_after_it(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.answer("a", Outcome.CANCELLED)
    assert consumer.did() == [
        ("run", "a"),
        ("REQ unrun", "a", jittered(1.0)),
        ("REQ unrun", "b", Between(2.2 - 1e-6, 3.0 + 1e-6)),
    ]


def test_a_copy_that_comes_after_the_failure_asks_for_itself(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.deliver("b")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 0.0), ("run", "b")]
    assert consumer.deliveries["b"].tries == 1


def test_copies_of_an_invalid_message_are_each_looked_at(consumer: Consumer) -> None:
    consumer.deliver("a", "b", "c")
    consumer.answer("a", Outcome.INVALID)
    assert consumer.wakes == 2
    consumer.work()
    consumer.answer("b", Outcome.INVALID)
    consumer.work()
    consumer.succeed("c")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("run", "b"), ("FIN", "b"), ("run", "c"), ("FIN", "c")]
    assert consumer.counts() == {"received": 3, "invalid": 2, "handled": 1}


def test_a_standby_takes_over_when_its_owners_lease_ends(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(30.0)
    consumer.deliver("b", "c")
    consumer.wait(LEASE - 30.0)
    consumer.work()
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("run", "b")]
    assert consumer.events.takeovers == 1
    consumer.succeed("b")
    assert consumer.did() == [("FIN", "b"), ("FIN unrun", "c")]
    assert consumer.events.standbys == 2


def test_a_takeover_carries_the_tries(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.deliver("b")
    consumer.wait(30.0)
    consumer.deliver("c")
    consumer.wait(LEASE - 30.0)
    consumer.work()
    assert consumer.did()[-1] == ("run", "c")
    assert consumer.deliveries["c"].tries == 1


def test_a_standby_goes_back_before_nsqd_gives_it_out_again(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    consumer.deliver("b")
    consumer.wait(MSG_TIMEOUT * 0.8)
    assert consumer.did() == [("run", "a")]
    consumer.wait(1.0)
    # The lease was extended after 32 seconds, and it is 49 now.
    assert consumer.did() == [("REQ unrun", "b", jittered(32.0 + LEASE - 49.0 + 1.0))]
    assert consumer.counts() == {"received": 2, "deferred": 1, "in_flight": 1}


def test_each_standby_goes_back_by_its_own_age(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliver("b")
    consumer.wait(20.0)
    consumer.deliver("c")
    consumer.wait(29.0)
    assert consumer.did() == [("run", "a"), ("REQ unrun", "b", jittered(LEASE - 49.0 + 1.0))]
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "c")]


def test_a_standby_of_one_that_waits_for_its_turn_shares_its_fate(consumer: Consumer) -> None:
    consumer.take("a", "b")
    assert consumer.deliveries["a"].state is State.READY
    consumer.take("c")
    consumer.work()
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b"), ("FIN unrun", "c")]


# -- the same copy again -------------------------------------------------------------------------


def test_a_redelivery_stands_by_itself_and_only_it_answers(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliver("a2")
    assert consumer.did() == [("run", "a")]
    consumer.succeed("a")
    assert consumer.did() == [("abandon", "a"), ("FIN unrun", "a2")]
    assert consumer.counts() == {"received": 2, "handled": 1, "duplicates": 1}


def test_an_older_delivery_that_fails_does_not_take_the_newer_one_back(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliver("b", "a2")
    consumer.fail("a")
    assert consumer.did() == [
        ("run", "a"),
        ("abandon", "a"),
        ("REQ unrun", "b", jittered(91.0)),
        ("REQ unrun", "a2", jittered(91.0)),
    ]
    assert consumer.counts() == {"received": 3, "failed": 1, "deferred": 2}


def test_a_redelivery_of_a_standby_takes_its_place(consumer: Consumer) -> None:
    consumer.deliver("a", "c", "b")
    consumer.deliver("b2")
    assert consumer.did() == [("run", "a"), ("abandon", "b")]
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "c"), ("FIN unrun", "b2")]
    assert consumer.counts() == {"received": 4, "handled": 1, "duplicates": 2, "unanswered": 1}


def test_a_redelivery_after_an_outcome_is_handled_at_once(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.answer("a", Outcome.CANCELLED)
    consumer.deliver("a2")
    assert consumer.did()[-1] == ("run", "a2")
