"""Consumer processes and their world, for tests that let hypothesis do what it likes.

What must hold at every step is asserted where it happens.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from harness import Gate, SlowCalls, run_in_one_loop
from simulated_nsq import MSG_TIMEOUT, Arrival, Copy, GuardedStore, Link, Message, Nsqd, PlainStore, Run

from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Outcome, State
from nsqdedupe.metrics import Events, Tally
from nsqdedupe.testing import ManualClock

MAX_TRIES = 2
UNANSWERED = (State.ARRIVED, State.ASKED)


class Process:
    """A consumer process: a Deduper, and the Port that answers nsqd and calls handlers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gate = Gate(world.store)
        self.limit = world.limit
        self.stopped = False
        self.links: dict[str, Link] = {}
        self.tallies: list[tuple[Link, Tally]] = []
        self.looked_at = world.clock()
        self.looked = 0
        self.open: list[Arrival] = []
        """What was taken and not answered yet."""
        self.pending: list[Arrival] = []
        """Whose handlers have not answered; nsqd may have been answered long ago."""
        self.calls = SlowCalls()
        self.deduper = Deduper(
            world.store if world.direct else self.gate,
            self,
            events=Events(),
            calls=self.calls if world.slow else None,
            max_tries=MAX_TRIES,
            requeue_delay=3.0,
            on_store_error=world.policy,
            clock=world.clock,
        )

    # -- connections -----------------------------------------------------------------------------

    def link(self, nsqd: Nsqd) -> Link:
        """The connection to an nsqd, made if there is none."""
        link = self.links.get(nsqd.name)
        if link is None:
            link = self.links[nsqd.name] = Link(nsqd)
            link.seen_empty = self.world.clock()
            nsqd.links.append(link)
            self.tallies.append((link, link.source.tally))
            self.deduper.opened(link.source)
        return link

    def notice(self, link: Link) -> None:
        """The consumer learns that a connection is gone."""
        link.alive = False
        if self.links.get(link.nsqd.name) is link:
            del self.links[link.nsqd.name]
            self.deduper.lost(link.source)

    def read(self) -> None:
        """Take what the sockets hold, a batch for each connection."""
        for link in self.links.values():
            batch, link.buffer = link.buffer, []
            for arrival in batch:
                arrival.since = link.seen_empty
                arrival.taken = self.world.moment()
            self.open += batch
            if batch:
                self.deduper.take(batch)
            for arrival in batch:
                self._note_end_of_hold(arrival)

    def _note_end_of_hold(self, arrival: Arrival) -> None:
        """A fresh delivery of the copy that failed ends the hold, whatever becomes of it then."""
        message = arrival.copy.message
        late = self.world.clock() - arrival.since > 1.0
        if message.hold is not None and message.hold[1] is arrival.copy and arrival.state is State.READY and not late:
            message.hold = None

    def look_after(self) -> None:
        """What a reader does a few times a second."""
        self.looked_at = self.world.clock()
        self.looked = self.world.moment()
        self.deduper.tick()
        self.work()

    def idle_for(self) -> float:
        """Seconds since it looked after its deliveries."""
        return self.world.clock() - self.looked_at

    # -- handlers --------------------------------------------------------------------------------

    def work(self) -> None:
        while self.deduper.work(math.inf):
            pass

    @staticmethod
    def succeed(message: Message) -> None:
        assert not message.done or message.disturbed, "handled after it was over"
        message.successes += 1

    def answer(self, arrival: Arrival, outcome: Outcome, delay: float | None = None) -> None:
        """A handler ends."""
        message = arrival.copy.message
        if outcome is Outcome.HANDLED:
            self.succeed(message)
        elif outcome is Outcome.FAILED:
            message.failures += 1
            arrival.failed_at = self.world.clock()
        elif outcome is Outcome.INVALID:
            message.invalid = True
        if arrival in self.pending:
            self.pending.remove(arrival)
        arrival.runs_since = None
        self.deduper.answer(arrival, outcome, delay)

    def run(self, delivery: Delivery, /) -> bool:
        assert isinstance(delivery, Arrival)
        message = delivery.copy.message
        assert not message.successes or message.disturbed, "run after it was handled"
        assert not message.given_up or message.disturbed, "run after it was given up"
        assert message.disturbed or message not in self.world.running(), "run twice at a time"
        if not message.disturbed:
            self._check_tries(delivery)
        assert self.world.clock() - delivery.since <= MSG_TIMEOUT, "started after its timeout"
        run = message.runs.pop(0) if message.runs else Run.SUCCEED
        if run is Run.SLOW:
            self.world.pass_time(4.0)
            self.answer(delivery, Outcome.HANDLED)
        elif run is Run.SUCCEED:
            self.succeed(message)
            return True
        elif run is Run.FAIL:
            self.answer(delivery, Outcome.FAILED)
        elif run is Run.FAIL_AT_ONCE:
            self.answer(delivery, Outcome.FAILED, 0.0)
        elif run is Run.CANCEL:
            self.answer(delivery, Outcome.CANCELLED)
        elif run is Run.INVALID:
            self.answer(delivery, Outcome.INVALID)
        else:
            delivery.runs_since = self.world.clock() if run is Run.COROUTINE else None
            delivery.never = run is Run.NEVER and message.fingerprint is not None
            self.pending.append(delivery)
        return False

    def run_on(
        self, ready: deque[Delivery], count: int, record: Callable[[bytes, int], None], until: float, /
    ) -> Delivery | None:
        return run_in_one_loop(self, self.deduper, ready, count, record, lambda: self.world.clock() >= until)

    def _check_tries(self, arrival: Arrival) -> None:
        """Tries are counted once each, and spaced as with one copy."""
        message = arrival.copy.message
        assert message.failures < MAX_TRIES, "run once too often"
        if message.hold is not None:
            assert self.world.clock() >= message.hold[0], "run while it was held"

    # -- the rest of the Port --------------------------------------------------------------------

    def give_up(self, delivery: Delivery, /) -> None:
        assert isinstance(delivery, Arrival)
        message = delivery.copy.message
        failures = message.failures if message.fingerprint is not None else delivery.attempts - 1
        assert failures >= MAX_TRIES, "given up too early"
        assert not message.done or message.disturbed, "given up after it was over"
        if message.hook_failures:
            message.hook_failures -= 1
            self.deduper.answer(delivery, Outcome.CANCELLED)
        else:
            message.given_up = True
            self.deduper.answer(delivery, Outcome.GIVEN_UP)

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None:
        for delivery in deliveries:
            arrival = self._close(delivery)
            message = arrival.copy.message
            unwanted = ran and arrival.outcome is Outcome.INVALID
            assert message.successes or message.given_up or unwanted, "finished a message that was not handled"
            self._answer_nsqd(arrival, None)

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None:
        arrival = self._close(delivery)
        assert 0 <= delay <= 3600
        assert delay or ran
        self._answer_nsqd(arrival, delay)

    def abandon(self, delivery: Delivery, /) -> None:
        self._close(delivery)

    def hold(self, delivery: Delivery, /) -> None:
        assert delivery in self.open
        assert delivery.state in (State.STANDBY, State.WAITING)

    def looked_up(self, deliveries: Sequence[Delivery], /) -> None:
        for delivery in deliveries:
            assert isinstance(delivery, Arrival)
            self._note_end_of_hold(delivery)

    def wake(self) -> None:
        """The reader works often enough here."""

    def waiting_limit(self) -> int:
        return self.limit

    def paused(self) -> bool:
        return self.stopped

    def _close(self, delivery: Delivery) -> Arrival:
        assert isinstance(delivery, Arrival)
        assert delivery.state is State.ANSWERED
        self.open.remove(delivery)  # a second answer finds nothing to remove
        if delivery.outcome is Outcome.FAILED:
            assert delivery.delay is not None
            delivery.copy.message.hold = (delivery.failed_at + delivery.delay, delivery.copy)
        return delivery

    def _answer_nsqd(self, arrival: Arrival, delay: float | None) -> None:
        if delay is not None and arrival.fingerprint is not None:
            others = [other for other in self.open if other.copy is arrival.copy and other.state not in UNANSWERED]
            assert all(other.taken < arrival.taken for other in others), "an older delivery took back the newest"
        assert arrival.source.open, "answered over a connection known to be gone"
        arrival.link.nsqd.answer(arrival.link, arrival.copy, delay, self.world.clock())

    # -- what must hold between two steps --------------------------------------------------------

    def calls_are_over(self) -> bool:
        """Whether nothing is under way to the store or back."""
        return not (self.calls.sent or self.calls.answered)

    def check(self) -> None:
        owners = list(self.deduper.in_hand())
        held = [delivery for owner in owners for delivery in (owner, *(owner.standbys or {}).values())]
        protected = [arrival for arrival in self.open if arrival.fingerprint is not None]
        assert {id(delivery) for delivery in held} == {id(arrival) for arrival in protected}
        assert len(held) == len(protected)
        for owner in owners:
            asked = () if self.calls_are_over() else (State.ASKED,)
            fresh = (State.ARRIVED,) if self.world.direct else ()
            assert owner.state in (State.READY, State.RUNNING, State.WAITING, *asked, *fresh)
            assert all(standby.state is State.STANDBY for standby in (owner.standbys or {}).values())
        for delivery in held:
            assert isinstance(delivery, Arrival)
            if delivery.state in (State.STANDBY, State.WAITING) and delivery.taken < self.looked:
                assert self.looked_at - delivery.since < MSG_TIMEOUT, "kept until nsqd gives it out again"
        due = self.deduper.next_poll()
        if self.calls_are_over():
            assert (due is None) == (not any(owner.state is State.WAITING for owner in owners))
        for link, tally in self.tallies:
            assert tally.in_flight == sum(arrival.link is link for arrival in self.open)


class World:
    """Some nsqds, some processes and one store."""

    def __init__(self, nsqds: int, processes: int, limit: int, policy: str, *, slow: bool, direct: bool) -> None:
        self.direct = direct
        """Whether handlers that succeed in one go have no claim."""
        self.slow = slow
        """Whether calls of the store take their time."""
        self.clock = ManualClock()
        self.store: PlainStore = self._new_store()
        self.limit = limit
        self.policy = policy
        self.nsqds = [Nsqd(name) for name in "abc"[:nsqds]]
        self.processes = [Process(self) for _ in range(processes)]
        self.messages: list[Message] = []
        self._moments = itertools.count(1)

    def _new_store(self) -> PlainStore:
        return PlainStore(self.clock) if self.direct else GuardedStore(self.clock)

    def moment(self) -> int:
        """Ever later: the clock may stand still between two events."""
        return next(self._moments)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for process in self.processes:
            for arrival in [arrival for arrival in process.open if arrival.claim is not None]:
                # Whoever else asks now gets the message, though its handler may still succeed.
                if arrival.state is State.RUNNING and arrival.claimed_at + arrival.source.lease <= self.clock():
                    message = arrival.copy.message
                    cared_for = arrival.runs_since is not None and process.idle_for() <= 5.0
                    # While the store is away, which disturbs every message, no lease can be extended.
                    assert not cared_for or message.disturbed, "a coroutine lost its lease"
                    message.disturbed = True

    def running(self) -> list[Message]:
        """The messages whose handlers have not answered, in all processes."""
        return [arrival.copy.message for process in self.processes for arrival in process.pending]

    def publish(self, nsqds: Sequence[Nsqd], runs: Sequence[Run], hook_failures: int, protected: bool) -> None:
        name = str(len(self.messages))
        message = Message(name, runs, hook_failures, protected)
        for nsqd in nsqds:
            if not protected:
                message = Message(f"{name}/{nsqd.name}", runs, hook_failures, protected)
            copy = Copy(message, nsqd)
            nsqd.copies[copy.id] = copy
            self.messages.append(message)

    def send(self, nsqd: Nsqd, process: Process, count: int) -> None:
        """Nsqd gives messages out to a process."""
        link = process.link(nsqd)
        if not link.alive:
            return
        now = self.clock()
        if not link.buffer:
            link.seen_empty = now
        for copy in [copy for copy in nsqd.copies.values() if copy.until <= now][:count]:
            copy.client = link
            copy.until = now + MSG_TIMEOUT
            copy.attempts += 1
            link.buffer.append(Arrival(copy, link))

    def crash(self, number: int, *, store_survives: bool, late: int) -> None:
        """A process is killed, and started again. Some of its calls may still be under way to the store."""
        process = self.processes[number]
        process.calls.execute(late)
        # A success that was not confirmed yet dies with the process; a handler that runs cannot succeed any more.
        hit = [arrival.copy.message for arrival in process.open if arrival.outcome is not None]
        for link in process.links.values():
            link.alive = False
        if not store_survives:
            self.store = self._new_store()
            hit = self.messages
        for message in hit:
            message.disturbed = True
        self.processes[number] = Process(self)

    def evict(self, number: int) -> None:
        """The store loses a claim, a hold or a count of tries, as a shared one may."""
        if self.store.kept():
            fingerprint = self.store.lose(number)
            for message in self.messages:
                if message.fingerprint == fingerprint:
                    message.disturbed = True

    def may_die(self, nsqd: Nsqd) -> bool:
        """Whether every message that is not over has a copy on another nsqd."""
        others = {
            copy.message for other in self.nsqds if other.alive and other is not nsqd for copy in other.copies.values()
        }
        return all(copy.message.over or copy.message in others for copy in nsqd.copies.values())
