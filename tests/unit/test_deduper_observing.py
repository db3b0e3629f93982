"""Looking on: every delivery is handled as if there were no store, and what would have been finished is counted."""

from __future__ import annotations

import pytest
from harness import MSG_TIMEOUT, Consumer, jittered

from nsqdedupe.delivery import Outcome
from nsqdedupe.stores.embedded import EmbeddedStore


@pytest.fixture
def consumer() -> Consumer:
    return Consumer(observe=True)


def seen_by(consumer: Consumer) -> Consumer:
    """A consumer on the same store that does de-duplicate."""
    assert isinstance(consumer.gate.store, EmbeddedStore)
    return consumer.beside()


def test_a_copy_of_a_handled_message_is_handled_too_and_counted(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.succeed("a")
    assert consumer.events.observed == 0
    consumer.deliver("b", "a2")
    consumer.succeed("b", "a2")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("run", "b"), ("run", "a2"), ("FIN", "b"), ("FIN", "a2")]
    assert consumer.counts() == {"received": 3, "handled": 3}
    assert consumer.events.observed == 2
    assert consumer.events.unprotected == 0
    assert consumer.kept() == 0


def test_copies_that_come_while_their_message_is_handled_wait_for_nothing(consumer: Consumer) -> None:
    consumer.deliver("a", "b", "c")
    assert consumer.did() == [("run", "a"), ("run", "b"), ("run", "c")]
    consumer.succeed("b")
    assert consumer.events.observed == 0
    consumer.succeed("a", "c")
    assert consumer.events.observed == 2
    assert consumer.events.standbys == 0
    assert consumer.held == []
    assert consumer.kept() == 0


def test_copies_that_succeed_in_the_same_moment_count_but_for_one(consumer: Consumer) -> None:
    consumer.on_run = lambda _: True
    consumer.deliver("a", "A", "n/a")
    assert consumer.counts() == {"received": 3, "handled": 3}
    assert consumer.events.observed == 1


def test_a_failure_holds_nobody_and_leaves_nothing_behind(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.fail("a")
    consumer.deliver("b")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 90.0), ("run", "b")]
    consumer.answer("b", Outcome.CANCELLED, 0.0)
    assert consumer.kept() == 0
    assert consumer.events.observed == 0


def test_a_duplicate_is_counted_once_whatever_its_handler_does(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.succeed("a")
    consumer.deliver("b")
    consumer.fail("b")
    assert consumer.events.observed == 1
    assert consumer.counts() == {"received": 2, "handled": 1, "failed": 1}


def test_tries_and_giving_up_are_nsqds(consumer: Consumer) -> None:
    """The delay grows with the copy's attempts, and the copy is given up by them."""
    consumer.deliver("a3")
    assert consumer.deliveries["a3"].tries == 2
    consumer.fail("a3")
    consumer.deliver("a6")
    assert consumer.did() == [("run", "a3"), ("REQ", "a3", 270.0), ("give up", "a6"), ("FIN", "a6")]


def test_a_success_is_remembered_for_readers_that_do_de_duplicate(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.succeed("a")
    other = seen_by(consumer)
    other.deliver("b")
    assert other.did() == [("FIN unrun", "b")]


def test_who_looks_on_does_not_end_a_hold_of_a_reader_that_does_de_duplicate(consumer: Consumer) -> None:
    other = seen_by(consumer)
    other.deliver("a")
    other.fail("a")
    consumer.clock.advance(1.0)
    consumer.deliver("a2")
    other.deliver("b")
    assert other.did()[-1] == ("REQ unrun", "b", jittered(89.0 + 1.0))
    assert consumer.did() == [("run", "a2")]


def test_a_message_that_is_not_wanted_is_not_remembered(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.answer("a", Outcome.INVALID)
    other = seen_by(consumer)
    other.deliver("b")
    assert other.did() == [("run", "b")]


def test_a_message_without_a_key_is_handled_and_not_looked_up(consumer: Consumer) -> None:
    for copy in consumer.copies("a", "b"):
        copy.fingerprint = None
        consumer.deduper.take([copy])
    consumer.work()
    consumer.succeed("a", "b")
    assert consumer.did() == [("run", "a"), ("run", "b"), ("FIN", "a"), ("FIN", "b")]
    assert consumer.gate.asked() == []
    assert consumer.events.observed == 0


def test_what_is_never_answered_is_let_go_and_counted_as_without_a_store(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.wait(MSG_TIMEOUT + 10)
    assert consumer.did() == [("run", "a"), ("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}


@pytest.mark.parametrize("policy", ["process", "requeue"])
@pytest.mark.parametrize("cut", ["before", "after"])
def test_an_outage_sends_nothing_back_and_what_was_handled_in_it_is_known(
    consumer: Consumer, cut: str, policy: str
) -> None:
    consumer = Consumer(observe=True, on_store_error=policy)
    consumer.gate.cut = cut
    consumer.deliver("a")
    consumer.succeed("a")
    consumer.deliver("b")
    consumer.succeed("b")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("run", "b"), ("FIN", "b")]
    assert consumer.events.observed == 1
    assert consumer.events.outages == 1
    consumer.gate.cut = None
    consumer.wait(2)
    other = seen_by(consumer)
    other.deliver("c")
    assert other.did() == [("FIN unrun", "c")]
