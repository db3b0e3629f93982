"""Handlers that succeed in one go have no claim, and nobody can tell."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from harness import MSG_TIMEOUT, Consumer, Copy, fingerprint_of, jittered

from nsqdedupe.delivery import Delivery, Outcome, State
from nsqdedupe.store import IS_DONE, Claim
from nsqdedupe.stores.embedded import EmbeddedStore, MemoryStore
from nsqdedupe.testing import ManualClock


class Short(Consumer):
    """A consumer of a store in its process."""

    def __init__(self, clock: ManualClock | None = None, store: MemoryStore | None = None, **options: Any) -> None:
        clock = clock or ManualClock()
        self.store = store or MemoryStore(slots=1 << 12, clock=clock)
        super().__init__(clock, self.store, direct=True, **options)
        self.on_run = lambda delivery: True

    def beside(self, **options: Any) -> Short:
        """Another reader of the same process on the same store."""
        return Short(self.clock, self.store, **options)


@pytest.fixture(params=[True, False], ids=["in one loop", "one by one"])
def consumer(request: pytest.FixtureRequest) -> Short:
    consumer = Short()
    consumer.runs_on = request.param
    return consumer


def test_a_success_is_recorded_and_answered_and_never_had_a_claim(consumer: Short) -> None:
    kept: list[int] = []
    consumer.on_run = lambda delivery: kept.append(consumer.store.kept()) is None
    consumer.deliver("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert kept == [0]
    assert consumer.store.table.contains(fingerprint_of("m"))
    assert consumer.counts() == {"received": 1, "handled": 1}
    assert consumer.is_idle()


def test_a_copy_of_what_is_done_is_finished_when_it_comes(consumer: Short) -> None:
    consumer.deliver("a")
    consumer.take("b")
    assert consumer.did()[2:] == [("FIN unrun", "b")]
    assert consumer.counts() == {"received": 2, "handled": 1, "duplicates": 1}


def test_copies_that_wait_for_their_turn_together_are_handled_once(consumer: Short) -> None:
    consumer.take("1/a", "2/a")
    consumer.take("1/b", "2/b")
    consumer.work()
    did = consumer.did()
    assert did[:4] == [("run", "1/a"), ("FIN", "1/a"), ("run", "2/a"), ("FIN", "2/a")]
    assert sorted(did[4:]) == [("FIN unrun", "1/b"), ("FIN unrun", "2/b")]
    assert consumer.counts() == {"received": 4, "handled": 2, "duplicates": 2}


def test_what_is_recorded_by_another_reader_meanwhile_is_not_run_again(consumer: Short) -> None:
    other = consumer.beside()
    consumer.take("1/a", "2/a")
    other.deliver("1/b")
    consumer.work()
    assert consumer.did() == [("FIN unrun", "1/a"), ("run", "2/a"), ("FIN", "2/a")]


def test_what_is_recorded_by_hand_meanwhile_is_not_run_again(consumer: Short) -> None:
    consumer.take("a")
    consumer.store.confirm([Claim(fingerprint_of("m"), b"x", bytes(16), 1.0)])
    consumer.work()
    assert consumer.did() == [("FIN unrun", "a")]


def test_copies_in_one_batch_are_handled_once(consumer: Short) -> None:
    consumer.take("1/a", "2/a", "1/A", "3/a", "2/A")
    for _ in range(10):
        consumer.work(until=-1.0)  # one at a time
    assert [note for note in consumer.did() if note[0] == "run"] == [("run", "1/a"), ("run", "2/a"), ("run", "3/a")]
    assert consumer.counts() == {"received": 5, "handled": 3, "duplicates": 2}
    assert consumer.is_idle()


def test_what_the_slice_leaves_is_run_in_the_next_one(consumer: Short) -> None:
    consumer.take("1/a", "2/a", "3/a")
    assert consumer.work(until=-1.0)
    assert consumer.did() == [("run", "1/a"), ("FIN", "1/a")]
    consumer.beside().deliver("2/b")
    assert not consumer.work()
    assert consumer.did() == [("FIN unrun", "2/a"), ("run", "3/a"), ("FIN", "3/a")]


def test_many_are_run_in_one_loop_and_go_on_in_another_after_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Short()
    loops: list[int] = []
    run_on = consumer.run_on
    monkeypatch.setattr(consumer, "run_on", lambda *args: (loops.append(args[1]), run_on(*args))[1])

    def run(delivery: Delivery) -> bool:
        assert isinstance(delivery, Copy)
        if delivery.name not in ("10/a", "12/a"):
            return True
        consumer.deduper.answer(delivery, Outcome.FAILED)
        return False

    consumer.on_run = run
    consumer.deliver(*(f"{number}/a" for number in range(1, 21)))
    assert loops == [20, 10]  # not a third one for what comes after the second failure, which came soon
    assert consumer.counts() == {"received": 20, "handled": 18, "failed": 2}


def test_a_message_that_is_known_here_already_leads_all_to_the_long_way(consumer: Short) -> None:
    consumer.on_run = lambda delivery: False
    consumer.deliver("1/a")
    consumer.on_run = lambda delivery: True
    consumer.deliver("1/b", "2/b")
    assert consumer.held == ["1/b"]
    other = consumer.beside()
    other.deliver("1/c", "3/c")
    assert other.deliveries["1/c"].state is State.WAITING
    assert other.did() == [("run", "3/c"), ("FIN", "3/c")]
    consumer.succeed("1/a")
    assert consumer.did()[-2:] == [("FIN", "1/a"), ("FIN unrun", "1/b")]


def test_a_handler_finds_all_that_came_before_it_in_the_counters(consumer: Short) -> None:
    counts: list[dict[str, int]] = []
    consumer.on_run = lambda delivery: counts.append(consumer.counts()) is None
    consumer.deliver("1/a", "2/a", "3/a")
    assert [count.get("handled", 0) for count in counts] == [0, 1, 2]
    assert [count["in_flight"] for count in counts] == [3, 2, 1]
    assert consumer.counts() == {"received": 3, "handled": 3}


# -- those that do not succeed in one go ---------------------------------------------------------


def test_who_goes_on_has_a_claim_when_its_handler_returns(consumer: Short) -> None:
    consumer.on_run = lambda delivery: False
    consumer.deliver("a")
    other = consumer.beside()
    other.deliver("b")
    assert other.did() == []
    assert other.deliveries["b"].state is State.WAITING
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    other.poll()
    assert other.did() == [("FIN unrun", "b")]
    assert consumer.store.kept() == 0


def test_a_copy_of_one_that_goes_on_stands_by_and_shares_its_outcome(consumer: Short) -> None:
    consumer.on_run = lambda delivery: False
    consumer.deliver("a")
    consumer.deliver("b")
    assert consumer.held == ["b"]
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]


def test_a_failure_is_held_and_counts_a_try(consumer: Short) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.FAILED)
    consumer.deliver("a")
    assert consumer.did() == [("run", "a"), ("REQ", "a", 90.0)]
    consumer.deliver("b")
    assert consumer.did() == [("REQ unrun", "b", jittered(91.0))]
    tries: list[int] = []
    consumer.on_run = lambda delivery: tries.append(delivery.tries) is None
    consumer.wait(90.0)
    consumer.deliver("a2")
    assert tries == [1]


def test_answers_keep_their_order(consumer: Short) -> None:
    def run(delivery: Delivery) -> bool:
        assert isinstance(delivery, Copy)
        if delivery.name != "2/a":
            return True
        consumer.deduper.answer(delivery, Outcome.FAILED)
        return False

    consumer.on_run = run
    consumer.deliver("1/a", "2/a", "3/a")
    assert [note[:2] for note in consumer.did() if note[0] != "run"] == [("FIN", "1/a"), ("REQ", "2/a"), ("FIN", "3/a")]


def test_a_handler_that_answers_by_itself_is_recorded_too(consumer: Short) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.HANDLED)
    consumer.deliver("a", "b")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]
    assert consumer.store.kept() == 0


def test_an_answer_that_came_before_is_carried_out_before_what_comes_now_is_looked_up(consumer: Short) -> None:
    consumer.on_run = lambda delivery: False
    consumer.deliver("a")
    consumer.deduper.answer(consumer.deliveries["a"], Outcome.HANDLED)
    consumer.take("b")
    assert consumer.did() == [("run", "a"), ("FIN", "a"), ("FIN unrun", "b")]


def test_a_claim_that_waits_long_for_its_turn_is_extended(consumer: Short) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.FAILED)
    consumer.deliver("a")
    consumer.wait(90.0)
    consumer.on_run = lambda delivery: True
    consumer.take("a2", "n/a")
    consumer.work(until=-1.0)  # claimed, and not started
    consumer.clock.advance(40.0)
    consumer.beside().deliver("n/b")
    consumer.did()
    consumer.work()
    assert sorted(consumer.did()) == [("FIN", "a2"), ("FIN unrun", "n/a"), ("run", "a2")]
    assert consumer.events.late_confirms == 0


# -- time, connections, trouble ------------------------------------------------------------------


def test_who_waited_until_nsqd_gives_it_out_again_is_not_run(consumer: Short) -> None:
    consumer.take("a", waited=MSG_TIMEOUT)
    consumer.work()
    assert consumer.did() == [("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}


def test_who_waited_as_long_for_a_message_that_is_held_goes_back_for_the_rest_of_the_hold(consumer: Short) -> None:
    consumer.on_run = lambda delivery: consumer.deduper.answer(delivery, Outcome.FAILED)
    consumer.deliver("a")
    consumer.did()
    consumer.deliver("a2", waited=MSG_TIMEOUT)
    assert consumer.did() == [("REQ unrun", "a2", jittered(91.0))]


def test_what_waits_when_its_connection_is_lost_is_let_go(consumer: Short) -> None:
    consumer.take("1/a", "2/b")
    consumer.lose("a")
    consumer.work()
    assert consumer.did() == [("abandon", "1/a"), ("run", "2/b"), ("FIN", "2/b")]


def test_what_came_together_is_let_go_when_its_connection_is_lost(consumer: Short) -> None:
    consumer.take("1/a", "2/a")
    consumer.lose("a")
    consumer.work()
    assert consumer.did() == [("abandon", "1/a"), ("abandon", "2/a")]
    assert consumer.counts() == {"received": 2, "unanswered": 2}


def test_what_waits_is_let_go_when_a_handler_loses_its_connection(consumer: Short) -> None:
    def run(delivery: Delivery) -> bool:
        assert isinstance(delivery, Copy)
        if delivery.name == "2/a":
            consumer.lose("a")
        return True

    consumer.on_run = run
    consumer.deliver("1/a", "2/a", "3/a")
    assert consumer.did() == [
        *(("run", "1/a"), ("FIN", "1/a"), ("run", "2/a")),
        *(("abandon", "3/a"), ("abandon", "2/a")),
    ]
    assert consumer.counts() == {"received": 3, "handled": 1, "unanswered": 2}
    consumer.deliver("2/b", "3/b")
    assert sorted(consumer.did()) == [("FIN", "3/b"), ("FIN unrun", "2/b"), ("run", "3/b")]


def test_a_handler_that_ends_the_program_is_counted_and_what_waits_goes_on(consumer: Short) -> None:
    def run(delivery: Delivery) -> bool:
        assert isinstance(delivery, Copy)
        if delivery.name != "2/a":
            return True
        consumer.deduper.answer(delivery, Outcome.CANCELLED)
        raise KeyboardInterrupt

    consumer.on_run = run
    consumer.take("1/a", "2/a", "3/a")
    with pytest.raises(KeyboardInterrupt):
        consumer.work()
    did = [note[:2] for note in consumer.did()]
    assert did == [("run", "1/a"), ("FIN", "1/a"), ("run", "2/a"), ("REQ unrun", "2/a")]
    consumer.work()
    assert consumer.did() == [("run", "3/a"), ("FIN", "3/a")]
    assert consumer.counts() == {"received": 3, "handled": 2, "failed": 1}


def test_a_success_whose_handler_lost_its_connection_is_recorded_and_not_answered(consumer: Short) -> None:
    consumer.on_run = lambda delivery: consumer.lose("a") is None
    consumer.deliver("a")
    assert consumer.did() == [("run", "a"), ("abandon", "a")]
    assert consumer.counts() == {"received": 1, "unanswered": 1}
    consumer.deliver("b")
    assert consumer.did() == [("FIN unrun", "b")]


def test_what_has_no_key_is_run_unprotected_beside_the_others(consumer: Short) -> None:
    copies = consumer.copies("1/a", "2/a", "3/a")
    copies[1].fingerprint = None
    consumer.deduper.take(copies)
    consumer.work()
    consumer.deliver("3/a2")
    assert [note for note in consumer.did() if note[0] == "run"] == [("run", "1/a"), ("run", "3/a"), ("run", "2/a")]
    assert consumer.events.unprotected == 1
    assert consumer.counts() == {"received": 4, "handled": 3, "duplicates": 1}


def test_what_has_no_key_may_join_what_waits(consumer: Short) -> None:
    consumer.take("1/a", "2/a")
    copies = consumer.copies("3/a", "1/A")
    copies[0].fingerprint = None
    consumer.deduper.take(copies)
    consumer.work()
    assert consumer.counts() == {"received": 4, "handled": 3, "duplicates": 1}
    assert consumer.events.unprotected == 1


@pytest.mark.parametrize("when", ["before", "waiting", "running"])
def test_a_store_that_is_closed_loses_nothing(consumer: Short, when: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(delivery: Delivery) -> bool:
        if when == "running":
            consumer.store.close()
        return True

    consumer.on_run = run
    if when == "before":
        consumer.store.close()
    consumer.take("1/a", "2/a")
    if when == "waiting":
        consumer.store.close()
    with caplog.at_level(logging.WARNING):
        consumer.work()
        consumer.work()
    assert sorted(consumer.did(), key=str) == [
        *(("FIN", "1/a"), ("FIN", "2/a")),
        *(("run", "1/a"), ("run", "2/a")),
    ]
    assert consumer.events.outages == 1


# -- who has it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["claim", "confirm", "release", "extend", "start"])
def test_a_store_with_verbs_of_its_own_has_no_shortcut(verb: str) -> None:
    own = type("Own", (MemoryStore,), {verb: lambda *_: []})
    assert MemoryStore(slots=64).direct is not None
    assert own(slots=64).direct is None
    assert EmbeddedStore(MemoryStore(slots=64).table).direct is None


def test_looking_on_takes_no_shortcut() -> None:
    consumer = Short(observe=True)
    consumer.deliver("a", "b")
    assert sorted(consumer.did()) == [("FIN", "a"), ("FIN", "b"), ("run", "a"), ("run", "b")]
    assert consumer.events.observed == 1


def test_claims_that_nobody_came_back_for_are_swept_up() -> None:
    consumer = Short()
    consumer.on_run = lambda delivery: False
    consumer.deliver("1/a")
    consumer.clock.advance(20_000.0)
    consumer.deliver("2/a")
    assert consumer.store.kept() == 1


# -- before there are messages -------------------------------------------------------------------


def test_copies_of_what_is_done_are_told_before_they_are_messages(consumer: Short) -> None:
    consumer.deliver("1/a")
    source = consumer.source("b")
    places = consumer.deduper.sift(source, [fingerprint_of("1"), fingerprint_of("2")])
    assert places is not None
    assert places[0] == IS_DONE != places[1]
    (new,) = consumer.copies("2/b")
    new.place = places[1]
    consumer.deduper.take([new], sifted=True)
    consumer.work()
    assert consumer.did()[2:] == [("run", "2/b"), ("FIN", "2/b")]
    assert consumer.counts() == {"received": 3, "handled": 2, "duplicates": 1}


def test_nothing_can_be_told_of_a_store_that_does_not_answer_or_has_no_shortcut(consumer: Short) -> None:
    plain = Consumer()
    assert plain.deduper.sift(plain.source("a"), [fingerprint_of("1")]) is None
    consumer.store.close()
    assert consumer.deduper.sift(consumer.source("a"), [fingerprint_of("1")]) is None
    assert consumer.counts() == {}


def test_what_was_handled_is_answered_when_its_reader_is_closed_by_a_later_handler(consumer: Short) -> None:
    def run(delivery: Delivery) -> bool:
        assert isinstance(delivery, Copy)
        if delivery.name == "3/a":
            consumer.deduper.settle()  # what a reader does first when it is closed
            assert consumer.did()[-3:] == [("run", "2/a"), ("FIN", "2/a"), ("run", "3/a")]
        return True

    consumer.on_run = run
    consumer.deliver("1/a", "2/a", "3/a")
    assert consumer.did() == [("FIN", "3/a")]
