"""Two stores work on one message, in every order in which their commands can reach a real memcached.

Each test is a scene: who does what. Every schedule of it is run; in each the laws of `one_message` are watched, and
in the end a third consumer must be told what is so. Which ends a scene has is written down too, for a scene that
never came to its point would hold any law.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from interleaving import Actor
from one_message import Delivery, Event
from stage import Scene, Stage

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.store import Verdict

NEW, IN_PROGRESS, DONE = Verdict.NEW, Verdict.IN_PROGRESS, Verdict.DONE

ONE_WINS = {(NEW, DONE), (NEW, IN_PROGRESS), (DONE, NEW), (IN_PROGRESS, NEW)}


@pytest.fixture
def stage(memcached: Memcached) -> Iterator[Stage]:
    with contextlib.closing(Stage(memcached)) as stage:
        yield stage


def ask(delivery: Delivery) -> bool:
    """Claim, and once more if another has the message; whether it was let in."""
    return NEW in (delivery.claim(), delivery.verdict is IN_PROGRESS and delivery.claim(poll=True))


def handle_at_once(delivery: Delivery) -> None:
    """Succeed, if the first claim lets it in."""
    if delivery.claim() is NEW:
        delivery.confirm()


def handle(delivery: Delivery) -> None:
    """Succeed, if it is let in."""
    if ask(delivery):
        delivery.confirm()


def fail(delivery: Delivery) -> None:
    """Fail, if it is let in; nobody need wait after that."""
    if ask(delivery):
        delivery.release()


def handle_at_length(delivery: Delivery) -> None:
    """Succeed after an extension, if it is let in."""
    if ask(delivery):
        delivery.extend()
        delivery.confirm()


# -- two claims at once -------------------------------------------------------------------------


def test_of_two_that_claim_at_once_one_is_let_in(stage: Stage) -> None:
    def patient(delivery: Delivery) -> None:
        if ask(delivery) or (delivery.verdict is IN_PROGRESS and delivery.claim(poll=True) is NEW):
            delivery.confirm()

    def cast(scene: Scene) -> list[Actor]:
        return [scene.delivery(client).doing(patient) for client in (0, 1)]

    assert stage.explore(cast, 200) == ONE_WINS


@pytest.mark.parametrize("others", ["none", "some"])
def test_so_it_is_while_another_message_comes_into_the_bucket(stage: Stage, others: str) -> None:
    """Into one that was not there yet, and into one that was: the writes that lose are refused differently."""

    def cast(scene: Scene) -> list[Actor]:
        if others == "some":
            scene.crowd()

        def move() -> None:
            scene.message.moved = True
            scene.crowd(b"\xff")

        deliveries = [scene.delivery(client) for client in (0, 1)]
        meeting = Event("another message is confirmed", move, lambda: not scene.message.done)
        return [*(delivery.doing(handle_at_once) for delivery in deliveries), meeting]

    assert stage.explore(cast, 200) == ONE_WINS


def test_so_it_is_when_the_claim_is_evicted_while_its_success_is_recorded(stage: Stage) -> None:
    """Or the marker, when it is recorded. The bucket is written first, and read last."""

    def cast(scene: Scene) -> list[Actor]:
        message = scene.message
        deliveries = [scene.delivery(client) for client in (0, 1)]
        loss = Event("claim evicted", message.evict, lambda: message.confirming and message.claimed())
        return [*(delivery.doing(handle) for delivery in deliveries), loss]

    assert stage.explore(cast, 400) == ONE_WINS


# -- failures -----------------------------------------------------------------------------------


def test_tries_are_counted_whoever_fails(stage: Stage) -> None:
    def cast(scene: Scene) -> list[Actor]:
        return [scene.delivery(client).doing(fail) for client in (0, 1)]

    assert stage.explore(cast, 50) == {(NEW, NEW), (NEW, IN_PROGRESS), (IN_PROGRESS, NEW)}


def test_a_failure_hands_over_to_a_copy_that_asks_again(stage: Stage) -> None:
    def cast(scene: Scene) -> list[Actor]:
        return [scene.delivery(0).doing(fail), scene.delivery(1).doing(handle)]

    assert stage.explore(cast, 50) == {(NEW, NEW), (NEW, IN_PROGRESS), (IN_PROGRESS, NEW), (DONE, NEW)}


def failed(scene: Scene) -> None:
    """The first copy has failed, and the message is held."""
    failing = scene.delivery(0)
    failing.do(Delivery.claim)
    failing.do(lambda delivery: delivery.release(hold=30.0))


def test_a_hold_is_ended_by_the_copy_that_failed(stage: Stage) -> None:
    """In whatever process it comes again. Who was waiting gets nothing out of that."""

    def cast(scene: Scene) -> list[Actor]:
        failed(scene)
        again, waiting = scene.delivery(0, process="process5"), scene.delivery(1)
        return [again.doing(handle), waiting.doing(lambda delivery: delivery.claim(poll=True))]

    assert stage.explore(cast, 100) == {(NEW, NEW, DONE), (NEW, NEW, IN_PROGRESS)}


@pytest.mark.parametrize("copy", ["the copy that failed", "another copy"])
def test_a_hold_is_ended_by_time(stage: Stage, copy: str) -> None:
    """And not earlier for one that waits; nor for the copy that failed, if it was given out before that."""

    def cast(scene: Scene) -> list[Actor]:
        failed(scene)
        waiting = scene.delivery(1, copy="nsqd0/a" if copy == "the copy that failed" else "")
        end = Event("hold ends", scene.message.end_lease, scene.message.on_hold)
        return [waiting.doing(lambda delivery: delivery.claim(poll=True)), end]

    assert stage.explore(cast, 4) == {(NEW, NEW), (NEW, IN_PROGRESS)}


# -- the lease of an owner that is still busy ends ----------------------------------------------

LATE = {
    "confirm": Delivery.confirm,
    "release": Delivery.release,
    "extend": Delivery.extend,
    "start": Delivery.start,
}


@pytest.mark.parametrize("copy", ["the same copy", "another copy"])
@pytest.mark.parametrize("late", LATE)
def test_a_stale_owner_leaves_its_successor_alone(stage: Stage, late: str, copy: str) -> None:
    """Its success is recorded all the same, and then nobody is let in any more. The successor needs its lease."""

    def cast(scene: Scene) -> list[Actor]:
        stale = scene.delivery(0)
        stale.do(Delivery.claim)
        successor = scene.delivery(1, copy="nsqd0/a" if copy == "the same copy" else "")
        end = Event("lease ends", scene.message.end_lease)
        return [stale.doing(LATE[late]), successor.doing(handle_at_length), end]

    ends = {(NEW, NEW), (NEW, IN_PROGRESS)}
    assert stage.explore(cast, 100) == (ends | {(NEW, DONE)} if late == "confirm" else ends)


def test_of_two_that_take_over_at_once_one_is_let_in(stage: Stage) -> None:
    def cast(scene: Scene) -> list[Actor]:
        gone, first, second = scene.delivery(0), scene.delivery(0, "nsqd1/a", "process1"), scene.delivery(1, "nsqd2/a")
        gone.do(Delivery.claim)
        scene.message.end_lease()
        return [first.doing(Delivery.claim), second.doing(Delivery.claim)]

    assert stage.explore(cast, 100) == {(NEW, NEW, IN_PROGRESS), (NEW, IN_PROGRESS, NEW)}


def test_a_success_without_a_claim_is_recorded_beside_one_that_has_it(stage: Stage) -> None:
    """The store was away when the one came, and it was handled all the same."""

    def cast(scene: Scene) -> list[Actor]:
        return [scene.delivery(0).doing(Delivery.confirm), scene.delivery(1).doing(handle)]

    assert stage.explore(cast, 20) == {(None, NEW), (None, DONE)}


# -- the same copy again ------------------------------------------------------------------------


def test_a_delayed_claim_of_an_older_delivery_does_not_win(stage: Stage) -> None:
    """Both are of one process, which has given up the older one: nobody hears its answer."""

    def cast(scene: Scene) -> list[Actor]:
        older, newer = (scene.delivery(client, "nsqd0/a", "process0") for client in (0, 1))
        older.heard = False
        return [older.doing(Delivery.claim), newer.doing(handle_at_length)]

    assert {newer for _, newer in stage.explore(cast, 30)} == {NEW}


def test_a_claim_whose_answer_was_lost_is_had_by_asking_again(stage: Stage) -> None:
    """The commands of the first time may still be on their way."""

    def cast(scene: Scene) -> list[Actor]:
        lost, again = scene.delivery(0), scene.delivery(1)
        lost.token, lost.heard = again.token, False
        return [lost.doing(Delivery.claim), again.doing(handle)]

    assert {again for _, again in stage.explore(cast, 20)} == {NEW}


def test_what_a_late_delivery_leaves_behind_goes_by_its_token(stage: Stage) -> None:
    """It added a claim of a message that was done, and takes it away later: perhaps when another has one."""

    def cast(scene: Scene) -> list[Actor]:
        done, late, next_one = scene.delivery(1), scene.delivery(0), scene.delivery(0)
        done.do(Delivery.confirm)
        late.do(Delivery.claim)
        done.do(Delivery.forget)

        def go_on(late: Delivery) -> None:
            late.look_elsewhere()
            next_one.claim()

        return [late.doing(go_on), scene.delivery(1).doing(handle)]

    ends = {end[2:] for end in stage.explore(cast, 50)}
    assert ends == {(NEW, IN_PROGRESS), (IN_PROGRESS, NEW), (DONE, NEW)}


# -- forgetting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("others", ["none", "some"])
def test_what_is_forgotten_after_its_success_was_never_met(stage: Stage, others: str) -> None:
    """What is forgotten before it is done in the end, and where the two cross either may be so."""

    def cast(scene: Scene) -> list[Actor]:
        if others == "some":
            scene.crowd()
        return [scene.delivery(0).doing(handle), scene.delivery(1).doing(Delivery.forget)]

    assert stage.explore(cast, 10) == {(NEW, None)}


# -- the longest scene last: some seconds ---------------------------------------------------------


def test_a_claim_evicted_at_any_time_lets_two_in_but_none_after_a_success(stage: Stage) -> None:
    def cast(scene: Scene) -> list[Actor]:
        message = scene.message
        message.evicted = True
        deliveries = [scene.delivery(client) for client in (0, 1)]
        loss = Event("claim evicted", message.evict, message.claimed)
        return [*(delivery.doing(handle) for delivery in deliveries), loss]

    assert stage.explore(cast, 1000) == {*ONE_WINS, (NEW, NEW)}
