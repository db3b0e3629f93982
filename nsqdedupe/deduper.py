"""The state machine: claim, run, stand by, confirm, release.

It knows neither NSQ nor any store: deliveries come in by `Deduper.take`, what is to become of them goes
out through a `Port`. The life of a message and the reason for every rule are in docs/semantics.md.

    take --NEW--------> ready --work--> running --answer--> confirm -> FIN, its standbys FIN
         |                                                  release -> REQ, its standbys REQ
         |--DONE------> FIN
         `--IN_PROGRESS--> standby of an owner in this process, or waiting for one elsewhere

All times are seconds on one monotonic clock. Nothing here blocks unless the store or a handler does.
"""

from __future__ import annotations

import os
import random
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from nsqdedupe.clock import Clock, monotonic
from nsqdedupe.delivery import Delivery, Outcome, Source, State
from nsqdedupe.ledger import Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.port import Port
from nsqdedupe.store import Claim, Release, Store, Verdict
from nsqdedupe.waiting import Waiting

MAX_DELAY = 3600.0
"""Nsqd refuses a longer requeue by default."""

MAX_LEASE = 3600.0
"""How long a running coroutine keeps its message."""

OUTAGE_DELAY = 5.0
"""How long a copy goes back for when the store is away and the user chose to requeue."""

JUST_NOW = 1.0
"""Seconds in which a delivery may be read late and still count as fresh: its message has hardly failed elsewhere."""

OLD_STANDBY = 0.8
"""Share of its message timeout after which a standby goes back, before nsqd gives it out again."""

OLD_WAITING = 0.5
"""The same for a copy whose owner is elsewhere: the store may need the rest."""

_CONFIRMS = (Outcome.HANDLED, Outcome.GIVEN_UP)

# The loops that every message passes look these up once per name, not once per name and member.
_NEW, _DONE = Verdict.NEW, Verdict.DONE
_READY, _RUNNING, _WAITING, _ANSWERED = State.READY, State.RUNNING, State.WAITING, State.ANSWERED
_HANDLED = Outcome.HANDLED
_nonce = struct.Struct(">8sQ").pack
_new_claim = tuple.__new__  # half the time of a named tuple's own constructor


def jitter() -> float:
    """A little more than nothing, so that copies that go back together do not come back together."""
    return random.uniform(0.1, 0.5)


class Deduper:
    """Decides what becomes of every delivery. One per reader; serves one thread.

    Args:
        store: remembers messages; None: nothing is de-duplicated.

        port: carries out the decisions.

        events: counters beside the outcomes.

        max_tries: failed handler runs after which a message is given up; 0: never.

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
        max_tries: int,
        requeue_delay: float,
        on_store_error: Literal["process", "requeue"] = "process",
        clock: Clock = monotonic,
    ) -> None:
        self._ledger = Ledger(store, events=events, clock=clock) if store is not None else None
        self._port = port
        self._events = events
        self.max_tries = max_tries
        self.requeue_delay = requeue_delay
        self._on_store_error = on_store_error
        self._clock = clock
        self._incarnation = os.urandom(8)
        self._serial = 0
        self._active: dict[bytes, Delivery] = {}
        self._ready: deque[Delivery] = deque()
        self._waiting = Waiting(clock)
        self._unclaimed: set[Delivery] = set()
        """Those that run without a message's registry: they have no fingerprint, or nothing is de-duplicated."""
        self._answered: list[Delivery] = []
        self._working = False
        self._failed_at = float("-inf")
        self._sweep_every = 1.0
        self._swept_at = clock()

    # -- arrival ---------------------------------------------------------------------------------

    def take(self, deliveries: Sequence[Delivery]) -> None:
        """Claim a batch in one call. What is NEW gets ready for `work`; the rest stands by or is finished.

        Args:
            deliveries: one or more, all of one source and read at one time.
        """
        source = deliveries[0].source
        source.tally.received += len(deliveries)
        ledger, active = self._ledger, self._active
        behind = ledger is not None and ledger.behind
        # Only what certainly came after the last failure here, or came just now, can be a redelivery after one.
        since = deliveries[0].since
        poll = since <= self._failed_at or self._clock() - since > JUST_NOW
        lease, incarnation, serial = source.lease, self._incarnation, self._serial
        asked = []
        for delivery in deliveries:
            fingerprint = delivery.fingerprint
            if fingerprint in active:
                self._stand_by(active[fingerprint], delivery)
            elif fingerprint is None or ledger is None:
                self._get_ready_unprotected(delivery)
            elif behind and ledger.knows(fingerprint):
                self._duplicates([delivery])
            else:
                active[fingerprint] = delivery
                serial += 1
                nonce = _nonce(incarnation, serial)
                delivery.claim = _new_claim(Claim, (fingerprint, delivery.owner, nonce, lease, poll))
                asked.append(delivery)
        self._serial = serial
        if asked:
            self._ask(asked)

    def _ask(self, asked: Sequence[Delivery]) -> None:
        """Claim what these deliveries want, and act on each answer."""
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - without a store nothing is asked
        now = self._clock()  # before the call: a lease must not be believed longer than the store's
        answers = ledger.claim([delivery.claim for delivery in asked if delivery.claim is not None])
        if answers is None:
            self._out_of_reach(asked)
            return
        ready = self._ready
        done: list[Delivery] = []
        for delivery, (verdict, tries, lease_left, held) in zip(asked, answers, strict=True):
            if verdict is _NEW:
                if delivery.state is State.WAITING:
                    self._waiting.remove(delivery)
                    self._events.takeovers += 1
                if tries:
                    delivery.tries = tries
                delivery.claimed_at = now
                delivery.state = _READY
                ready.append(delivery)
            elif verdict is _DONE:
                done += self._pop_group(delivery)
                done.append(delivery)
            elif held:
                self._defer_group(delivery, lease_left + 1.0 + jitter())
            else:
                self._wait(delivery, lease_left, now)
        if done:
            self._duplicates(done)

    def _get_ready_unprotected(self, delivery: Delivery) -> None:
        self._events.unprotected += 1
        delivery.protected = False
        delivery.state = State.READY
        self._ready.append(delivery)

    def _out_of_reach(self, asked: Sequence[Delivery]) -> None:
        """The store did not answer: handle the messages all the same, or send them back."""
        for delivery in asked:
            if delivery.state is State.WAITING:
                # Somebody was handling it when the store was last heard.
                self._waiting.later(delivery)
            elif self._on_store_error == "process":
                delivery.claimed_at = self._clock()
                self._get_ready_unprotected(delivery)
            else:
                self._defer_group(delivery, OUTAGE_DELAY + jitter())

    # -- standing by -----------------------------------------------------------------------------

    def _stand_by(self, owner: Delivery, delivery: Delivery) -> None:
        """Another copy of this message is here already: share its outcome."""
        if owner.state is State.WAITING and self._room() <= 0:
            self._defer(delivery, 1.0 + jitter())
            return
        self._events.standbys += 1
        delivery.state = State.STANDBY
        self._port.hold(delivery)
        if owner.owner == delivery.owner:
            owner.superseded = True
        if owner.standbys is None:
            owner.standbys = [delivery]
            return
        for other in owner.standbys:
            if other.owner == delivery.owner:
                owner.standbys.remove(other)
                self._abandon(other)
                break
        owner.standbys.append(delivery)

    def _room(self) -> int:
        return self._port.waiting_limit() - self._waiting.copies()

    def _wait(self, delivery: Delivery, lease_left: float, now: float) -> None:
        """The owner is elsewhere: ask again, ever more slowly."""
        if delivery.state is not State.WAITING:
            if self._room() <= 0:
                self._defer_group(delivery, 1.0 + jitter())
                return
            self._events.standbys += 1
            self._was_waiting(delivery)
            self._waiting.add(delivery)
            self._port.hold(delivery)
        delivery.claimed_at = now + lease_left - delivery.source.lease
        self._waiting.later(delivery, lease_left + 1.0)

    @staticmethod
    def _was_waiting(delivery: Delivery) -> None:
        """It asks again, maybe for a message that failed meanwhile: it shall not end the hold."""
        assert delivery.claim is not None  # noqa: S101 - it was answered
        delivery.claim = delivery.claim._replace(poll=True)

    def _poll(self) -> None:
        """Ask again for those whose owner is elsewhere, or gone."""
        due = self._waiting.due()
        if due and self._port.paused():
            self._waiting.pause(due)
        elif due:
            self._ask(due)

    def _promote(self, standbys: Sequence[Delivery]) -> None:
        """Their owner left without an outcome: the first asks for the message at the next poll."""
        if not standbys:
            return
        heir, *others = standbys
        fingerprint = heir.fingerprint
        assert fingerprint is not None  # noqa: S101 - what has no fingerprint never stands by
        heir.standbys = others or None
        heir.claimed_at = self._clock() - heir.source.lease  # nobody is known to have it
        self._serial += 1
        nonce = _nonce(self._incarnation, self._serial)
        heir.claim = Claim(fingerprint, heir.owner, nonce, heir.source.lease, poll=True)
        self._active[fingerprint] = heir
        self._waiting.add(heir)
        self._port.wake()

    @staticmethod
    def _lease_left(delivery: Delivery, now: float) -> float:
        return max(0.0, delivery.claimed_at + delivery.source.lease - now)

    # -- running ---------------------------------------------------------------------------------

    def work(self, until: float) -> bool:
        """Ask again where it is time, start what is ready until the clock says ``until``, then settle.

        At least one is started. Returns True if some are left.
        """
        if self._waiting:
            self._poll()
        self._working = True
        ready, clock, run = self._ready, self._clock, self._port.run
        now = clock()
        try:
            while ready:
                delivery = ready.popleft()
                if delivery.state is not _READY:
                    continue
                if now - delivery.since > delivery.source.fresh_for or delivery.claim is None or delivery.tries:
                    self._start(delivery, now)
                else:
                    delivery.state = _RUNNING
                    if run(delivery):
                        delivery.outcome = _HANDLED
                        self._answered.append(delivery)
                now = clock()
                if now >= until:
                    break
        finally:
            self._working = False
            if self._answered:
                self.settle()
        return bool(ready)

    def next_poll(self) -> float | None:
        """When `work` should be called next, by the clock; None: when something happens."""
        return self._waiting.next_poll()

    def _start(self, delivery: Delivery, now: float) -> None:
        source = delivery.source
        if now - delivery.since > source.ours_for:
            # nsqd is about to give it out again: that delivery will be handled, this one is not ours any more.
            self._let_go(delivery)
            return
        if delivery.protected and now - delivery.claimed_at > source.lease / 2 and not self._renew(delivery, now):
            return
        delivery.state = State.RUNNING
        # Where nothing counts the message's tries, nsqd's count of the copy's attempts has to do.
        tries = delivery.tries if delivery.claim is not None else delivery.attempts - 1
        if 0 < self.max_tries <= tries:
            self._port.give_up(delivery)
        elif self._port.run(delivery):
            self.answer(delivery, _HANDLED)
        elif delivery.claim is None and delivery.outcome is None:
            delivery.claimed_at = now
            self._unclaimed.add(delivery)

    def _renew(self, delivery: Delivery, now: float) -> bool:
        """Extend the leases of all that wait for their turn; False if this one's claim was lost."""
        old = [
            other
            for other in (delivery, *self._ready)
            if other.state is State.READY and other.protected and now - other.claimed_at > other.source.lease / 2
        ]
        lost = self._extend(old, now)
        for other in lost:
            self._was_waiting(other)
        if lost:
            self._ask(lost)
        return delivery not in lost

    def _extend(self, deliveries: Sequence[Delivery], now: float) -> list[Delivery]:
        """Let leases start anew; returns those whose claim is another's now."""
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - who has a claim has it from a store
        ours = ledger.extend([delivery.claim for delivery in deliveries if delivery.claim is not None])
        for delivery in deliveries:
            delivery.claimed_at = now
        return [delivery for delivery, mine in zip(deliveries, ours, strict=True) if not mine]

    def touch(self, delivery: Delivery) -> None:
        """The handler asks for more time: its lease starts anew, as nsqd's timeout does."""
        if delivery.state is not State.RUNNING:
            return
        delivery.since = self._clock()
        if delivery.claim is not None:
            self._extend([delivery], delivery.since)
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

    # -- outcomes --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Confirm and release what was answered, in one call each; only then answer nsqd. `work` ends with it."""
        answered, self._answered = self._answered, []
        self._unclaimed.difference_update(answered)
        confirmed = [d for d in answered if d.outcome in _CONFIRMS and d.claim is not None]
        if confirmed:
            self._confirm(confirmed)
        if len(confirmed) < len(answered):
            self._release([d for d in answered if d.outcome not in _CONFIRMS])
        handled: list[Delivery] = []
        done: list[Delivery] = []
        for delivery in answered:
            if delivery.state is not _RUNNING:
                # Its lease ended and it was let go: a success is recorded, a failure has touched nothing.
                continue
            if delivery.outcome is _HANDLED and delivery.source.open and not delivery.superseded:
                delivery.source.tally.handled += 1
                done += self._pop_group(delivery)
                delivery.state = _ANSWERED
                handled.append(delivery)
            else:
                # In the order of the answers: a backoff begins and ends with them.
                self._port.finish(handled, ran=True)
                handled = []
                self._end(delivery)
        self._port.finish(handled, ran=True)
        self._duplicates(done)

    def _confirm(self, deliveries: Sequence[Delivery]) -> None:
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - who has a claim has it from a store
        ours = ledger.confirm([delivery.claim for delivery in deliveries if delivery.claim is not None])
        if not all(ours):
            late = [d for d, mine in zip(deliveries, ours, strict=True) if d.protected and not mine]
            self._events.late_confirms += len(late)

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Settle on the delay of each run that did not succeed, and give its claim up for that long."""
        releases = []
        for delivery in deliveries:
            failed = delivery.outcome is Outcome.FAILED
            delay = delivery.delay
            if delivery.outcome is Outcome.INVALID:
                delay = 0.0
            elif delay is None:
                tries = delivery.tries + 1 if delivery.claim is not None else delivery.attempts
                delay = self.requeue_delay * tries if failed else 1.0 + jitter()
            delivery.delay = min(delay, MAX_DELAY)
            if delivery.claim is not None:
                releases.append(Release(delivery.claim, failed, delivery.delay if failed else 0.0))
        self._give_back(releases)
        self._failed_at = self._clock()

    def _give_back(self, releases: Sequence[Release]) -> None:
        if self._ledger is not None and releases:
            self._ledger.release(releases)

    def _end(self, delivery: Delivery) -> None:
        """Answer nsqd for a run, and for those that shared its outcome."""
        outcome = delivery.outcome
        back = outcome is Outcome.FAILED or outcome is Outcome.CANCELLED
        standbys = self._pop_group(delivery)
        delivery.state = _ANSWERED
        delay = delivery.delay or 0.0
        self._count(delivery)
        if delivery.superseded or not delivery.source.open:
            self._port.abandon(delivery)
        elif back:
            self._port.requeue(delivery, delay, ran=outcome is Outcome.FAILED)
        else:
            self._port.finish([delivery], ran=True)
        if outcome in _CONFIRMS:
            self._duplicates(standbys)
        elif back:
            for standby in standbys:
                self._defer(standby, delay + (1.0 if delay else 0.0) + jitter())
        else:
            self._promote(standbys)

    @staticmethod
    def _count(delivery: Delivery) -> None:
        tally = delivery.source.tally
        outcome = delivery.outcome
        if not delivery.source.open and not delivery.superseded:
            tally.unanswered += 1
        elif outcome is Outcome.HANDLED:
            tally.handled += 1
        elif outcome is Outcome.GIVEN_UP:
            tally.given_up += 1
        elif outcome is Outcome.INVALID:
            tally.invalid += 1
        else:
            tally.failed += 1

    def _duplicates(self, deliveries: Sequence[Delivery]) -> None:
        """Finish copies of a message that is done."""
        for delivery in deliveries:
            delivery.state = _ANSWERED
            delivery.source.tally.duplicates += 1
        self._port.finish(deliveries, ran=False)

    def _defer(self, delivery: Delivery, delay: float) -> None:
        """Send a copy back without a run."""
        delivery.state = State.ANSWERED
        delivery.source.tally.deferred += 1
        self._port.requeue(delivery, min(delay, MAX_DELAY), ran=False)

    def _defer_group(self, delivery: Delivery, delay: float) -> None:
        """Send a copy back without a run, and those that stood by it."""
        for standby in self._pop_group(delivery):
            self._defer(standby, delay)
        self._defer(delivery, delay)

    def _abandon(self, delivery: Delivery) -> None:
        delivery.state = State.ANSWERED
        delivery.source.tally.unanswered += 1
        self._port.abandon(delivery)

    def _let_go(self, delivery: Delivery) -> None:
        """It has the message but will not be handled: another copy may have it at once."""
        if delivery.claim is not None:
            self._give_back([Release(delivery.claim)])
        standbys = self._pop_group(delivery)
        self._abandon(delivery)
        self._promote(standbys)

    def _pop_group(self, delivery: Delivery) -> list[Delivery]:
        """Take a delivery out of the registry; those that stood by it are the caller's business now."""
        fingerprint = delivery.fingerprint
        if fingerprint is not None and self._active.get(fingerprint) is delivery:
            del self._active[fingerprint]
        if delivery.state is _WAITING:
            self._waiting.remove(delivery)
        standbys = delivery.standbys
        if standbys is None:
            return []
        delivery.standbys = None
        return standbys

    # -- time and connections --------------------------------------------------------------------

    def tick(self) -> None:
        """Look after leases, and after copies that waited too long. To be called a few times a second."""
        now = self._clock()
        if now - self._swept_at < self._sweep_every:
            return
        self._swept_at = now
        if self._ledger is not None:
            self._ledger.catch_up()
        renewed = []
        for delivery in list(self._active.values()):
            if delivery.standbys or delivery.state is State.WAITING:
                self._send_back_old(delivery, now)
            if delivery.state is State.RUNNING and delivery.outcome is None:
                age = now - delivery.claimed_at
                if self._is_running(delivery, now):
                    if age > delivery.source.lease / 2:
                        renewed.append(delivery)
                elif age >= delivery.source.lease:
                    self._let_go(delivery)
        if renewed:
            # Who lost its claim runs on: its success will be recorded, its failure will touch nothing.
            self._extend(renewed, now)

        self._let_unclaimed_go(now)

    def _let_unclaimed_go(self, now: float) -> None:
        """Count as unanswered what has no claim whose lease could end."""
        for delivery in list(self._unclaimed):
            over = now - delivery.claimed_at >= delivery.source.lease
            if over and delivery.outcome is None and not self._is_running(delivery, now):
                self._unclaimed.remove(delivery)
                self._abandon(delivery)

    @staticmethod
    def _is_running(delivery: Delivery, now: float) -> bool:
        """Whether its handler is known to run still; of others nobody knows whether they will ever be answered."""
        return delivery.runs_since is not None and now - delivery.runs_since < MAX_LEASE

    def _send_back_old(self, owner: Delivery, now: float) -> None:
        """Requeue who has waited so long that nsqd would soon give it out again."""
        waiting = owner.state is State.WAITING
        share = OLD_WAITING if waiting else OLD_STANDBY
        delay = self._lease_left(owner, now) + 1.0 + jitter()
        standbys, owner.standbys = owner.standbys or [], []
        for standby in standbys:
            if now - standby.since > standby.source.msg_timeout * share:
                self._defer(standby, delay)
            else:
                owner.standbys.append(standby)
        if waiting and now - owner.since > owner.source.msg_timeout * share:
            self._defer_group(owner, delay)

    def opened(self, source: Source) -> None:
        """A connection is there."""
        self._sweep_every = min(self._sweep_every, source.msg_timeout / 8)

    def lost(self, source: Source) -> None:
        """A connection is gone, and with it every answer that it still owed. Handlers that run go on."""
        source.open = False
        for delivery in list(self._ready):
            if delivery.source is source and delivery.state is State.READY:
                self._let_go(delivery)
        for delivery in list(self._active.values()):
            gone = [s for s in delivery.standbys or () if s.source is source]
            for standby in gone:
                self._abandon(standby)
            delivery.standbys = [s for s in delivery.standbys or () if s not in gone] or None
            if delivery.source is source and delivery.state is State.WAITING:
                standbys = self._pop_group(delivery)
                self._abandon(delivery)
                self._promote(standbys)

    def drain(self) -> None:
        """Send back who waits for an owner elsewhere: this reader is about to stop."""
        for delivery in self._waiting.all():
            self._defer_group(delivery, self._lease_left(delivery, self._clock()) + 1.0 + jitter())

    def in_hand(self) -> Iterable[Delivery]:
        """The owners of messages in this process: ready, running or waiting."""
        return self._active.values()
