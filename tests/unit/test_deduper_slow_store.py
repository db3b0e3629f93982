"""A store whose answers take a while: what may happen between a question and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from harness import LEASE, MSG_TIMEOUT, Consumer, SlowCalls, fingerprint_of, jittered

from nsqdedupe.delivery import Outcome, State
from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.store import Answer, Claim


class SlowConsumer(Consumer):
    """A consumer of a store that answers when the test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls = SlowCalls()
        super().__init__(*args, calls=self.calls, **options)

    def serve(self, count: int = 1) -> None:
        """So many calls are answered, and the reader does what it can."""
        self.calls.execute(count)
        self.calls.tell(count)
        self.work()

    def did_to_nsqd(self) -> list[Any]:
        return [note for note in self.did() if note[0] != "looked up"]


@pytest.fixture
def consumer() -> SlowConsumer:
    return SlowConsumer()


def test_a_message_is_run_when_the_store_has_answered(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    assert consumer.did() == []
    consumer.serve()
    assert consumer.did() == [("looked up", "a"), ("run", "a")]


def test_what_comes_together_is_looked_up_together(consumer: SlowConsumer) -> None:
    consumer.gate.store.confirm([Claim(fingerprint_of("2"), b"x", bytes(16), 1.0)])
    consumer.take("1/a", "2/a")
    consumer.serve()
    assert consumer.did() == [("FIN unrun", "2/a"), ("looked up", "1/a"), ("looked up", "2/a"), ("run", "1/a")]


def test_fin_waits_until_the_success_is_recorded(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.serve()
    consumer.succeed("a")
    consumer.calls.execute(1)
    assert ("FIN", "a") not in consumer.did()
    consumer.calls.tell(1)
    assert consumer.did() == [("FIN", "a")]
    assert consumer.is_idle()


def test_copies_that_come_while_a_success_is_recorded_are_finished_with_it(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.serve()
    consumer.succeed("a")
    consumer.deliver("b")
    consumer.did()
    consumer.serve()
    assert consumer.did() == [("FIN", "a"), ("FIN unrun", "b")]
    assert consumer.counts() == {"received": 2, "handled": 1, "duplicates": 1}


def test_req_waits_until_the_claim_is_given_back(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.serve()
    consumer.fail("a")
    assert consumer.did_to_nsqd() == [("run", "a")]
    consumer.serve()
    assert consumer.did() == [("REQ", "a", 90.0)]


def test_answers_of_one_slice_keep_their_order(consumer: SlowConsumer) -> None:
    consumer.take("1/a", "2/a", "3/a")
    consumer.serve()
    consumer.did()
    for name, outcome in (("1/a", Outcome.HANDLED), ("2/a", Outcome.FAILED), ("3/a", Outcome.HANDLED)):
        consumer.deduper.answer(consumer.deliveries[name], outcome)
    consumer.work()
    consumer.serve()  # the successes
    assert consumer.did() == []
    consumer.serve()  # the failure
    assert consumer.did() == [("FIN", "1/a"), ("REQ", "2/a", 90.0), ("FIN", "3/a")]


# -- a connection is lost meanwhile --------------------------------------------------------------


def test_a_claim_of_a_connection_that_is_lost_meanwhile_is_given_back(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.lose("a")
    consumer.serve()
    assert consumer.did() == [("abandon", "a")]
    consumer.serve()
    assert consumer.is_idle()
    assert consumer.kept() == 0
    assert consumer.counts() == {"received": 1, "unanswered": 1}


def test_who_stands_by_it_asks_for_the_message(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.deliver("b")
    consumer.lose("a")
    consumer.serve()
    consumer.calls.finish()
    consumer.work()
    consumer.calls.finish()
    consumer.work()
    assert consumer.did_to_nsqd() == [("abandon", "a"), ("run", "b")]


def test_a_duplicate_of_a_lost_connection_is_not_answered_and_its_standby_is_finished(consumer: SlowConsumer) -> None:
    consumer.gate.store.confirm([Claim(fingerprint_of("m"), b"x", bytes(16), 1.0)])
    consumer.deliver("a")
    consumer.deliver("b")
    consumer.lose("a")
    consumer.serve()
    consumer.serve()
    assert consumer.did_to_nsqd() == [("abandon", "a"), ("FIN unrun", "b")]
    assert consumer.counts() == {"received": 2, "unanswered": 1, "duplicates": 1}


def test_a_success_over_a_connection_that_is_lost_meanwhile_is_recorded_and_not_answered(
    consumer: SlowConsumer,
) -> None:
    consumer.deliver("a")
    consumer.serve()
    consumer.succeed("a")
    consumer.lose("a")
    consumer.serve()
    assert consumer.did_to_nsqd() == [("run", "a"), ("abandon", "a")]
    consumer.deliver("b")
    consumer.serve()
    assert consumer.did_to_nsqd() == [("FIN unrun", "b")]


# -- waiting for an owner elsewhere --------------------------------------------------------------


def waiting_for_another(consumer: SlowConsumer) -> Consumer:
    """A copy here waits for the one that another process handles."""
    other = consumer.beside()
    other.deliver("a")
    consumer.deliver("b")
    consumer.serve()
    assert consumer.deliveries["b"].state is State.WAITING
    consumer.did()
    return other


def test_who_waits_does_not_ask_again_before_it_is_answered(consumer: SlowConsumer) -> None:
    other = waiting_for_another(consumer)
    consumer.gate.asked()
    consumer.wait(5.0)
    assert len(consumer.calls.sent) == 1
    assert consumer.deduper.next_poll() is None
    consumer.serve()
    assert consumer.deduper.next_poll() is not None
    other.succeed("a")
    consumer.poll()
    consumer.serve()
    assert consumer.did() == [("FIN unrun", "b")]


def test_a_message_that_was_sent_back_before_it_was_got_is_given_back(consumer: SlowConsumer) -> None:
    other = waiting_for_another(consumer)
    other.fail("a", delay=0.0)
    consumer.wait(1.0)
    consumer.calls.execute(1)
    consumer.deduper.drain()
    assert consumer.did() == [("REQ unrun", "b", jittered(LEASE))]
    consumer.calls.tell(1)
    consumer.calls.finish()
    other.deliver("a2")
    assert ("run", "a2") in other.did()


def test_who_comes_when_the_reader_is_about_to_stop_does_not_wait(consumer: SlowConsumer) -> None:
    other = consumer.beside()
    other.deliver("a")
    consumer.deliver("b")
    consumer.deduper.drain()
    consumer.serve()
    assert consumer.did_to_nsqd() == [("REQ unrun", "b", jittered(1.0))]
    assert consumer.is_idle()


def test_who_learns_late_that_it_must_wait_goes_back_at_once(consumer: SlowConsumer) -> None:
    other = consumer.beside()
    other.deliver("a")
    consumer.deliver("b")
    consumer.clock.advance(MSG_TIMEOUT / 2 + 1)
    consumer.serve()
    assert consumer.did_to_nsqd() == [("REQ unrun", "b", jittered(LEASE - MSG_TIMEOUT / 2))]


# -- leases --------------------------------------------------------------------------------------


def ready_for_long(consumer: SlowConsumer, *names: str) -> None:
    """These have waited so long for their turn that their leases must be extended."""
    consumer.take(*names)
    consumer.calls.finish()
    consumer.clock.advance(LEASE / 2 + 1)
    consumer.work()
    consumer.did()
    consumer.gate.asked()


def test_who_waited_for_its_turn_goes_on_in_order_when_its_lease_is_extended(consumer: SlowConsumer) -> None:
    ready_for_long(consumer, "1/a", "2/a", "3/a")
    consumer.take("4/a")
    consumer.serve()
    assert consumer.gate.asked() == [("extend", 3)]
    assert consumer.did() == [("run", "1/a"), ("run", "2/a"), ("run", "3/a")]
    consumer.serve()
    assert consumer.did_to_nsqd() == [("run", "4/a")]


def test_who_lost_its_claim_meanwhile_asks_again(consumer: SlowConsumer) -> None:
    ready_for_long(consumer, "1/a", "2/a")
    consumer.gate.store.forget([fingerprint_of("1")])
    consumer.gate.store.confirm([Claim(fingerprint_of("1"), b"x", bytes(16), 1.0)])
    consumer.serve()
    assert consumer.did_to_nsqd() == [("run", "2/a")]
    consumer.serve()
    assert consumer.did() == [("FIN unrun", "1/a")]


def test_who_lost_its_connection_while_its_lease_is_extended_is_let_go(consumer: SlowConsumer) -> None:
    ready_for_long(consumer, "1/a", "2/b")
    consumer.lose("a")
    consumer.serve()
    assert consumer.did_to_nsqd() == [("abandon", "1/a"), ("run", "2/b")]
    consumer.calls.finish()
    assert consumer.counts() == {"received": 2, "unanswered": 1, "in_flight": 1}


def test_an_answer_that_took_too_long_is_of_no_use(consumer: SlowConsumer) -> None:
    consumer.deliver("a")
    consumer.clock.advance(MSG_TIMEOUT)
    consumer.serve()
    assert consumer.did_to_nsqd() == [("abandon", "a")]


# -- half an outage ------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "what"), [("process", ("run", "2/a")), ("requeue", ("REQ unrun", "2/a", 5.0))])
def test_what_one_of_several_servers_does_not_answer(policy: str, what: tuple[Any, ...]) -> None:
    consumer = SlowConsumer(on_store_error=policy)
    claim = consumer.gate.claim

    def half(claims: Sequence[Claim]) -> Sequence[Answer | None]:
        results = [
            answer if name.fingerprint != fingerprint_of("2") else None
            for name, answer in zip(claims, claim(claims), strict=True)
        ]
        raise StoreUnavailable("server 2 is down", results=results)

    consumer.gate.claim = half  # type: ignore[method-assign]
    consumer.take("1/a", "2/a", "3/a")
    consumer.serve()
    did = consumer.did_to_nsqd()
    assert ("run", "1/a") in did
    assert ("run", "3/a") in did
    assert [note[:2] for note in did if note[1] == "2/a"] == [what[:2]]
    assert consumer.events.store_errors == 1
    assert consumer.events.outages == 1
    assert consumer.events.unprotected == (policy == "process")


def test_only_what_was_not_recorded_is_to_be_made_up_for(consumer: SlowConsumer) -> None:
    consumer.take("1/a", "2/a")
    consumer.serve()
    confirm = consumer.gate.confirm

    def half(claims: Sequence[Claim]) -> Sequence[bool]:
        raise StoreUnavailable("server 2 is down", results=[*confirm(claims[:1]), None])

    consumer.gate.confirm = half  # type: ignore[method-assign]
    for name in ("1/a", "2/a"):
        consumer.deduper.answer(consumer.deliveries[name], Outcome.HANDLED)
    consumer.work()
    consumer.serve()
    assert consumer.did_to_nsqd()[-2:] == [("FIN", "1/a"), ("FIN", "2/a")]
    consumer.gate.confirm = confirm  # type: ignore[method-assign]
    consumer.gate.asked()
    consumer.wait(2.0)
    consumer.calls.finish()
    assert consumer.gate.asked() == [("confirm", 1)]
    assert not consumer.deduper.behind


# -- observing -----------------------------------------------------------------------------------


def test_looking_on_waits_for_nothing_and_counts_the_same() -> None:
    consumer = SlowConsumer(observe=True)
    consumer.on_run = lambda delivery: True
    consumer.deliver("a")
    consumer.deliver("b")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("run", "b"), ("FIN", "b")]
    assert consumer.events.observed == 0
    consumer.calls.finish()
    assert consumer.events.observed == 1
    consumer.deliver("A")
    consumer.calls.finish()
    assert consumer.events.observed == 2


# -- runs that leave a trace ---------------------------------------------------------------------


class Traced(SlowConsumer):
    """A consumer whose store keeps traces of runs, as a shared one does."""

    def __init__(self, *args: Any, starts: int = 0, **options: Any) -> None:
        super().__init__(*args, **{"max_crashes": 3, **options})
        self.starts = starts
        self.started: list[Sequence[Claim]] = []
        self.ours = True
        claim = self.gate.claim
        self.gate.claim = lambda claims: [a._replace(starts=self.starts) for a in claim(claims)]  # type: ignore[method-assign]
        self.gate.start = self._start  # type: ignore[method-assign]

    def _start(self, claims: Sequence[Claim]) -> list[bool]:
        self.started.append(claims)
        return [self.ours for _ in claims]


def test_a_first_delivery_leaves_no_trace() -> None:
    consumer = Traced()
    consumer.deliver("a")
    consumer.serve()
    assert ("run", "a") in consumer.did()
    assert consumer.started == []


def test_redeliveries_leave_a_trace_each_before_it_is_run_and_one_after_the_other() -> None:
    consumer = Traced()
    consumer.take("1/a2", "2/a2")
    consumer.serve()
    assert consumer.did_to_nsqd() == []
    consumer.serve()
    assert consumer.did() == [("run", "1/a2")]
    assert len(consumer.started) == 1
    consumer.serve()
    assert consumer.did() == [("run", "2/a2")]


@pytest.mark.parametrize(("starts", "what"), [(2, "run"), (3, "give up"), (4, "give up")])
def test_a_message_that_ended_too_many_processes_is_given_up(starts: int, what: str) -> None:
    consumer = Traced(starts=starts)
    consumer.deliver("b")  # the first delivery of another copy
    consumer.serve(2)
    consumer.serve(2)
    assert (what, "b") in consumer.did()


def test_who_lost_its_message_before_its_trace_was_made_asks_again() -> None:
    consumer = Traced()
    consumer.deliver("a2")
    consumer.serve()
    consumer.ours = False
    consumer.gate.store.confirm([Claim(fingerprint_of("m"), b"x", bytes(16), 1.0)])
    consumer.serve()
    consumer.serve()
    assert consumer.did_to_nsqd() == [("FIN unrun", "a2")]


def test_who_lost_its_connection_meanwhile_is_let_go_and_the_next_has_its_turn() -> None:
    consumer = Traced()
    consumer.take("1/a2", "2/b2")
    consumer.calls.execute(2)
    consumer.calls.tell(2)
    consumer.work()
    consumer.did()
    consumer.lose("a")
    consumer.serve()
    consumer.calls.finish()
    assert consumer.did_to_nsqd() == [("abandon", "1/a2"), ("run", "2/b2")]


def test_without_the_option_nothing_is_traced() -> None:
    consumer = Traced(starts=9, max_crashes=0)
    consumer.deliver("a2")
    consumer.serve()
    assert ("run", "a2") in consumer.did()
    assert consumer.started == []
