"""What becomes of copies that come while another copy of their message is being handled in another process."""

from __future__ import annotations

import pytest
from harness import LEASE, MSG_TIMEOUT, Between, Consumer, jittered

from nsqdedupe.delivery import Outcome, State


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def other(consumer: Consumer) -> Consumer:
    return consumer.beside()


def test_a_copy_whose_owner_is_elsewhere_asks_ever_more_slowly(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.deliver("a")
    pauses = []
    for _ in range(8):
        other.deduper.touch(other.deliveries["b"])
        pauses.append(consumer.poll())
    assert consumer.did() == []
    expected = [0.025 * 2**doubled for doubled in range(8)]
    assert pauses == [Between(0.8 * pause, 1.2 * pause + 1e-6) for pause in expected]
    assert consumer.gate.asked() == [("claim", 1)] * 9


def test_a_copy_whose_owner_is_elsewhere_asks_at_least_every_ten_seconds() -> None:
    consumer = Consumer(msg_timeout=600.0)
    other = consumer.beside(msg_timeout=600.0)
    other.deliver("b")
    consumer.deliver("a")
    pauses = [consumer.poll() for _ in range(20)]
    assert pauses[-5:] == [Between(8.0, 12.0)] * 5


def test_a_copy_asks_soon_after_its_owners_lease_ends() -> None:
    for _ in range(20):
        consumer = Consumer(msg_timeout=600.0)
        other = consumer.beside(msg_timeout=30.0)
        other.deliver("b")
        end = consumer.clock() + 32.0
        consumer.deliver("a")
        while not consumer.did():
            consumer.poll()
        # At most a second late, and jitter on a pause of ten.
        assert end <= consumer.clock() <= end + 3.5
        assert consumer.deliveries["a"].state is State.RUNNING


def test_a_copy_is_finished_when_its_owner_elsewhere_succeeded(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.deliver("a", "c")
    other.succeed("b")
    consumer.poll()
    assert consumer.did() == [("FIN unrun", "c"), ("FIN unrun", "a")]
    assert consumer.counts() == {"received": 2, "duplicates": 2}
    assert consumer.events.standbys == 2
    assert consumer.is_idle()


def test_copies_of_several_messages_that_are_done_elsewhere_are_all_finished(
    consumer: Consumer, other: Consumer
) -> None:
    other.deliver("0/b", "1/b")
    consumer.deliver("0/a", "1/a", "0/c", "1/c")
    other.succeed("0/b", "1/b")
    consumer.wait(2)
    assert sorted(consumer.did()) == [("FIN unrun", name) for name in ("0/a", "0/c", "1/a", "1/c")]
    assert consumer.is_idle()


def test_two_that_take_over_are_two_takeovers(consumer: Consumer, other: Consumer) -> None:
    other.deliver("0/b", "1/b")
    consumer.deliver("0/a", "1/a")
    other.answer("0/b", Outcome.CANCELLED)
    other.answer("1/b", Outcome.CANCELLED)
    consumer.wait(2)
    assert sorted(consumer.did()) == [("run", "0/a"), ("run", "1/a")]
    assert consumer.events.takeovers == 2


def test_a_copy_takes_over_when_its_owner_elsewhere_is_cancelled(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.deliver("a")
    other.answer("b", Outcome.CANCELLED)
    consumer.poll()
    assert consumer.did() == [("run", "a")]
    assert consumer.events.takeovers == 1
    assert consumer.deduper.next_poll() is None


def test_a_copy_goes_back_when_its_owner_elsewhere_failed(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.deliver("a", "c")
    other.fail("b")
    pause = consumer.poll()
    rest = jittered(90.0 - pause + 1.0)
    assert consumer.did() == [("REQ unrun", "c", rest), ("REQ unrun", "a", rest)]
    assert consumer.counts() == {"received": 2, "deferred": 2}
    assert consumer.is_idle()


def test_a_copy_that_was_waiting_does_not_end_the_hold_of_its_own_failure_elsewhere(
    consumer: Consumer, other: Consumer
) -> None:
    # nsqd gave the copy out again, to another process, and then the first one failed.
    other.deliver("a")
    consumer.deliver("a2")
    other.fail("a")
    pause = consumer.poll()
    assert consumer.did() == [("REQ unrun", "a2", jittered(90.0 - pause + 1.0))]


def test_all_that_are_due_ask_in_one_call(consumer: Consumer, other: Consumer) -> None:
    other.deliver("0/b", "1/b", "2/b")
    consumer.deliver("0/a", "1/a", "2/a")
    consumer.gate.asked()
    consumer.clock.advance(0.1)
    consumer.work()
    assert consumer.gate.asked() == [("claim", 3)]


def test_copies_that_came_one_after_the_other_ask_together(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 20
    for number in range(20):
        other.deliver(f"{number}/b")
        consumer.deliver(f"{number}/a")
        consumer.clock.advance(0.0003)
    consumer.gate.asked()
    asked: list[int] = []
    while sum(asked) < 20:
        consumer.poll()
        asked += [size for _, size in consumer.gate.asked()]
    assert len(asked) < 10


def test_a_copy_whose_owner_is_elsewhere_goes_back_when_half_its_timeout_is_over(
    consumer: Consumer, other: Consumer
) -> None:
    other.deliver("b")
    consumer.deliver("a", "c")
    consumer.wait(MSG_TIMEOUT / 2)
    assert consumer.did() == []
    consumer.wait(1.0)
    rest = jittered(LEASE - 31.0 + 1.0)
    assert consumer.did() == [("REQ unrun", "c", rest), ("REQ unrun", "a", rest)]
    assert consumer.is_idle()


def test_a_copy_that_waits_knows_of_a_takeover_elsewhere(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.clock.advance(50.0)
    consumer.deliver("a")
    third = consumer.beside()
    other.answer("b", Outcome.CANCELLED)
    third.deliver("c")
    consumer.wait(31.0)
    # The third process holds it since second 50, and it is 81 now.
    assert consumer.did() == [("REQ unrun", "a", jittered(50.0 + LEASE - 81.0 + 1.0))]


def test_waiting_copies_are_capped_so_that_they_never_starve_new_work(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 2
    other.deliver("0/b", "1/b", "2/b")
    consumer.deliver("0/a", "1/a", "2/a", "3/a")
    assert consumer.did() == [("REQ unrun", "2/a", jittered(1.0)), ("run", "3/a")]
    assert consumer.held == ["0/a", "1/a"]
    assert consumer.counts() == {"received": 4, "deferred": 1, "in_flight": 3}
    assert consumer.events.standbys == 2


def test_a_copy_that_would_wait_beside_a_waiting_one_counts_in_the_cap(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 2
    other.deliver("b")
    consumer.deliver("a")
    consumer.deliver("c")
    consumer.deliver("d")
    assert consumer.did() == [("REQ unrun", "d", jittered(1.0))]
    assert consumer.events.standbys == 2


def test_over_the_cap_a_whole_group_goes_back(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 0
    other.deliver("b")
    consumer.deliver("a", "A")
    assert consumer.did() == [("REQ unrun", "A", jittered(1.0)), ("REQ unrun", "a", jittered(1.0))]
    assert consumer.is_idle()


def test_a_group_that_is_over_makes_room_for_as_many_copies_as_it_had(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 3
    other.deliver(*(f"{number}/c" for number in range(5)))
    consumer.deliver("0/a", "0/b", "1/a", "2/a")
    assert consumer.did() == [("REQ unrun", "2/a", jittered(1.0))]
    other.succeed("0/c")
    consumer.wait(2.0)
    assert consumer.did() == [("FIN unrun", "0/b"), ("FIN unrun", "0/a")]
    consumer.deliver("3/a", "3/b", "4/a")
    assert consumer.did() == [("REQ unrun", "4/a", jittered(1.0))]


def test_an_heir_counts_in_the_cap_with_all_that_stand_by_it(consumer: Consumer, other: Consumer) -> None:
    consumer.limit = 2
    other.deliver("1/c")
    consumer.take("0/a", "0/b", "0/d")
    consumer.lose("a")
    consumer.did()
    consumer.take("1/b")
    assert consumer.did() == [("REQ unrun", "1/b", jittered(1.0))]


def test_the_cap_does_not_touch_copies_whose_owner_is_here(consumer: Consumer) -> None:
    consumer.limit = 0
    consumer.deliver("a", "b", "c")
    assert consumer.did() == [("run", "a")]
    assert consumer.events.standbys == 2


def test_a_paused_reader_takes_nothing_over(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.deliver("a")
    other.answer("b", Outcome.CANCELLED)
    consumer.stopped = True
    consumer.gate.asked()
    for _ in range(4):
        consumer.poll()
    assert consumer.poll() == pytest.approx(0.25)
    assert consumer.gate.asked() == []
    consumer.stopped = False
    consumer.poll()
    assert consumer.did() == [("run", "a")]


def test_the_same_copy_in_another_process_waits_for_the_lease(consumer: Consumer, other: Consumer) -> None:
    other.deliver("a")
    consumer.clock.advance(40.0)
    consumer.deliver("a2")
    assert consumer.did() == []
    consumer.clock.advance(LEASE - 40.0)
    consumer.work()
    assert consumer.did() == [("run", "a2")]


def test_a_success_elsewhere_after_a_takeover_is_recorded_and_ends_nobodys_claim(
    consumer: Consumer, other: Consumer
) -> None:
    other.deliver("b")
    consumer.clock.advance(40.0)
    consumer.deliver("a")
    consumer.clock.advance(LEASE - 40.0)
    consumer.work()
    other.succeed("b")
    assert other.did() == [("run", "b"), ("FIN", "b")]
    assert other.events.late_confirms == 1
    third = consumer.beside()
    third.deliver("c")
    assert third.did() == [("FIN unrun", "c")]
    consumer.succeed("a")
    assert consumer.did() == [("run", "a"), ("FIN", "a")]
    assert consumer.events.late_confirms == 0


def test_a_failure_elsewhere_after_a_takeover_touches_nothing(consumer: Consumer, other: Consumer) -> None:
    other.deliver("b")
    consumer.clock.advance(40.0)
    consumer.deliver("a")
    consumer.clock.advance(LEASE - 40.0)
    consumer.work()
    other.fail("b")
    assert other.did() == [("run", "b"), ("REQ", "b", 90.0)]
    third = consumer.beside()
    third.deliver("c")
    assert third.did() == []
    consumer.fail("a", delay=0.0)
    third.poll()
    assert third.did() == [("run", "c")]
    assert third.deliveries["c"].tries == 1


def test_an_heir_whose_message_nobody_has_goes_back_for_a_moment_only(consumer: Consumer) -> None:
    consumer.deliver("a", "b", "c")
    consumer.stopped = True
    consumer.answer("a", Outcome.INVALID)
    consumer.deduper.drain()
    assert consumer.did() == [
        *(("run", "a"), ("FIN", "a")),
        *(("REQ unrun", "c", jittered(1.0)), ("REQ unrun", "b", jittered(1.0))),
    ]


def test_a_reader_that_stops_sends_back_who_waits_for_an_owner_elsewhere(consumer: Consumer, other: Consumer) -> None:
    other.deliver("0/b", "1/b")
    consumer.deliver("0/a", "0/c", "1/a", "2/a")
    consumer.deduper.drain()
    rest = jittered(LEASE + 1.0)
    assert consumer.did() == [
        ("run", "2/a"),
        ("REQ unrun", "0/c", rest),
        ("REQ unrun", "0/a", rest),
        ("REQ unrun", "1/a", rest),
    ]
    consumer.succeed("2/a")
    assert consumer.is_idle()
