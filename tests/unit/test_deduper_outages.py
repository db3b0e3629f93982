"""What happens while the store is out of reach, and when it is back."""

from __future__ import annotations

import pytest
from harness import LEASE, MSG_TIMEOUT, Between, Consumer, jittered

from nsqdedupe.delivery import Outcome, State
from nsqdedupe.ledger import UNCONFIRMED_SECONDS


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# -- claims --------------------------------------------------------------------------------------


def test_a_message_that_cannot_be_claimed_is_handled_all_the_same(consumer: Consumer) -> None:
    consumer.gate.cut = "before"
    consumer.deliver("a", "b")
    assert consumer.did() == [("run", "a")]
    assert consumer.events.unprotected == 1
    assert consumer.events.store_errors == 1
    consumer.succeed("a")
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "b")]
    assert consumer.counts() == {"received": 2, "handled": 1, "duplicates": 1}


def test_a_message_that_cannot_be_claimed_goes_back_if_the_user_chose_so() -> None:
    consumer = Consumer(on_store_error="requeue")
    consumer.gate.cut = "before"
    consumer.deliver("a", "A", "n/a")
    back = jittered(5.0)
    assert consumer.did() == [("REQ unrun", "A", back), ("REQ unrun", "a", back), ("REQ unrun", "n/a", back)]
    assert consumer.counts() == {"received": 3, "deferred": 3}
    assert consumer.events.unprotected == 0
    assert consumer.is_idle()


def test_an_outage_costs_no_try() -> None:
    consumer = Consumer(on_store_error="requeue", max_tries=1)
    consumer.gate.cut = "before"
    for attempt in range(10):
        consumer.deliver(f"a{attempt + 1}")
    consumer.gate.cut = None
    consumer.deliver("a11")
    assert consumer.did()[-1] == ("run", "a11")


def test_a_claim_whose_reply_was_lost_is_the_same_process_own_when_the_copy_comes_again() -> None:
    consumer = Consumer(on_store_error="requeue")
    consumer.gate.cut = "after"
    consumer.deliver("a")
    consumer.gate.cut = None
    consumer.clock.advance(5.0)
    consumer.deliver("a2")
    assert consumer.did()[-1] == ("run", "a2")


def test_a_claim_whose_reply_was_lost_holds_other_copies_until_its_lease_ends() -> None:
    consumer = Consumer(on_store_error="requeue")
    consumer.gate.cut = "after"
    consumer.deliver("a")
    consumer.gate.cut = None
    consumer.clock.advance(40.0)
    consumer.deliver("b")
    assert consumer.deliveries["b"].state is State.WAITING
    consumer.clock.advance(LEASE - 40.0)
    consumer.work()
    assert consumer.did()[-1] == ("run", "b")


def test_an_unclaimed_run_counts_its_failure_only_if_its_claim_took_effect(consumer: Consumer) -> None:
    for name, cut, tries in (("0/a", "before", 0), ("1/a", "after", 1)):
        consumer.gate.cut = cut
        consumer.deliver(name)
        consumer.gate.cut = None
        consumer.fail(name, delay=0.0)
        consumer.deliver(f"{name}2")
        assert consumer.deliveries[f"{name}2"].tries == tries


def test_an_unclaimed_run_is_not_counted_as_late(consumer: Consumer) -> None:
    consumer.gate.cut = "before"
    consumer.deliver("a")
    consumer.gate.cut = None
    consumer.succeed("a")
    assert consumer.events.late_confirms == 0
    consumer.deliver("b")
    assert consumer.did()[-1] == ("FIN unrun", "b")


def test_an_unclaimed_run_waits_for_nobody_to_extend_it(consumer: Consumer) -> None:
    consumer.gate.cut = "before"
    consumer.take("a")
    consumer.clock.advance(LEASE / 2 + 1)
    consumer.gate.asked()
    consumer.work()
    assert consumer.did() == [("run", "a")]
    assert consumer.gate.asked() == []


def test_an_unclaimed_handler_that_never_answers_is_let_go_when_a_lease_would_end(consumer: Consumer) -> None:
    consumer.gate.cut = "before"
    consumer.deliver("a")
    consumer.wait(LEASE - 1)
    assert consumer.did() == [("run", "a")]
    consumer.wait(1.0)
    assert consumer.did() == [("abandon", "a")]
    assert consumer.is_idle()


def test_touch_keeps_an_unclaimed_message_too(consumer: Consumer) -> None:
    consumer.gate.cut = "before"
    consumer.deliver("a")
    for _ in range(3):
        consumer.wait(LEASE - 1)
        consumer.deduper.touch(consumer.deliveries["a"])
    consumer.deliver("b")
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]


def test_a_coroutine_keeps_an_unclaimed_message_and_the_claim_if_there_is_one(consumer: Consumer) -> None:
    other = consumer.beside()
    consumer.gate.cut = "after"
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    consumer.gate.cut = None
    consumer.wait(LEASE + 30.0)
    other.deliver("b")
    assert other.did() == []
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]


def test_a_message_is_never_given_up_unclaimed() -> None:
    consumer = Consumer(max_tries=1)
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.gate.cut = "before"
    consumer.deliver("a2000")
    assert consumer.did()[-1] == ("run", "a2000")


# -- polls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["process", "requeue"])
def test_a_copy_that_waits_goes_on_waiting_during_an_outage(policy: str) -> None:
    consumer = Consumer(on_store_error=policy)
    other = consumer.beside()
    other.deliver("b")
    consumer.deliver("a")
    consumer.gate.cut = "before"
    pauses = [consumer.poll() for _ in range(5)]
    assert consumer.did() == []
    # Ever more slowly: it does not hammer a store that is down.
    assert pauses == [Between(0.8 * pause, 1.2 * pause + 1e-6) for pause in (0.025, 0.05, 0.1, 0.2, 0.4)]
    other.succeed("b")
    consumer.gate.cut = None
    consumer.poll()
    assert consumer.did() == [("FIN unrun", "a")]


def test_a_poll_whose_reply_was_lost_finds_its_own_claim(consumer: Consumer) -> None:
    other = consumer.beside()
    other.deliver("b")
    consumer.deliver("a")
    other.answer("b", Outcome.CANCELLED)
    consumer.gate.cut = "after"
    consumer.poll()
    consumer.gate.cut = None
    consumer.poll()
    assert consumer.did() == [("run", "a")]


def test_a_copy_that_waits_through_an_outage_goes_back_in_time(consumer: Consumer) -> None:
    other = consumer.beside()
    other.deliver("b")
    consumer.deliver("a")
    consumer.gate.cut = "before"
    consumer.wait(MSG_TIMEOUT / 2 + 1)
    assert consumer.did() == [("REQ unrun", "a", jittered(LEASE - 31.0 + 1.0))]
    assert consumer.is_idle()


# -- extends -------------------------------------------------------------------------------------


def test_the_lease_of_a_running_coroutine_is_extended_as_soon_as_the_store_is_back(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.deliveries["a"].runs_since = consumer.clock()
    consumer.wait(30.0)
    consumer.gate.cut = "before"
    consumer.wait(10.0)
    consumer.gate.cut = None
    consumer.wait(LEASE - 40.0)
    other = consumer.beside()
    other.deliver("b")
    assert other.did() == []


def test_a_lease_that_cannot_be_extended_before_the_start_is_taken_to_be_ours(consumer: Consumer) -> None:
    consumer.take("a")
    consumer.clock.advance(LEASE / 2 + 1)
    consumer.gate.cut = "before"
    consumer.work()
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]


@pytest.mark.parametrize("policy", ["process", "requeue"])
def test_a_claim_that_was_lost_when_the_store_goes_is_treated_as_a_new_one(policy: str) -> None:
    consumer = Consumer(on_store_error=policy)
    consumer.take("a")
    consumer.clock.advance(LEASE / 2 + 1)
    consumer.gate.store.forget([copy.fingerprint for copy in consumer.deliveries.values() if copy.fingerprint])

    def cut_at_the_claim(verb: str) -> None:
        consumer.gate.cut = "before" if verb == "claim" else None

    consumer.gate.listener = cut_at_the_claim
    consumer.work()
    consumer.work()
    assert consumer.did() == ([("run", "a")] if policy == "process" else [("REQ unrun", "a", jittered(5.0))])


# -- releases ------------------------------------------------------------------------------------


def test_a_message_goes_back_although_its_claim_cannot_be_released(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.gate.cut = "before"
    consumer.fail("a")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 90.0), ("REQ unrun", "b", jittered(91.0))]
    assert consumer.is_idle()
    consumer.gate.cut = None
    consumer.clock.advance(LEASE)
    consumer.deliver("c")
    assert consumer.did() == [("run", "c")]


# -- confirms ------------------------------------------------------------------------------------


def test_a_success_that_cannot_be_confirmed_is_finished_and_answers_here_as_done(consumer: Consumer) -> None:
    consumer.deliver("a", "b")
    consumer.gate.cut = "before"
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]
    consumer.gate.asked()
    consumer.deliver("a2")
    consumer.gate.cut = None
    consumer.deliver("c")
    assert consumer.did() == [("FIN unrun", "a2"), ("FIN unrun", "c")]
    assert consumer.gate.asked() == []


def test_a_success_is_confirmed_when_the_store_is_back(consumer: Consumer) -> None:
    other = consumer.beside()
    consumer.deliver("a")
    consumer.gate.cut = "before"
    consumer.succeed("a")
    consumer.gate.cut = None
    consumer.wait(1.0)
    other.deliver("b")
    assert other.did() == [("FIN unrun", "b")]
    consumer.gate.asked()
    consumer.wait(10.0)
    assert consumer.gate.asked() == []


def test_a_given_up_message_that_cannot_be_confirmed_is_not_handled_here_again() -> None:
    consumer = Consumer(max_tries=1)
    consumer.deliver("a")
    consumer.fail("a", delay=0.0)
    consumer.on_give_up = lambda delivery: None
    consumer.deliver("a2")
    consumer.gate.cut = "before"
    consumer.answer("a2", Outcome.GIVEN_UP)
    consumer.deliver("b")
    assert consumer.did()[-2:] == [("FIN", "a2"), ("FIN unrun", "b")]


def test_what_could_not_be_confirmed_is_kept_for_ten_minutes(consumer: Consumer) -> None:
    consumer.deliver("a")
    consumer.gate.cut = "before"
    consumer.succeed("a")
    consumer.wait(UNCONFIRMED_SECONDS - 1, step=10.0)
    consumer.deliver("b")
    assert consumer.did()[-1] == ("FIN unrun", "b")
    consumer.wait(1.0)
    consumer.deliver("c")
    assert consumer.did()[-1] == ("run", "c")


def test_nothing_stays_when_the_store_is_away_and_comes_back(consumer: Consumer) -> None:
    for cut in ("before", "after"):
        consumer.gate.cut = cut
        for number, outcome in enumerate(Outcome):
            consumer.deliver(f"{cut}{number}/a", f"{cut}{number}/b")
            consumer.answer(f"{cut}{number}/a", outcome)
        consumer.gate.cut = None
        consumer.wait(LEASE)
    consumer.work()
    for copy in list(consumer.deliveries.values()):
        if copy.state is State.RUNNING:
            consumer.succeed(copy.name)
    assert consumer.is_idle()
    assert "in_flight" not in consumer.counts()
