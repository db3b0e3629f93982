"""Where nothing is de-duplicated every copy is handled, most of them in one loop."""

from __future__ import annotations

import pytest
from harness import MSG_TIMEOUT, Consumer, Copy

from nsqdedupe.delivery import Delivery, Outcome


@pytest.fixture(params=[True, False], ids=["in one loop", "one by one"])
def consumer(request: pytest.FixtureRequest) -> Consumer:
    consumer = Consumer(unprotected=True)
    consumer.runs_on = request.param
    consumer.on_run = lambda delivery: True
    return consumer


def test_every_copy_is_handled(consumer: Consumer) -> None:
    consumer.deliver("1/a", "2/a", "1/b")
    runs = [note for note in consumer.did() if note[0] == "run"]
    assert runs == [("run", "1/a"), ("run", "2/a"), ("run", "1/b")]
    assert consumer.events.unprotected == 3
    assert consumer.counts() == {"received": 3, "handled": 3}


def test_a_handler_finds_all_that_came_before_it_in_the_counters(consumer: Consumer) -> None:
    counts: list[dict[str, int]] = []
    consumer.on_run = lambda delivery: counts.append(consumer.counts()) is None
    consumer.deliver("1/a", "2/a", "3/a")
    assert [count.get("handled", 0) for count in counts] == [0, 1, 2]
    assert [count["in_flight"] for count in counts] == [3, 2, 1]
    assert consumer.counts() == {"received": 3, "handled": 3}


def test_what_the_slice_leaves_is_run_in_the_next_one(consumer: Consumer) -> None:
    consumer.take("1/a", "2/a", "3/a")
    assert consumer.work(until=-1.0)
    consumer.take("4/a")
    assert not consumer.work()
    assert [note[1] for note in consumer.did() if note[0] == "FIN"] == ["1/a", "2/a", "3/a", "4/a"]
    assert consumer.is_idle()


def test_those_that_go_on_are_answered_later(consumer: Consumer) -> None:
    consumer.on_run = lambda delivery: isinstance(delivery, Copy) and delivery.name != "2/a"
    consumer.deliver("1/a", "2/a", "3/a")
    assert consumer.counts() == {"received": 3, "handled": 2, "in_flight": 1}
    consumer.fail("2/a")
    assert consumer.did()[-1] == ("REQ", "2/a", 90.0)
    assert consumer.counts() == {"received": 3, "handled": 2, "failed": 1}


def test_what_is_never_answered_is_let_go_when_its_lease_would_be_over(consumer: Consumer) -> None:
    consumer.on_run = lambda delivery: False
    consumer.deliver("1/a", "2/a")
    consumer.wait(MSG_TIMEOUT + 5.0)
    assert sorted(consumer.did()[2:]) == [("abandon", "1/a"), ("abandon", "2/a")]


def test_what_nsqd_gave_out_too_often_is_given_up_and_the_rest_is_run(consumer: Consumer) -> None:
    consumer.deliver("1/a5", "2/a6", "3/a")
    assert [note for note in consumer.did() if note[0] != "FIN"] == [
        ("run", "1/a5"),
        ("give up", "2/a6"),
        ("run", "3/a"),
    ]
    assert consumer.counts() == {"received": 3, "handled": 2, "given_up": 1}


def test_handlers_are_told_how_often_nsqd_gave_the_copy_out_before(consumer: Consumer) -> None:
    tries: list[int] = []
    consumer.on_run = lambda delivery: tries.append(delivery.tries) is None
    consumer.deliver("1/a3", "2/a", "3/a2")
    assert tries == [2, 0, 1]


def test_who_may_fail_for_ever_is_never_given_up() -> None:
    consumer = Consumer(unprotected=True, max_tries=0)
    consumer.on_run = lambda delivery: True
    consumer.deliver("1/a900", "2/a")
    assert consumer.counts() == {"received": 2, "handled": 2}


def test_what_waited_too_long_or_whose_connection_is_lost_is_not_run(consumer: Consumer) -> None:
    consumer.deliver("1/a", waited=MSG_TIMEOUT)
    consumer.take("2/b", "3/b")
    consumer.lose("b")
    consumer.work()
    assert consumer.did() == [("abandon", "1/a"), ("abandon", "2/b"), ("abandon", "3/b")]


def test_what_waits_is_let_go_when_a_handler_loses_its_connection(consumer: Consumer) -> None:
    def run(delivery: Delivery) -> bool:
        consumer.lose("a")
        return True

    consumer.on_run = run
    consumer.deliver("1/a", "2/a")
    assert sorted(consumer.did()) == [("abandon", "1/a"), ("abandon", "2/a"), ("run", "1/a")]
    assert consumer.counts() == {"received": 2, "unanswered": 2}


def test_a_handler_that_ends_the_program_leaves_the_rest(consumer: Consumer) -> None:
    def run(delivery: Delivery) -> bool:
        consumer.deduper.answer(delivery, Outcome.CANCELLED)
        raise KeyboardInterrupt

    consumer.on_run = run
    consumer.take("1/a", "2/a")
    with pytest.raises(KeyboardInterrupt):
        consumer.work()
    consumer.on_run = lambda delivery: True
    consumer.work()
    assert consumer.counts() == {"received": 2, "handled": 1, "failed": 1}
