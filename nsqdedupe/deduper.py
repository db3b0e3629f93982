"""The state machine: claim, run, stand by, confirm, release.

It knows neither NSQ nor any store: deliveries come in by `Deduper.take`, what is to become of them goes
out through a `Port`. The life of a message and the reason for every rule are in docs/semantics.md.

    take --NEW--------> ready --work--> running --answer--> confirm -> FIN, its standbys FIN
         |                                                  release -> REQ, its standbys REQ
         |--DONE------> FIN
         `--IN_PROGRESS--> standby of an owner in this process, or waiting for one elsewhere

This file is the way of a message to its handler; `nsqdedupe.outcomes` is the way out, `nsqdedupe.keeper` what
time and lost connections do in between, `nsqdedupe.registry` what the three of them know.

All times are seconds on one monotonic clock. Nothing here blocks unless a handler does: where the store's answers
take a while, they come to `_claimed`, and what they were for may be gone by then.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from nsqdedupe.calls import Calls, Inline
from nsqdedupe.clock import Clock, monotonic
from nsqdedupe.delivery import Care, Delivery, Outcome, Source, State
from nsqdedupe.keeper import OLD_WAITING, Keeper
from nsqdedupe.ledger import Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.observer import Observer
from nsqdedupe.outcomes import AFTER_OTHERS, Outcomes, jitter
from nsqdedupe.port import Port
from nsqdedupe.registry import Registry, poll_from_now_on
from nsqdedupe.shortcut import Shortcut
from nsqdedupe.store import IS_DONE, Answer, Release, Store, Verdict
from nsqdedupe.together import Together
from nsqdedupe.traces import Traces
from nsqdedupe.unprotected import Unprotected

OUTAGE_DELAY = 5.0
"""How long a copy goes back for when the store is away and the user chose to requeue."""

JUST_NOW = 1.0
"""Seconds in which a delivery may be read late and still count as fresh: its message has hardly failed elsewhere."""

# The loops that every message passes look these up once per name, not once per name and member.
_NEW, _DONE = Verdict.NEW, Verdict.DONE
_ARRIVED, _ASKED, _READY, _RUNNING = State.ARRIVED, State.ASKED, State.READY, State.RUNNING
_WAITING, _ANSWERED = State.WAITING, State.ANSWERED
_TRIES, _TRACE, _DOOMED = Care.TRIES, Care.TRACE, Care.DOOMED
_HANDLED = Outcome.HANDLED


class Deduper:
    """Decides what becomes of every delivery. One per reader; serves one thread.

    Args:
        store: remembers messages; None: nothing is de-duplicated.

        port: carries out the decisions.

        events: counters beside the outcomes.

        calls: how the store is called; None: at once, which only a store that does not block may be.

        observe: handle everything; only count, in ``events.observed``, what would have been finished unprocessed.

        max_tries: failed handler runs after which a message is given up; 0: never.

        max_crashes: handler runs that were never heard of again after which it is, too; 0: never. Counted from each
            copy's second delivery on.

        requeue_delay: times the message's tries: how long a failed message waits by default.

        on_store_error: what becomes of messages that cannot be claimed.

        clock: seconds that never go back.
    """

    def __init__(
        self,
        store: Store | None,
        port: Port,
        *,
        events: Events,
        calls: Calls | None = None,
        max_tries: int,
        max_crashes: int = 0,
        requeue_delay: float,
        on_store_error: Literal["process", "requeue"] = "process",
        observe: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        ledger = None
        if store is not None:
            ledger = Ledger(store, calls=calls or Inline(), events=events, clock=clock)
        self._observer = Observer(ledger, events=events, clock=clock) if ledger is not None and observe else None
        self._ledger = None if observe else ledger
        self._port = port
        self._events = events
        self.max_tries = max_tries
        self.requeue_delay = requeue_delay
        self._on_store_error = on_store_error
        self._clock = clock
        self._registry = Registry(clock)
        self._outcomes = Outcomes(
            self._ledger, self._registry, port, events=events, requeue_delay=requeue_delay, clock=clock
        )
        self._keeper = Keeper(ledger, self._registry, self._outcomes, clock)
        self._max_crashes = max_crashes if ledger is not None else 0
        self._traces = Traces(ledger, self._start_traced) if ledger is not None and max_crashes else None
        self._ready: deque[Delivery] = deque()
        self._together = Together(port, self._ready)
        self._answered: list[Delivery] = []
        self._working = False
        self._draining = False
        direct = store.direct if store is not None and not observe else None
        self._shortcut: Shortcut | None = None
        if direct is not None:
            self._shortcut = Shortcut(
                *(direct, self._ready, self._registry, self._outcomes, port, clock),
                ask_for=self._ask_for,
                run_together=self._together.run,
                start=self._start,
                settle=self.settle,
                answer=self.answer,
            )
        self._unprotected: Unprotected | None = None
        if store is None:
            self._unprotected = Unprotected(
                *(self._ready, events, clock),
                max_tries=max_tries,
                run_together=self._together.run,
                start=self._start,
                adopt=self._adopt,
                settle=self.settle,
            )

    # -- arrival ---------------------------------------------------------------------------------

    def sift(self, source: Source, fingerprints: Sequence[bytes]) -> Sequence[int] | None:
        """Which of the messages that have just come are duplicates of what is done, if that can be told at once.

        They are counted, and the caller finishes them. The others it gives to `take` next, as ``sifted``, and does
        nothing else in between.

        Args:
            source: where they come from.

            fingerprints: of one message or more.

        Returns:
            In order, `IS_DONE` for each duplicate, for each other its `Delivery.place`; None if nothing can be told.
        """
        places = self._shortcut.sift(fingerprints) if self._shortcut is not None else None
        if places is not None:
            duplicates = places.count(IS_DONE)
            source.tally.received += duplicates
            source.tally.duplicates += duplicates
        return places

    def take(self, deliveries: Sequence[Delivery], *, sifted: bool = False) -> None:
        """Claim a batch in one call. What is NEW gets ready for `work`; the rest stands by or is finished.

        Args:
            deliveries: one or more, all of one source and read at one time.

            sifted: they are what `sift` has left.
        """
        deliveries[0].source.tally.received += len(deliveries)
        if self._shortcut is not None:
            self._shortcut.take(deliveries, sifted=sifted)
            return
        if self._unprotected is not None:
            self._unprotected.take(deliveries)
            return
        if self._observer is not None:
            self._observer.arrived(deliveries)
        self._ask_for(deliveries)

    def _ask_for(self, deliveries: Sequence[Delivery]) -> None:
        """Find out what is to become of them."""
        ledger, owners = self._ledger, self._registry.owners
        behind = ledger is not None and ledger.behind
        asked = []
        for delivery in deliveries:
            fingerprint = delivery.fingerprint
            if fingerprint in owners:
                self._stand_by(owners[fingerprint], delivery)
            elif fingerprint is None or ledger is None:
                # Where nothing counts the message's tries, nsqd's count of the copy's attempts has to do.
                delivery.tries = delivery.attempts - 1
                delivery.care = _TRIES
                self._get_ready_unprotected(delivery)
            elif behind and ledger.knows(fingerprint):
                self._outcomes.duplicates([delivery])
            else:
                owners[fingerprint] = delivery
                delivery.state = _ASKED
                asked.append(delivery)
        if asked:
            # Only what certainly came after the last failure here, or came just now, can be a redelivery after one.
            since = deliveries[0].since
            poll = since <= self._outcomes.failed_at or self._clock() - since > JUST_NOW
            for delivery, claim in zip(asked, self._registry.claims_for(asked, poll=poll), strict=True):
                delivery.claim = claim
            self._ask(asked, first=True)

    def _ask(self, asked: Sequence[Delivery], *, first: bool = False) -> None:
        """Claim what these deliveries want, and act on each answer."""
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - without a store nothing is asked
        now = self._clock()  # before the call: a lease must not be believed longer than the store's
        claims = [delivery.claim for delivery in asked if delivery.claim is not None]
        ledger.claim(claims, functools.partial(self._claimed, asked, now, first=first))

    def _claimed(self, asked: Sequence[Delivery], now: float, answers: Sequence[Answer | None], *, first: bool) -> None:
        """The store has answered."""
        waited = self._ledger is not None and self._ledger.waits
        if waited:
            asked, answers = self._still_here(asked, answers)
        ready, max_crashes = self._ready, self._max_crashes
        done: list[Delivery] = []
        unanswered: list[Delivery] = []
        for delivery, answer in zip(asked, answers, strict=True):
            if answer is None:
                unanswered.append(delivery)
                continue
            verdict = answer[0]
            if verdict is _NEW:
                if delivery.state is _WAITING:
                    self._registry.waiting.remove(delivery)
                    self._events.takeovers += 1
                if answer[1] or max_crashes:
                    self._take_care(delivery, answer)
                delivery.claimed_at = now
                delivery.state = _READY
                ready.append(delivery)
            elif verdict is _DONE:
                done += self._registry.remove(delivery)
                done.append(delivery)
            else:
                self._not_now(delivery, answer, now)
        if done:
            self._outcomes.duplicates(done)
        self._out_of_reach(unanswered)
        if first and waited:
            self._port.looked_up(asked)

    def _take_care(self, delivery: Delivery, answer: Answer) -> None:
        if answer.tries:
            delivery.tries = answer.tries
            delivery.care = _TRIES
        if self._max_crashes and (answer.starts or delivery.attempts > 1):
            delivery.care = _DOOMED if answer.starts >= self._max_crashes else _TRACE

    def _not_now(self, delivery: Delivery, answer: Answer, now: float) -> None:
        """Another copy is being handled, or a failed one is held."""
        if answer.held:
            self._outcomes.defer_group(delivery, answer.lease_left + AFTER_OTHERS + jitter())
        else:
            self._wait(delivery, answer.lease_left, now)

    def _still_here(
        self, asked: Sequence[Delivery], answers: Sequence[Answer | None]
    ) -> tuple[list[Delivery], list[Answer | None]]:
        """Without those that went away while the store was asked; a claim that they got is given back."""
        here: list[Delivery] = []
        theirs: list[Answer | None] = []
        for delivery, answer in zip(asked, answers, strict=True):
            gone = delivery.state is _ANSWERED
            if not gone and delivery.source.open:
                here.append(delivery)
                theirs.append(answer)
                continue
            if answer is not None and answer.verdict is _NEW and delivery.claim is not None:
                self._outcomes.give_back([Release(delivery.claim)])
            if not gone:
                # Its connection was lost: those that stand by it on others ask for themselves.
                self._outcomes.abandon_owner(delivery)
        return here, theirs

    def _get_ready_unprotected(self, delivery: Delivery) -> None:
        if self._observer is None:
            self._events.unprotected += 1
        delivery.protected = False
        delivery.state = _READY
        self._ready.append(delivery)

    def _out_of_reach(self, asked: Sequence[Delivery]) -> None:
        """The store did not answer: handle the messages all the same, or send them back."""
        for delivery in asked:
            if delivery.state is _WAITING:
                # Somebody was handling it when the store was last heard.
                self._registry.waiting.later(delivery)
            elif self._on_store_error == "process":
                delivery.claimed_at = self._clock()
                self._get_ready_unprotected(delivery)
            else:
                self._outcomes.defer_group(delivery, OUTAGE_DELAY + jitter())

    # -- standing by -----------------------------------------------------------------------------

    def _stand_by(self, owner: Delivery, delivery: Delivery) -> None:
        """Another copy of this message is here already: share its outcome."""
        if owner.state is _WAITING and self._room() <= 0:
            self._outcomes.defer(delivery, AFTER_OTHERS + jitter())
            return
        self._events.standbys += 1
        delivery.state = State.STANDBY
        self._port.hold(delivery)
        if owner.owner == delivery.owner:
            owner.superseded = True
        older = self._registry.join(owner, delivery)
        if older is not None:
            self._outcomes.abandon(older)

    def _room(self) -> int:
        return 0 if self._draining else self._port.waiting_limit() - self._registry.waiting.copies

    def _wait(self, delivery: Delivery, lease_left: float, now: float) -> None:
        """The owner is elsewhere: ask again, ever more slowly."""
        if delivery.state is not _WAITING:
            if self._room() <= 0:
                self._outcomes.defer_group(delivery, AFTER_OTHERS + jitter())
                return
            if self._clock() - delivery.since > delivery.source.msg_timeout * OLD_WAITING:
                self._outcomes.defer_group(delivery, lease_left + AFTER_OTHERS + jitter())
                return
            self._events.standbys += 1
            poll_from_now_on(delivery)
            self._registry.waiting.add(delivery)
            self._port.hold(delivery)
        delivery.claimed_at = now + lease_left - delivery.source.lease
        self._registry.waiting.later(delivery, lease_left + 1.0)

    def _poll(self) -> None:
        """Ask again for those whose owner is elsewhere, or gone."""
        due = self._registry.waiting.due()
        if due and self._port.paused():
            self._registry.waiting.pause(due)
        elif due:
            self._ask(due)

    # -- running ---------------------------------------------------------------------------------

    def work(self, until: float) -> bool:
        """Ask again where it is time, start what is ready until the clock says ``until``, then settle.

        At least one is started. Returns True if some are left.
        """
        if self._registry.waiting:
            self._poll()
        self._working = True
        try:
            if self._shortcut is not None:
                self._shortcut.run(until)
            elif self._unprotected is not None:
                self._unprotected.run(until)
            else:
                self._run_ready(until)
        finally:
            self._working = False
            self.settle()
        return bool(self._ready)

    def _run_ready(self, until: float) -> None:
        ready, clock, run = self._ready, self._clock, self._port.run
        now = clock()
        while ready:
            delivery = ready.popleft()
            if delivery.state is not _READY:
                continue
            if delivery.care or now - delivery.since > delivery.source.fresh_for or delivery.claim is None:
                self._start(delivery, now)
            else:
                delivery.state = _RUNNING
                if run(delivery):
                    delivery.outcome = _HANDLED
                    self._answered.append(delivery)
            now = clock()
            if now >= until:
                break

    def next_poll(self) -> float | None:
        """When `work` should be called next, by the clock; None: when something happens."""
        return self._registry.waiting.next_poll()

    def _start(self, delivery: Delivery, now: float) -> None:
        if delivery.state is not _READY:
            return
        source = delivery.source
        if now - delivery.since > source.ours_for:
            # nsqd is about to give it out again: that delivery will be handled, this one is not ours any more.
            self._outcomes.let_go(delivery)
            return
        if delivery.protected and now - delivery.claimed_at > source.lease / 2:
            self._renew(delivery, now)
            return
        if delivery.care is _TRACE and self._traces is not None:
            self._traces.leave(delivery)
            return
        delivery.state = _RUNNING
        if 0 < self.max_tries <= delivery.tries or delivery.care is _DOOMED:
            self._port.give_up(delivery)
        elif self._port.run(delivery):
            self.answer(delivery, _HANDLED)
        else:
            self._adopt(delivery, now)

    def _adopt(self, delivery: Delivery, now: float) -> None:
        """Its handler was called, and has not succeeded in one go: what has no claim has a lease all the same."""
        if delivery.claim is None and delivery.outcome is None:
            delivery.claimed_at = now
            self._keeper.unclaimed.add(delivery)

    def _renew(self, delivery: Delivery, now: float) -> None:
        """Extend the leases of this one and of all that wait for their turn. Those that are still ours go on."""
        old = [
            other
            for other in (delivery, *self._ready)
            if other.state is _READY and other.protected and now - other.claimed_at > other.source.lease / 2
        ]
        for other in old:
            other.state = _ASKED

        def extended(lost: Sequence[Delivery]) -> None:
            for other in lost:
                poll_from_now_on(other)
            kept = [other for other in old if other not in lost]
            for other in kept:
                if other.source.open:
                    other.state = _READY
                else:
                    self._outcomes.let_go(other)
            # To where they were: what comes of their old places in the queue is that each is met twice.
            self._ready.extendleft(reversed(kept))
            if self._shortcut is not None:
                self._shortcut.look_again()
            if lost:
                self._ask(lost)

        self._keeper.extend(old, now, extended)

    def _start_traced(self, delivery: Delivery, *, ours: bool) -> None:
        if not ours:
            poll_from_now_on(delivery)
            self._ask([delivery])
        elif not delivery.source.open:
            self._outcomes.let_go(delivery)
        else:
            delivery.state = _READY
            self._ready.appendleft(delivery)
            self.work(-math.inf)  # this one, and no other

    def touch(self, delivery: Delivery) -> None:
        """The handler asks for more time: its lease starts anew, as nsqd's timeout does."""
        if delivery.state is not _RUNNING:
            return
        delivery.since = self._clock()
        if delivery.claim is not None:
            self._keeper.extend([delivery], delivery.since)
        else:
            delivery.claimed_at = delivery.since

    def answer(self, delivery: Delivery, outcome: Outcome, delay: float | None = None) -> None:
        """Say how a handler run ended. Only the first answer of a delivery counts.

        Args:
            delivery: what was given to `Port.run` or `Port.give_up`.

            outcome: how it ended.

            delay: with FAILED and CANCELLED, the seconds it shall wait; None: after FAILED
                ``requeue_delay`` times the message's tries, after CANCELLED about a second.
        """
        if delivery.outcome is not None:
            return
        delivery.outcome = outcome
        if delay is not None:
            delivery.delay = delay
        self._answered.append(delivery)
        if not self._working:
            self._port.wake()

    def settle(self) -> bool:
        """Confirm and release what was answered, in one call each; only then answer nsqd. `work` ends with it.

        Returns True if there was anything.
        """
        if not self._answered:
            return False
        answered, self._answered = self._answered, []
        self._keeper.unclaimed.difference_update(answered)
        if self._observer is not None:
            self._observer.answered(answered)
        self._outcomes.settle(answered)
        return True

    # -- time and connections --------------------------------------------------------------------

    def tick(self) -> None:
        """Look after leases, and after copies that waited too long. To be called a few times a second."""
        self._keeper.tick()

    def opened(self, source: Source) -> None:
        """A connection is there."""
        self._keeper.opened(source)

    def lost(self, source: Source) -> None:
        """A connection is gone, and with it every answer that it still owed. Handlers that run go on."""
        self._keeper.lost(source, self._ready)

    def drain(self) -> None:
        """Send back who waits for an owner elsewhere, now and from now on: this reader is about to stop."""
        self._draining = True
        self._keeper.drain()

    def count(self) -> None:
        """Bring the counters up to date. Only while a handler runs can they be behind."""
        self._together.count()

    @property
    def copies_wait(self) -> bool:
        """Whether copies may have to wait for others, that is, whether anything is de-duplicated."""
        return self._ledger is not None

    @property
    def behind(self) -> bool:
        """Whether a success is still to be recorded, by a `tick` when the store is back."""
        return self._ledger is not None and self._ledger.behind

    def in_hand(self) -> Iterable[Delivery]:
        """The owners of messages in this process, ready, running or waiting; and what nobody has looked at yet."""
        fresh = [delivery for delivery in self._ready if delivery.state is _ARRIVED and delivery.fingerprint]
        return [*self._registry.owners.values(), *fresh]
