"""What becomes of deliveries whose connection is lost before they are answered."""

from __future__ import annotations

import pytest
from harness import LEASE, Consumer

from nsqdedupe.delivery import Outcome, State


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


def test_a_handler_runs_on_and_its_success_is_recorded(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    assert consumer.did() == [("run", "a")]
    consumer.succeed("a")
    assert consumer.did() == [("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}
    consumer.deliver("a2")
    assert consumer.did() == [("FIN unrun", "a2")]


def test_a_failure_after_the_loss_counts_a_try_and_the_redelivery_is_handled(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    consumer.fail("a")
    consumer.wait(1.0)
    consumer.deliver("a2")
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("run", "a2")]
    assert consumer.deliveries["a2"].tries == 1
    assert consumer.counts() == {"received": 2, "unanswered": 1, "in_flight": 1}


def test_a_redelivery_over_a_new_connection_stands_by_the_run_and_answers_for_it(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    consumer.deliver("a2")
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("FIN unrun", "a2")]
    assert consumer.counts() == {"received": 2, "handled": 1, "duplicates": 1}


def test_copies_of_other_nsqds_share_the_outcome_of_a_lost_owner(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.lose("a")
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("abandon", "a"), ("FIN unrun", "b")]


def test_copies_of_other_nsqds_go_back_when_a_lost_owner_fails(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.lose("a")
    consumer.fail("a", delay=0.0)
    assert [what for what, *_ in consumer.did()] == ["run", "abandon", "REQ unrun"]


def test_what_waits_for_its_turn_is_not_run_and_its_message_is_free(consumer: Consumer) -> None:
    other = consumer.beside()
    consumer.take("a", "n/c")
    consumer.lose("a")
    consumer.work()
    assert consumer.did() == [("abandon", "a"), ("run", "n/c")]
    other.deliver("b")
    assert other.did() == [("run", "b")]


def test_a_standby_takes_over_from_one_that_waited_for_its_turn(consumer: Consumer) -> None:
    consumer.take("a", "b", "c")
    consumer.lose("a")
    assert consumer.wakes == 1
    consumer.work()
    assert consumer.did() == [("abandon", "a"), ("run", "b")]
    consumer.succeed("b")
    assert consumer.did() == [("FIN", "b"), ("FIN unrun", "c")]


def test_standbys_of_the_lost_connection_fall_silent_and_the_others_stay(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.take("b", "c")
    consumer.lose("b")
    assert consumer.did() == [("run", "a"), ("abandon", "b")]
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "c")]
    assert consumer.counts() == {"received": 3, "handled": 1, "duplicates": 1, "unanswered": 1}


def test_a_standby_whose_owner_is_of_the_same_connection_falls_silent_with_it(consumer: Consumer) -> None:
    consumer.take("a", "b", "a2", "c")
    consumer.lose("a")
    consumer.work()
    assert consumer.did() == [("abandon", "a"), ("abandon", "a2"), ("run", "b")]
    assert consumer.deliveries["c"].state is State.STANDBY


def test_a_copy_that_waits_for_an_owner_elsewhere_falls_silent_and_a_standby_asks_instead(consumer: Consumer) -> None:
    other = consumer.beside()
    other.deliver("d")
    consumer.deliver("a", "b")
    consumer.lose("a")
    assert consumer.did() == [("abandon", "a")]
    assert consumer.deliveries["b"].state is State.WAITING
    other.succeed("d")
    consumer.poll()
    assert consumer.did() == [("FIN unrun", "b")]
    assert consumer.events.standbys == 2


def test_a_copy_that_waits_alone_leaves_nothing(consumer: Consumer) -> None:
    other = consumer.beside()
    other.deliver("b")
    consumer.deliver("a")
    consumer.lose("a")
    assert consumer.did() == [("abandon", "a")]
    assert consumer.is_idle()


def test_an_heir_does_not_end_the_hold_that_its_owner_elsewhere_left(consumer: Consumer) -> None:
    other = consumer.beside()
    other.deliver("b")
    consumer.deliver("a", "b2")
    other.fail("b")
    consumer.lose("a")
    consumer.work()
    assert [(what, name) for what, name, *_ in consumer.did()] == [("abandon", "a"), ("REQ unrun", "b2")]


def test_a_lost_handler_that_never_answers_is_let_go_when_its_lease_ends(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    consumer.wait(LEASE)
    assert consumer.did() == [("run", "a"), ("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}
    assert consumer.kept() == 0


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_after_the_loss_leaves_the_delivery_unanswered(consumer: Consumer, outcome: Outcome) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    consumer.answer("a", outcome)
    assert consumer.did() == [("run", "a"), ("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}
    assert consumer.is_idle()


def test_a_message_without_a_fingerprint_is_forgotten_with_its_connection(consumer: Consumer) -> None:
    (copy,) = consumer.copies("a")
    copy.fingerprint = None
    consumer.deduper.take([copy])
    consumer.lose("a")
    consumer.work()
    assert consumer.did() == [("abandon", "a")]


def test_losing_a_connection_without_deliveries_changes_nothing(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.source("c")
    consumer.lose("c")
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]
